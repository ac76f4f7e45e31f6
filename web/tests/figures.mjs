// The screenshots of the README: node tests/figures.mjs BASE, with `xsake serve` running at BASE.
import { join } from "node:path";
import { launch, ROOT } from "./started.mjs";

const FIGURES = {
  "play.png": { path: "/play/?example=induction+head&density=0.5", from: "[data-panel=map]", height: 900 },
  "explorer.png": { path: "/explorer/?layer=4&head=1", from: "main .panel", height: 900 },
  "training.png": {
    path: "/training/?run=training-37m-2026-11-15.hads-mean-query-0&with=training-37m-2026-11-15.dense-0&at=7000",
    from: "section[aria-label^=Replay]",
    height: 900,
  },
};

const base = process.argv[2] ?? "http://127.0.0.1:8000";
const browser = await launch();
for (const [name, { path, from, height }] of Object.entries(FIGURES)) {
  const page = await browser.newPage({ viewport: { width: 1200, height }, colorScheme: "light" });
  for (let visit = 0; visit < 2; visit += 1) {
    await page.goto(base + path); // twice: the first visit compiles, and would show those seconds
    await page.waitForTimeout(1000);
    await page.waitForFunction(() => !document.querySelector(".wait, .stale, [aria-busy=true]"), null, { timeout: 90_000 });
  }
  await page.evaluate((selector) => document.querySelector(selector).scrollIntoView(), from);
  await page.waitForTimeout(500);
  await page.screenshot({ path: join(ROOT, "docs", "figures", name) });
}
await browser.close();
