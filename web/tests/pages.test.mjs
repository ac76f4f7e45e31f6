// Every page, the home page and Play in a browser, with a real server and a real model: make test-web.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, describe, test } from "node:test";
import { gzipSync } from "node:zlib";
import { api, base, figure, opened, serving, settled } from "./browser.mjs";
import { skip } from "./started.mjs";

// One text in all tests of Play: a text of another length is another program to compile.
const PLAY = "/play/?example=induction+head";
const PATHS = ["/", PLAY, "/explorer/", "/benchmarks/", "/training/"];
const SCRIPT_BYTES = 300_000; // of a page's scripts, compressed
const SHIFT = 0.1; // cumulative layout shift that is still good, by web.dev
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** In the page: the sum of its layout shifts. */
function shifted() {
  return new Promise((resolve) => {
    let sum = 0;
    new PerformanceObserver((list) => {
      for (const x of list.getEntries()) if (!x.hadRecentInput) sum += x.value;
    }).observe({ type: "layout-shift", buffered: true });
    setTimeout(() => resolve(sum), 200);
  });
}

/** In the page: numbers everything that Tab should reach, and returns its HTML. */
function numbered() {
  const all = [...document.querySelectorAll("a[href], button, select, input, textarea, summary, [tabindex='0']")];
  const isReached = (x) => {
    if (x.disabled || x.tabIndex < 0 || !x.checkVisibility({ visibilityProperty: true })) return false;
    if (x.closest("details:not([open])") && x.localName !== "summary") return false;
    return x.type !== "radio" || x.checked; // arrows reach the others
  };
  const found = all.filter(isReached);
  found.forEach((x, i) => (x.dataset.number = i));
  document.activeElement.blur();
  return found.map((x) => x.outerHTML.slice(0, 90));
}

