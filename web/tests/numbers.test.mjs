// The pages of plans, results and runs in a browser, with a real server and a real run: make test-web.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import { api, base, figure, opened, serving, settled } from "./browser.mjs";
import { python, skip, train } from "./started.mjs";

describe("numbers", { skip, timeout: 300_000 }, () => {
  serving();
  let run;

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
