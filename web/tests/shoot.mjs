// Screenshots of pages: node tests/shoot.mjs BASE FOLDER [path ...]; light and dark, narrow and wide.
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";

const [base, folder, ...paths] = process.argv.slice(2);
const pages = paths.length ? paths : ["/", "/play/", "/explorer/", "/benchmarks/", "/training/"];
mkdirSync(folder, { recursive: true });
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
for (const colorScheme of ["light", "dark"]) {
  for (const width of [390, 1440]) {
    const page = await browser.newPage({ colorScheme, viewport: { width, height: 900 } });
    page.on("console", (message) => message.type() === "error" && console.log(page.url(), message.text()));
    page.on("pageerror", (error) => console.log(page.url(), String(error)));
    for (const path of pages) {
      await page.goto(base + path);
      await page.waitForTimeout(1000);
      await page.waitForFunction(() => !document.querySelector(".wait, .stale, [aria-busy=true]"), null, { timeout: 90_000 });
      await page.waitForTimeout(1000);
      const name = path.replace(/[^a-z0-9]+/gi, "-").replace(/^-|-$/g, "") || "home";
      await page.screenshot({ path: `${folder}/${name.slice(0, 40)}-${colorScheme}-${width}.png`, fullPage: true });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      if (wide > width) console.log(`${path} is ${wide} px wide at ${width}`);
    }
    await page.close();
  }
}
await browser.close();
