// The pages in a browser, with a real server, a real model and a real run: make test-web.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, before, describe, test } from "node:test";
import { gzipSync } from "node:zlib";
import { end, launch, python, serve, skip, train } from "./started.mjs";

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
  let base;
  let browser;
  let run;

  before(async () => {
    [base, browser] = await Promise.all([serve(), launch()]);
  });
  after(async () => {
    await browser?.close();
    end();
  });

  /** A page that has loaded all that it shows; its errors and its requests are recorded. */
  async function opened(path, options = {}) {
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
  async function settled(page) {
    await page.waitForFunction(
      () => document.querySelector("main h1") && !document.querySelector(".wait, .stale, [aria-busy=true]"),
      null,
      { timeout: 60_000 },
    );
  }

  const api = async (path) => (await fetch(base + path)).json();
  const figure = (page, name) => page.locator(".numbers div", { hasText: name }).locator("dd").innerText();
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

  test("explorer: least density, estimates and measurements are those of the chosen length", async () => {
    const page = await opened("/explorer/?profile=profile-64");
    await page.getByRole("link", { name: /^shipped-hads-64/ }).first().waitFor();
    for (const length of [512, 4096]) {
      await page.getByLabel("Length").selectOption(String(length));
      await page.waitForURL(new RegExp(`length=${length}`));
      const { least_density_ratio: least } = await api(`/api/profiles/profile-64/plan?density=1&length=${length}`);
      await page.getByText(`at least density ${least.toFixed(2)} at ${length.toLocaleString("en")} tokens`).waitFor();
      await settled(page);
      const table = page.getByRole("region", { name: "Cost and quality of the two plans" });
      assert.equal(await table.getByText(`not measured at ${length.toLocaleString("en")} tokens`).count(), 2);
      assert.equal(await table.getByRole("link").count(), 0);
      assert.equal(await table.getByText("no estimate").count(), length > 2048 ? 6 : 0);
      assert.equal(await page.getByText(/^Why there is no estimate: /).count(), length > 2048 ? 1 : 0);
    }
    await page.context().close();
  });

  /** Ticks, labels and circles of the charts that lie outside of them. */
  const outside = (page) =>
    page.locator(".chart svg").evaluateAll((all) =>
      all.flatMap((svg) => {
        const { top, bottom, left, right } = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text, line, circle")]
          .map((x) => ({ text: x.textContent, rect: x.getBoundingClientRect() }))
          .filter(({ rect: x }) => x.top < top - 1 || x.bottom > bottom + 1 || x.left < left - 1 || x.right > right + 1);
      }),
    );

  test("benchmarks: ticks lie inside the plot, and clearing the filters keeps the file", async () => {
    const { results } = await api("/api/results");
    const { name } = results.find((x) => x.name.startsWith("hads-64-"));
    const page = await opened(`/benchmarks/?file=${name}&contains=longformer`);
    assert.deepEqual(await outside(page), []);
    const status = page.locator("[aria-label=Filters] [role=status]").first();
    const few = await status.innerText();
    await page.getByLabel("Search in all columns").fill("nothing is called so");
    await page.getByText("No row matches these filters.").first().waitFor();
    await page.getByRole("button", { name: "Clear the filters" }).click();
    await page.waitForURL((url) => !url.searchParams.has("contains"));
    await settled(page);
    assert.equal(await page.getByLabel("Result file").first().inputValue(), name);
    assert.notEqual(await status.innerText(), few);
    await page.goto(`${base}/benchmarks/`);
    await settled(page);
    assert.match(await page.getByLabel("Result file").first().inputValue(), /^(hopper-2|hads-64-)/);
    await page.context().close();
  });

  test("benchmarks: files of every kind have a chart, and no chart has a cloud of lines", async () => {
    const { results } = await api("/api/results");
    const page = await opened("/benchmarks/");
    for (const kind of ["tasks-final-", "parallel-", "tpu-estimate-", "first-step-", "hopper-nsa-", "smollm2-", "hads-64-"]) {
      const { name } = results.find((x) => x.name.startsWith(kind));
      await page.goto(`${base}/benchmarks/?file=${name}`);
      await settled(page);
      assert.ok((await page.locator(".chart svg circle").count()) > 0, name);
      assert.deepEqual(await outside(page), [], name);
    }
    // 34 methods, in a chart for each kind of method
    const { rows } = await api(`/api/rows?result=${results.find((x) => x.name.startsWith("hads-64-")).name}`);
    assert.equal(await page.locator(".panels .chart svg").count(), new Set(rows.map((x) => x.kind)).size);
    assert.ok((await page.getByRole("region", { name: "Rows" }).getByRole("columnheader").count()) < Object.keys(rows[0]).length);
    await page.getByRole("checkbox", { name: /show all/ }).check();
    await page.waitForURL(/columns=all/);
    assert.equal(await page.getByRole("region", { name: "Rows" }).getByRole("columnheader").count(), Object.keys(rows[0]).length);
    assert.deepEqual(page.errors, []);
    await page.context().close();
  });

  test("benchmarks: every measurement of a file has a name of its own", async () => {
    const { results } = await api("/api/results");
    const page = await opened("/benchmarks/");
    for (const kind of ["counters-", "certificate-one-key-", "tpu-estimate-"]) {
      const { name, rows, description } = results.find((x) => x.name.startsWith(kind));
      await page.goto(`${base}/benchmarks/?file=${name}`);
      await settled(page);
      await page.getByText(description).first().waitFor();
      const [, cases] = /of (\d+) cases/.exec(await page.locator(".chart svg").last().getAttribute("aria-label"));
      assert.equal(Number(cases), rows, name);
    }
    await page.context().close();
  });

  test("a table that is wider than a phone says so, and scrolls by the keyboard", async () => {
    const page = await opened("/benchmarks/", { viewport: { width: 390, height: 844 } });
    const region = page.getByRole("region", { name: "Result files" });
    const hint = page.locator("section", { has: region }).locator(".sideways");
    assert.match(await hint.innerText(), /scroll sideways/);
    await region.focus();
    await page.keyboard.press("End");
    for (let i = 0; i < 40; i += 1) await page.keyboard.press("ArrowRight");
    await page.waitForFunction(() => document.querySelector("[aria-label='Result files']").scrollLeft > 50);
    await page.setViewportSize({ width: 2560, height: 900 });
    await hint.waitFor({ state: "detached" });
    await page.context().close();
  });

  test("explorer: budgets follow density and policy; the plan downloads", async () => {
    const page = await opened("/explorer/");
    const shares = () => page.getByRole("group", { name: /^Budgets by/ }).first().locator("button").evaluateAll((all) => all.map((x) => x.title).join());
    const before = await shares();
    await page.getByRole("slider").fill("0.3");
    await page.waitForURL(/density=0.3/);
    await page.getByText(/all heads together\s+30.0%/).first().waitFor();
    await settled(page);
    const changed = await shares();
    assert.notEqual(changed, before);
    await page.locator("input[name=policy][value=kl]").check({ force: true });
    await page.getByRole("heading", { name: "Budgets by KL" }).waitFor();
    await settled(page);
    assert.notEqual(await shares(), changed);
    const [download] = await Promise.all([
      page.waitForEvent("download"),
      page.getByRole("link", { name: /Download the plan by kl/ }).click(),
    ]);
    const file = readFileSync(await download.path());
    const header = JSON.parse(file.subarray(8, 8 + Number(file.readBigUInt64LE(0))).toString());
    assert.ok(Object.keys(header).length > 1, "a safetensors file with arrays");
    const drawn = () => page.getByRole("img", { name: /^Blocks of/ }).innerHTML();
    const window = await drawn();
    await page.getByLabel("left", { exact: true }).fill("640");
    await page.waitForURL(/p.left=640/);
    await page.waitForFunction((old) => document.querySelector("svg[aria-label^='Blocks of']").innerHTML !== old, window);
    const { density_ratio: density } = await api("/api/masks?rule=sink_window&length=2048&block=64&first=64&left=640&right=0");
    await page.getByText(`Density ${density.toFixed(3)} of causal blocks`).waitFor();
    await page.context().close();
  });

  test("benchmarks: every file is listed; filters, sorting, downloads and the script work", async () => {
    const page = await opened("/benchmarks/");
    const { results } = await api("/api/results");
    assert.equal(await page.getByRole("region", { name: "Result files" }).locator("tbody tr").count(), results.length);
    await page.locator("label", { hasText: "Result file" }).locator("select").selectOption("every");
    const all = await api("/api/rows?limit=1");
    await page.getByText(`${all.total.toLocaleString("en")} rows`).waitFor();
    await page.getByLabel("Direction").selectOption("direction=backward");
    const some = await api("/api/rows?where=direction=backward&limit=5000");
    await page.getByText(`${some.total.toLocaleString("en")} rows`).waitFor();
    assert.ok(some.total > 0 && some.total < all.total);
    await settled(page);
    assert.ok((await page.locator(".chart svg circle").count()) > 10);
    await page.getByRole("button", { name: "teraflops", exact: true }).click();
    await page.waitForURL(/sort=teraflops/);
    const [csv] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: "CSV" }).click()]);
    assert.equal(readFileSync(await csv.path(), "utf8").trim().split("\r\n").length, some.total + 1);
    const [json] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: "JSON", exact: true }).first().click()]);
    assert.equal(JSON.parse(readFileSync(await json.path(), "utf8")).rows.length, some.total);
    await page.getByRole("button", { name: /Copy as Python/ }).click();
    await page.getByText("Copied", { exact: true }).waitFor();
    const script = await page.evaluate(() => navigator.clipboard.readText());
    assert.equal(execFileSync(python, ["-c", script], { encoding: "utf8" }).split(" ")[0], String(some.total));
    await page.context().close();
  });

  // The run of the last test compiles its step while this one runs.
  test("training: a finished run plays, pauses and is scrubbed; two runs have a difference", async () => {
    run = train();
    const page = await opened("/training/?run=shipped&speed=5");
    const step = async () => Number(await page.getByRole("slider", { name: /Step/ }).inputValue());
    assert.equal(await step(), 8000);
    await page.getByRole("button", { name: /Play/ }).click();
    await page.waitForFunction(() => Number(document.querySelector("input[type=range]").value) % 8000 > 1000);
    const loss = await figure(page, "training loss");
    await page.getByRole("button", { name: /Pause/ }).click();
    const paused = await step();
    await page.waitForTimeout(300);
    assert.equal(await step(), paused);
    await page.getByRole("slider", { name: /Step/ }).fill("120");
    await page.waitForURL(/at=120/);
    assert.notEqual(await figure(page, "training loss"), loss);
    assert.equal(await figure(page, "training loss"), (await api("/api/runs/shipped/events")).events.find((x) => x.step === 120).loss_nats.toFixed(3));
    await page.getByText("resume (1)").waitFor();
    await page.getByLabel("Compare with").selectOption("training-37m-2026-11-15.hads-0");
    await page.getByRole("heading", { name: "Difference of the two runs" }).waitFor();
    await page.getByRole("img", { name: /Difference of training loss/ }).waitFor();
    await page.getByText("The second run has no data for this chart.").waitFor();
    await page.goto(`${base}/training/?run=training-37m-2026-11-15.hads-0&with=training-37m-2026-11-15.dense-0&metric=learning_rate`);
    await page.getByText("the lines coincide").waitFor();
    await page.getByText(/hads-0 is \d+\.\d\d% (lower|higher) than that of training-37m-2026-11-15\.dense-0/).waitFor();
    assert.deepEqual(page.errors, []);
    await page.context().close();
  });

  test("training: the page follows a run that trains now, and says when it is killed", async () => {
    const page = await opened("/training/");
    await page.getByRole("option", { name: "live (running)" }).first().waitFor({ state: "attached", timeout: 90_000 });
    await page.goto(`${base}/training/?run=live`);
    await page.locator(".badge.live", { hasText: /^live$/ }).waitFor({ timeout: 90_000 });
    const step = () => page.getByRole("slider", { name: /Step/ }).evaluate((x) => Number(x.value));
    const first = await step();
    await page.waitForFunction((old) => Number(document.querySelector("input[type=range]").value) > old + 2, first, { timeout: 60_000 });
    await page.getByText(/^Plan \w+ of step/).waitFor({ timeout: 60_000 });
    run.kill("SIGKILL");
    await page.locator(".badge", { hasText: "dead" }).waitFor({ timeout: 20_000 });
    const end = await step();
    const { events } = await api("/api/runs/live/events?points=2");
    assert.equal(end, Math.max(...events.map((x) => x.step)));
    assert.deepEqual(page.errors, []);
    await page.context().close();
  });
});
