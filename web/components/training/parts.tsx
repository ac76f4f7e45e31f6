"use client";

import { useCallback, useMemo } from "react";
import { Chart, type Draw } from "@/components/chart";
import { Heads } from "@/components/heads";
import { Numbers } from "@/components/fields";
import { Scroll } from "@/components/scroll";
import type { Schemas } from "@/lib/api";
import { bytes, commit, commitTitle, fixed, percent, short, whole } from "@/lib/format";
import { type PlanSwapped, type Run, type RunEvent, upTo, words } from "@/lib/run";

export function Readout({ run, at, file }: { run: Run; at: number; file: string }) {
  const step = upTo(run.steps, at);
  const evaluations = useMemo(() => run.evaluations.filter((x) => x.file === file), [run, file]);
  const evaluated = upTo(evaluations, at);
  return (
    <Numbers
      figures={[
        { name: "training loss, nats", value: fixed(step?.loss_nats) },
        {
          name: "perplexity",
          value: fixed(evaluated?.perplexity, 2),
          note: evaluated ? `step ${whole(evaluated.step)}` : null,
        },
        { name: "density of the plan", value: fixed(step?.density_ratio) },
        { name: "density visited", value: fixed(step?.visited_density_ratio) },
        { name: "tokens seen", value: whole(step?.tokens_seen) },
        { name: "tokens per second", value: whole(step?.tokens_per_second) },
        { name: "learning rate", value: short(step?.learning_rate) },
        { name: "gradient norm", value: short(step?.gradient_norm) },
        { name: "FLOP utilisation", value: percent(step?.mfu_ratio) },
        { name: "peak memory", value: bytes(step?.peak_bytes) },
        { name: "skipped steps", value: whole(step?.skipped_steps) },
      ]}
    />
  );
}

interface BudgetsProps {
  run: Run;
  at: number;
  most: number;
  selected: { layer: number; head: number } | null;
  onSelect: (layer: number, head: number) => void;
}

/** The budget of every head at a step, and how that of one head changed. */
export function Budgets({ run, at, most, selected, onSelect }: BudgetsProps) {
  const plan = upTo(run.plans, at);
  const layer = selected?.layer ?? 0;
  const head = selected?.head ?? 0;
  const draw = useCallback<Draw>(
    (plot) => {
      const value = (x: PlanSwapped) => x.head_density_ratios[layer]?.[head];
      return {
        x: { domain: [0, most || 1], label: "step", tickFormat: "~s" },
        y: { domain: [0, 1], label: null, grid: true },
        marks: [
          plot.lineY(run.plans, { x: "step", y: value, stroke: "var(--accent)", curve: "step-after" }),
          plot.dot(run.plans, { x: "step", y: value, fill: "var(--accent)", r: 3 }),
          plot.lineY(run.plans, { x: "step", y: "density_ratio", stroke: "var(--c8)", strokeDasharray: "3 3" }),
        ],
      };
    },
    [run, layer, head, most],
  );
  if (!run.plans.length) {
    return <p className="quiet">This run has no plan: every head attends to every block.</p>;
  }
  return (
    <div className="columns two">
      <div>
        <p className="small quiet">
          {plan
            ? `Plan ${plan.plan_hash.slice(0, 8)} of step ${whole(plan.step)}: density ${fixed(plan.density_ratio)}.`
            : `Dense until the first plan, at step ${whole(run.plans[0]?.step)}.`}{" "}
          Rows are layers, columns are heads; a stronger colour keeps more blocks.
        </p>
        <Heads
          fill={plan?.head_density_ratios ?? (run.plans[0] as PlanSwapped).head_density_ratios.map((x) => x.map(() => 1))}
          fillName="density"
          selected={selected}
          onSelect={onSelect}
          label="Budgets by layer and head"
        />
      </div>
      <Chart
        draw={draw}
        height={240}
        label={`Density of layer ${layer}, head ${head}, by step`}
        caption={`Density of layer ${layer}, head ${head}; dashed: all heads`}
        veil={at / (most || 1)}
      />
    </div>
  );
}

const LOGGED = new Set<RunEvent["event"]>([
  "RunStarted",
  "Resumed",
  "PlanSwapped",
  "Evaluated",
  "CheckpointSaved",
  "Sampled",
  "Stopped",
]);

export function Log({ run, at, onMove }: { run: Run; at: number; onMove: (step: number) => void }) {
  const shown = useMemo(() => run.all.filter((x) => LOGGED.has(x.event) && x.step <= at).reverse(), [run, at]);
  return (
    <ol className="log" tabIndex={0} aria-label="Events, newest first">
      {shown.map((event, i) => (
        <li key={`${event.step}-${event.event}-${shown.length - i}`}>
          <button type="button" onClick={() => onMove(event.step)}>
            <span className="hidden-text">Go to step </span>
            {whole(event.step)}
          </button>
          <span>{words(event)}</span>
        </li>
      ))}
    </ol>
  );
}

interface TableProps {
  runs: Schemas["RunSummary"][];
  name: string;
  onOpen: (name: string) => void;
}

export function RunTable({ runs, name, onOpen }: TableProps) {
  return (
    <Scroll label="All runs">
      <table className="data named">
        <thead>
          <tr>
            {["run", "state", "step", "loss", "perplexity", "density", "device", "config", "data", "plan", "commit"].map((x) => (
              <th key={x} scope="col">
                {x}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <tr key={run.name} aria-selected={run.name === name}>
              <td>
                <button type="button" className="plain" onClick={() => onOpen(run.name)}>
                  {run.name}
                </button>
              </td>
              <td>{run.is_live ? <span className="badge live">running</span> : run.state}</td>
              <td className="number">
                {whole(run.step)} / {whole(run.steps)}
              </td>
              <td className="number">{fixed(run.loss_nats)}</td>
              <td>
                {Object.entries(run.perplexity)
                  .map(([file, value]) => `${file} ${fixed(value, 2)}`)
                  .join(", ")}
              </td>
              <td className="number">{fixed(run.density_ratio)}</td>
              <td>{run.device}</td>
              <td>{run.config_hash.slice(0, 8)}</td>
              <td>{run.data_hash.slice(0, 8)}</td>
              <td>{run.plan.slice(0, 8)}</td>
              <td title={commitTitle(run.commit)}>{commit(run.commit)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
