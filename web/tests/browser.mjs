// What the files of tests share: one server and one browser for each, and pages that have loaded.
import { after, before } from "node:test";
import { end, launch, serve } from "./started.mjs";

/** The server's address, once it runs. */
export let base;
let browser;

/** Call it in a `describe`: the server and the browser live as long as it. */
export function serving() {
  before(async () => {
    [base, browser] = await Promise.all([serve(), launch()]);
  });
  after(async () => {
    await browser?.close();
    end();
  });
}

/** A page that has loaded all that it shows; its errors and its requests are recorded. */
export async function opened(path, options = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 900 },
    permissions: ["clipboard-read", "clipboard-write"],
    reducedMotion: "reduce",
    ...options,
  });
  const page = await context.newPage();
  page.errors = [];
  page.asked = [];
  page.on("console", (message) => message.type() === "error" && page.errors.push(message.text()));
  page.on("pageerror", (error) => page.errors.push(String(error)));
  page.on("request", (request) => page.asked.push(request.url()));
  await page.goto(base + path);
  await settled(page);
  return page;
}

/** Nothing on the page waits for an answer any more. */
export async function settled(page) {
  await page.waitForFunction(
    () => document.querySelector("main h1") && !document.querySelector(".wait, .stale, [aria-busy=true]"),
    null,
    { timeout: 60_000 },
  );
}

export const api = async (path) => (await fetch(base + path)).json();
export const figure = (page, name) => page.locator(".numbers div", { hasText: name }).locator("dd").innerText();
