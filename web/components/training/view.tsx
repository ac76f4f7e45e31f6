"use client";

import { useEffect, useState } from "react";
import { Problem, Waiting } from "@/components/client";
import { CopyPython } from "@/components/copy";
import { options, Select } from "@/components/fields";
import { DifferenceChart, LossChart, METRICS, MetricChart, PerplexityChart } from "@/components/training/charts";
import { Budgets, Log, Readout, RunTable } from "@/components/training/parts";
import { Player } from "@/components/training/player";
import { address, type Schemas } from "@/lib/api";
import { commit } from "@/lib/format";
import type { Run, TrainStep } from "@/lib/run";
import { numberOf, useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";
import { type Link, useRun } from "@/lib/use-run";

const LIST_MILLISECONDS = 4000; // between two looks at the list of runs
const DEFAULT_SECONDS = 30;

/** The run to begin with: one that runs now, else the newest with HADS, else any. */
function first(runs: Schemas["RunSummary"][]): string {
  const found = runs.find((x) => x.is_live) ?? runs.find((x) => x.plan) ?? runs[0];
  return found?.name ?? "";
}

/** Python that reads the same events from this server. */
const script = (name: string) => {
  const url = window.location.origin + address("/api/runs/{name}/events", { name, points: 5000 });
  return `import json\nfrom urllib.request import urlopen\n\nevents = json.load(urlopen(${JSON.stringify(url)}))["events"]\nprint(len(events), events[-1])\n`;
};

/** Whether a run has events; the server has none of a run that begins. */
const hasEvents = (run: Schemas["RunSummary"] | undefined) => run !== undefined && run.state !== "not started";

export function Training() {
  const [query, set] = useQuery();
  const list = useGet("/api/runs");
  const { reload } = list;
  useEffect(() => {
    const timer = setInterval(reload, LIST_MILLISECONDS);
    return () => clearInterval(timer);
  }, [reload]);

  const runs = list.data?.runs ?? [];
  const name = query.get("run") ?? first(runs);
  const second = query.get("with") ?? "";
  const summary = runs.find((x) => x.name === name);
  const other = runs.find((x) => x.name === second);
  const own = useRun(hasEvents(summary) ? name : "", summary?.source === "");
  const beside = useRun(hasEvents(other) ? second : "", other?.source === "");

  if (!list.data) return list.error ? <Problem error={list.error} /> : <Waiting isPage>Loading the runs …</Waiting>;
  if (!runs.length) return <p>There are no runs yet. `xsake train` makes one in runs/, and it appears here.</p>;
  return (
    <div className="stack">
      <section className="panel" aria-label="Runs to show">
        <div className="row">
          <Select
            label="Run"
            value={name}
            options={runs.map((x) => ({ value: x.name, label: x.is_live ? `${x.name} (running)` : x.name }))}
            onChange={(value) => set({ run: value, at: null, layer: null, head: null })}
          />
          <Select
            label="Compare with"
            value={second}
            options={[{ value: "", label: "no other run" }, ...options(runs.map((x) => x.name).filter((x) => x !== name))]}
            onChange={(value) => set({ with: value })}
          />
          {summary ? <State summary={summary} link={own.link} /> : null}
        </div>
        {summary ? <CopyPython code={script(name)} what="the events of this run" /> : null}
        {summary ? <Origin summary={summary} /> : <p className="notice">There is no run {name} any more.</p>}
        {summary && !hasEvents(summary) ? <p role="status">This run has not logged anything yet; the page waits for it.</p> : null}
        <Problem error={own.error ?? beside.error} />
      </section>
      {own.run ? (
        <Replay run={own.run} other={beside.run} isLive={summary?.is_live ?? false} names={[name, second]} />
      ) : hasEvents(summary) && !own.error ? (
        <Waiting isPage>Loading the events …</Waiting>
      ) : null}
      <section className="panel">
        <h2>All runs</h2>
        <RunTable runs={runs} name={name} onOpen={(value) => set({ run: value, at: null })} />
      </section>
    </div>
  );
}

function State({ summary, link }: { summary: Schemas["RunSummary"]; link: Link }) {
  if (!summary.is_live) return <span className="badge">{summary.state}</span>;
  return (
    <span className="badge live" role="status">
      {link === "open" ? "live" : link === "lost" ? "running; reconnecting …" : "running"}
    </span>
  );
}

function Origin({ summary }: { summary: Schemas["RunSummary"] }) {
  const config = useGet(summary.has_config ? "/api/runs/{name}/config" : null, { name: summary.name });
  const result = /results\/(.+)\.json$/.exec(summary.source)?.[1];
  return (
    <div className="small quiet">
      <p>
        {summary.device}, commit {commit(summary.commit) || "unknown"}, config {summary.config_hash.slice(0, 8)}, data{" "}
        {summary.data_hash.slice(0, 8)}
        {result ? (
          <>
            , part of <a href={`/benchmarks/?file=${encodeURIComponent(result)}`}>{result}</a>
          </>
        ) : summary.source ? (
          `, ${summary.source}`
        ) : null}
        .
      </p>
      {config.data ? (
        <details>
          <summary>Its configuration</summary>
          <pre className="code" tabIndex={0}>
            {JSON.stringify(config.data, null, 2)}
          </pre>
        </details>
      ) : null}
    </div>
  );
}

interface ReplayProps {
  run: Run;
  other: Run | null;
  isLive: boolean;
  names: [string, string];
}

function Replay({ run, other, isLive, names }: ReplayProps) {
  const [query, set] = useQuery();
  const [isPlaying, setPlaying] = useState(false);
  const at = Math.min(numberOf(query, "at", run.last), run.last);
  const most = isLive ? run.last : Math.max(run.last, other?.last ?? 0);
  const file = query.get("file") ?? run.files[0] ?? "";
  const metric = (query.get("metric") ?? "gradient_norm") as keyof TrainStep;
  const selected = query.has("layer") ? { layer: numberOf(query, "layer", 0), head: numberOf(query, "head", 0) } : null;
  const shown = { run, other, at, most, file, metric };
  return (
    <>
      <section className="panel" aria-label="Replay of the run">
        <Player
          at={at}
          last={run.last}
          isPlaying={isPlaying}
          speed={numberOf(query, "speed", DEFAULT_SECONDS)}
          isFollowing={!query.has("at")}
          canFollow={isLive}
          onMove={(step) => set({ at: step })}
          onPlay={setPlaying}
          onSpeed={(seconds) => set({ speed: seconds === DEFAULT_SECONDS ? null : seconds })}
        />
        <Readout run={run} at={at} file={file} />
        <p className="small quiet">
          A plan is a budget of blocks for every head. Its density is the share of causal blocks that the budgets allow; visited is the share
          that the batch computed, which is less where a batch has several documents, since none attends to another.
        </p>
        <ul className="legend">
          <li><i className="line" style={{ background: "var(--accent)" }} />{names[0]}</li>
          {other ? <li><i className="line" style={{ background: "var(--c8)" }} />{names[1]}</li> : null}
          <li><i style={{ background: "var(--warn)", opacity: 0.5, width: 3 }} />recalibration ({run.plans.length})</li>
          <li><i style={{ borderLeft: "2px dashed var(--ink)", width: 3 }} />resume ({run.resumed.length})</li>
        </ul>
        <div className="columns two">
          <LossChart {...shown} />
          <div>
            <PerplexityChart {...shown} />
            {run.files.length > 1 ? (
              <Select label="Evaluation text" value={file} options={options(run.files)} onChange={(x) => set({ file: x })} />
            ) : null}
          </div>
        </div>
      </section>
      {other ? (
        <section className="panel">
          <h2>Difference of the two runs</h2>
          <div className="columns two"><DifferenceChart {...shown} names={names} /></div>
        </section>
      ) : null}
      <section className="panel">
        <h2>Budgets of the heads</h2>
        <Budgets {...{ run, at, most, selected }} onSelect={(layer, head) => set({ layer, head })} />
      </section>
      <div className="columns two">
        <section className="panel">
          <Select
            label="Another metric"
            value={metric}
            options={METRICS.map((x) => ({ value: String(x.value), label: x.label }))}
            onChange={(x) => set({ metric: x })}
          />
          <MetricChart {...shown} />
        </section>
        <section className="panel">
          <h2>What happened</h2>
          <Log run={run} at={at} onMove={(step) => set({ at: step >= run.last ? null : step })} />
        </section>
      </div>
    </>
  );
}
