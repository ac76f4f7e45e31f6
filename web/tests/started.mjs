// What the tests start: a server with the built pages, a training run, and a browser.
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = join(dirname(fileURLToPath(import.meta.url)), "..", "..");
export const python = process.env.PYTHON ?? "python3";
const CHROMIUM = process.env.CHROMIUM ? [process.env.CHROMIUM] : ["/usr/bin/chromium", "/usr/bin/chromium-browser"];
const executablePath = CHROMIUM.find(existsSync);

/** Why the tests cannot run here, or false. */
export const skip = executablePath
  ? false
  : "there is no Chromium here: install Debian's package chromium, or set CHROMIUM to the path of one";

/** A folder for the runs of the tests. */
export const folder = skip ? "" : mkdtempSync(join(tmpdir(), "xsake-web-"));

const children = [];
const environment = { ...process.env, OPENBLAS_NUM_THREADS: "1", JAX_PLATFORMS: "cpu", PYTHONPATH: ROOT };

function started(args, more = {}) {
  const child = spawn(python, args, { cwd: ROOT, env: { ...environment, ...more }, stdio: ["ignore", "pipe", "pipe"] });
  children.push(child);
  child.said = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (child.said += data));
  return child;
}

/** The port is bound before the server listens. */
async function answering(base) {
  for (let i = 0; i < 300; i += 1) {
    const isUp = await fetch(`${base}/health`).then((x) => x.ok, () => false);
    if (isUp) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`${base} does not answer`);
}

/** The address of `xsake serve` on a free port. */
export function serve() {
  const child = started(["-m", "xsake", "serve", "--port", "0", "--no-warm", "--runs", join(folder, "runs")]);
  return new Promise((resolve, reject) => {
    child.stdout.on("data", () => {
      const found = /serving on (http:\S+)/.exec(child.said);
      if (found) void answering(found[1]).then(() => resolve(found[1]), reject);
    });
    child.on("exit", (code) => reject(new Error(`xsake serve ended with ${code}: ${child.said}`)));
  });
}

/** A run that trains until it is killed; most of its time would be XLA's optimiser's. */
export const train = () =>
  started([join(ROOT, "web", "tests", "train.py"), folder], { JAX_DISABLE_MOST_OPTIMIZATIONS: "1" });

export const launch = () => chromium.launch({ executablePath, args: ["--no-sandbox"] });

export function end() {
  for (const child of children) child.kill("SIGKILL");
  rmSync(folder, { recursive: true, force: true });
}