describe("pages", { skip, timeout: 300_000 }, () => {
  serving();

  /** The colours of the map of one head: they change with its mask. */
  const mask = (page) => page.locator("svg.blocks").evaluate((x) => [...x.querySelectorAll("rect")].map((r) => r.style.fill).join());

  for (const path of PATHS) {
    describe(path, () => {
      let page;
      before(async () => {
        page = await opened(path);
      });
      after(() => page.context().close());

      test("loads without errors, from this server alone, without jumps, in little script", async () => {
        const scripts = page.asked.filter((x) => x.endsWith(".js"));
        const sizes = await Promise.all(
          scripts.map(async (x) => gzipSync(Buffer.from(await (await fetch(x)).arrayBuffer())).length),
        );
        const total = sizes.reduce((a, b) => a + b, 0);
        const shift = await page.evaluate(shifted);
        assert.deepEqual(page.errors, []);
        assert.deepEqual(page.asked.filter((x) => !x.startsWith(`${base}/`)), []);
        assert.ok(total > 50_000 && total < SCRIPT_BYTES, `${total} bytes of script`);
        assert.ok(shift < SHIFT, `layout shift ${shift.toFixed(3)}`);
        console.log(`${path}: ${(total / 1000).toFixed(0)} kB of script, layout shift ${shift.toFixed(3)}`);
      });

      test("can be reached by the keyboard alone", async () => {
        const wanted = await page.evaluate(numbered);
        const seen = new Set();
        for (let i = 0; i < 1.2 * wanted.length + 10; i += 1) {
          await page.keyboard.press("Tab");
          seen.add(await page.evaluate(() => document.activeElement.dataset.number));
        }
        assert.ok(wanted.length > 8);
        assert.deepEqual(wanted.filter((_, i) => !seen.has(String(i))), []);
      });

      test("has no serious violation of accessibility in either theme", async () => {
        await page.addScriptTag({ content: AXE });
        for (const colorScheme of ["light", "dark"]) {
          await page.emulateMedia({ colorScheme });
          // Rows of a table are alike, and only colours depend on the theme: three rows, and contrast, are enough.
          const { violations } = await page.evaluate((isDark) => {
            const rules = isDark ? { runOnly: ["color-contrast"] } : {};
            return window.axe.run({ exclude: ["tbody tr:nth-child(n+4)"] }, rules);
          }, colorScheme === "dark");
          const serious = violations
            .filter((x) => ["serious", "critical"].includes(x.impact))
            .map((x) => `${x.id}: ${x.nodes.map((n) => `${n.html.slice(0, 120)} ${n.any[0]?.message ?? ""}`).join(" | ")}`);
          assert.deepEqual(serious, [], colorScheme);
        }
      });

      test("fits a phone and a 4K screen", async () => {
        for (const width of [390, 3840]) {
          await page.setViewportSize({ width, height: 900 });
          await page.waitForTimeout(300); // charts are drawn again
          const found = await page.evaluate(() => document.documentElement.scrollWidth);
          assert.ok(found <= width, `${found} px of content on ${width} px`);
        }
      });
    });
  }

  test("home: every headline is a link to its result file, and the drawing answers", async () => {
    const page = await opened("/");
    await page.locator(".headlines li").first().waitFor();
    const links = await page.locator(".headlines a[aria-label]").evaluateAll((all) => all.map((x) => x.getAttribute("href")));
    assert.equal(links.length, 4);
    for (const link of links) assert.equal((await fetch(base + link)).status, 200);
    const training = page.locator(".headlines li", { has: page.locator("a[href*='training-']") });
    const name = (await training.getByRole("link").first().innerText()).trim();
    const { rows } = await api(`/api/rows?result=${name}`);
    const said = await training.innerText();
    assert.ok(rows.length > 2);
    for (const { run: one } of rows) assert.ok(said.includes(one), `${one} is not named: ${said}`);
    await page.locator("svg.wide").getByRole("button", { name: /^xla/ }).click();
    await page.getByText("Plain JAX that loops over the listed blocks").waitFor();
    await page.context().close();
  });

  test("play: the density changes masks and numbers, and they are the server's", async () => {
    const page = await opened(PLAY);
    const before = { mask: await mask(page), kept: await figure(page, "mass kept"), next: await page.locator(".bars").innerText() };
    const slider = page.getByRole("slider", { name: /Density/ });
    await slider.fill("0.35");
    await page.waitForURL(/density=0.35/);
    await page.waitForFunction((old) => document.querySelector(".bars").innerText !== old, before.next);
    await settled(page);
    assert.notEqual(await mask(page), before.mask);
    const id = page.asked.find((x) => x.includes("/method"))?.split("/")[6];
    const found = await api(`/api/play/texts/${id}/method?method=hads&density=0.35`);
    assert.equal(await figure(page, "mass kept"), found.mean_recall.toFixed(3));
    assert.notEqual(await figure(page, "mass kept"), before.kept);
    assert.equal(await figure(page, "KL of next word"), found.next_kl.toFixed(4));
    assert.equal((await page.locator(".bars tbody tr").count()), found.next.length);
    const words = await api(`/api/play/texts/${id}/words?method=hads&density=0.35`);
    assert.equal(await page.locator("mark.changed").count(), words.changed.length);
    assert.ok(words.changed.length > 0);
    await page.context().close();
  });

  test("play: methods at equal density change other words; the address is the state", async () => {
    const page = await opened(`${PLAY}&density=0.3&compare=1`);
    const marked = () => page.locator("mark.changed").evaluateAll((all) => all.map((x) => x.textContent).join("|"));
    const before = await marked();
    await page.getByText("random", { exact: true }).first().click();
    await page.waitForURL(/method=random/);
    await page.getByText("With random at density 0.300").waitFor();
    await settled(page);
    assert.notEqual(await marked(), before);
    await page.getByText("All methods are measured").waitFor();
    const densities = await page.locator("section:has(h2:text('All methods')) tbody td:nth-child(2)").allInnerTexts();
    assert.equal(densities.length, 8);
    for (const x of densities) assert.ok(Math.abs(Number(x) - 0.3) < 0.005, x);
    const head = page.getByRole("group", { name: "Layers and heads" }).locator("button[aria-pressed=true]");
    await head.focus();
    await page.keyboard.press("ArrowUp");
    await page.waitForURL(/layer=3/);
    const text = await page.locator("h2", { hasText: "Layer 3, head 1" }).innerText();
    await page.reload();
    await settled(page);
    assert.equal(await page.locator("h2", { hasText: "Layer 3, head 1" }).innerText(), text);
    assert.ok(await page.getByRole("radio", { name: "random" }).isChecked());
    await page.context().close();
  });

  test("play: a text of one's own is read and is in the address; the script is the server's", async () => {
    const page = await opened(PLAY);
    await page.locator("textarea").fill("The sea was calm. ".repeat(30));
    await page.getByRole("button", { name: "Read this text" }).click();
    await page.getByText(/^1\d\d tokens in \d+ blocks of 16/).waitFor();
    await page.waitForURL(/#text=/);
    await settled(page);
    await page.getByRole("button", { name: /Copy as Python/ }).first().click();
    await page.getByText("Copied").waitFor();
    const script = await page.evaluate(() => navigator.clipboard.readText());
    assert.match(script, /text = 'The sea was calm/);
    assert.match(script, /hads.make\(profile, /);
    await page.reload();
    await settled(page);
    assert.match(await page.locator("textarea").inputValue(), /^The sea was calm/);
    await page.context().close();
  });

  /** The row of HADS in the table of methods is in sight, above the tour. */
  async function seen(page) {
    await page.getByText("All methods are measured").waitFor();
    await page.waitForFunction(() => {
      const row = document.querySelector("[data-panel=methods] tbody tr")?.getBoundingClientRect();
      return row && row.top > 0 && row.bottom < document.querySelector(".tour").getBoundingClientRect().top;
    });
    assert.equal(await page.locator("[data-panel=methods] tbody tr").first().locator("button").innerText(), "HADS");
  }

  test("play: the tour runs to its end by the keyboard", async () => {
    const page = await opened(`${PLAY}&tour=1`);
    for (let step = 1; step <= 5; step += 1) {
      await page.getByRole("heading", { name: new RegExp(`^${step} of 5`) }).waitFor();
      await settled(page);
      if (step === 5) await seen(page);
      await page.getByRole("button", { name: step === 5 ? "Done" : "Next" }).focus();
      await page.keyboard.press("Enter");
    }
    await page.waitForURL((url) => !url.searchParams.has("tour"));
    assert.equal(await page.locator(".tour").count(), 0);
    assert.ok(await page.getByRole("radio", { name: "HADS" }).isChecked(), "back from the random blocks of the last step");
    assert.deepEqual(page.errors, []);
    await page.context().close();
  });

  test("play: the tour begins with its own text, whatever the page showed", async () => {
    const { examples } = await api("/api/play/model");
    const { text } = examples.find((x) => x.name === "induction head");
    for (const start of ["/play/?tour=1", "/play/?tour=1&example=sink+head"]) {
      const page = await opened(start);
      await page.getByRole("heading", { name: /^1 of 5/ }).waitFor();
      assert.equal(await page.locator("textarea").inputValue(), text, start);
      assert.equal(await page.getByRole("button", { name: "induction head" }).getAttribute("aria-pressed"), "true");
      const posted = await page.locator(".reading").innerText();
      assert.equal(posted.replace(/\s+/g, " ").slice(0, 60), text.replace(/\s+/g, " ").slice(0, 60));
      await page.context().close();
    }
  });

  test("play: results of the text before are faded while a text is read, and gone when it is refused", async () => {
    const page = await opened(PLAY);
    const old = await page.locator(".reading").innerText();
    const held = [];
    await page.route("**/api/play/texts", (route) => held.push(route));
    await page.getByRole("button", { name: "sink head" }).click();
    await page.locator(".outdated").waitFor();
    assert.notEqual(await page.locator("textarea").inputValue(), old);
    assert.equal(await page.locator(".outdated .reading").innerText(), old, "marks are on the text that they belong to");
    assert.ok(Number(await page.locator(".outdated").evaluate((x) => getComputedStyle(x).opacity)) < 0.5);
    assert.equal(held.length, 1);
    await held[0].fulfill({ status: 413, contentType: "application/json", body: JSON.stringify({ detail: "the text has too many characters" }) });
    await page.getByText("This text was refused: the text has too many characters.").waitFor();
    assert.equal(await page.locator(".reading, .numbers, svg.blocks").count(), 0);
    await page.unroute("**/api/play/texts");
    await page.getByRole("button", { name: "induction head" }).click();
    await settled(page);
    assert.equal(await page.locator(".reading").innerText(), old);
    await page.context().close();
  });
});
