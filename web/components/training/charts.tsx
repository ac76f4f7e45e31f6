"use client";

import { useCallback, useMemo } from "react";
import { Chart, type Draw } from "@/components/chart";
import { fixed, short, whole } from "@/lib/format";
import { difference, perplexities, type Point, type Run, series, type TrainStep, upTo } from "@/lib/run";

const HEIGHT = 240;

export const METRICS: { value: keyof TrainStep; label: string }[] = [
  { value: "gradient_norm", label: "gradient norm" },
  { value: "learning_rate", label: "learning rate" },
  { value: "tokens_per_second", label: "tokens per second" },
  { value: "step_seconds", label: "seconds per step" },
  { value: "density_ratio", label: "density of the plan" },
  { value: "visited_density_ratio", label: "density visited" },
  { value: "mfu_ratio", label: "model FLOP utilisation" },
  { value: "peak_bytes", label: "peak memory in bytes" },
  { value: "skipped_steps", label: "steps skipped so far" },
];

interface LinesProps {
  a: Point[];
  b?: Point[] | undefined;
  run: Run;
  most: number;
  at: number;
  caption: string;
  label: string;
  isLog?: boolean;
  dots?: boolean;
  zero?: boolean;
}

/** One metric of a run and, where there is one, of the second run; recalibrations and resumes marked. */
function Lines({ a, b, run, most, at, caption, label, isLog, dots, zero }: LinesProps) {
  const { plans, resumed } = run;
  const draw = useCallback<Draw>(
    (plot) => ({
      x: { domain: [0, most || 1], label: "step", tickFormat: "~s" },
      y: { type: isLog ? "log" : "linear", label: null, grid: true, inset: 4, ticks: 5, tickFormat: (x: number) => short(x), zero: false },
      marks: [
        plot.ruleX(plans, { x: "step", stroke: "var(--warn)", strokeOpacity: 0.35 }),
        plot.ruleX(resumed, { stroke: "var(--ink)", strokeDasharray: "2 3" }),
        zero ? plot.ruleY([0], { stroke: "var(--edge)" }) : null,
        plot.lineY(b ?? [], { x: "step", y: "value", stroke: "var(--c8)", strokeWidth: 1.5 }),
        plot.lineY(a, { x: "step", y: "value", stroke: "var(--accent)", strokeWidth: 1.75 }),
        dots ? plot.dot(b ?? [], { x: "step", y: "value", fill: "var(--c8)", r: 2.5 }) : null,
        dots ? plot.dot(a, { x: "step", y: "value", fill: "var(--accent)", r: 2.5 }) : null,
        plot.ruleX(a, plot.pointerX({ x: "step", stroke: "var(--edge)" })),
        plot.tip(
          a,
          plot.pointerX({
            x: "step",
            y: "value",
            fill: "var(--surface)",
            stroke: "var(--line)",
            title: (x: Point) => `step ${x.step.toLocaleString("en")}\n${short(x.value)}`,
          }),
        ),
      ],
    }),
    [a, b, plans, resumed, most, isLog, dots, zero],
  );
  const first = a[0]?.value;
  const end = a.at(-1)?.value;
  const summary = a.length ? `${label}: from ${short(first)} to ${short(end)} over ${most} steps` : `${label}: none`;
  return (
    <div>
      <Chart draw={draw} height={HEIGHT} label={summary} caption={caption} veil={at / (most || 1)} />
      {b ? <Beside a={a} b={b} /> : null}
    </div>
  );
}

/** What the lines of two runs do not show: one that is not there, or is hidden behind the other. */
function Beside({ a, b }: { a: Point[]; b: Point[] }) {
  if (!b.length) return <p className="small quiet">The second run has no data for this chart.</p>;
  const common = difference(a, b);
  if (!common.length) return <p className="small quiet">The two runs have no step in common in this chart.</p>;
  if (common.every((x) => x.value === 0)) return <p className="small quiet">Both runs have the same values: the lines coincide.</p>;
  return null;
}

interface Props {
  run: Run;
  other: Run | null;
  at: number;
  most: number;
  file: string;
  metric: keyof TrainStep;
}

export function LossChart({ run, other, at, most }: Props) {
  const a = useMemo(() => series(run, "loss_nats"), [run]);
  const b = useMemo(() => other && series(other, "loss_nats"), [other]);
  return <Lines {...{ run, at, most, a, b: b ?? undefined }} caption="Training loss, nats" label="Training loss" />;
}

export function PerplexityChart({ run, other, at, most, file }: Props) {
  const a = useMemo(() => perplexities(run, file), [run, file]);
  const b = useMemo(() => other && perplexities(other, file), [other, file]);
  if (!a.length) return <p className="quiet small">The {other ? "first " : ""}run has not been evaluated{file ? ` on ${file}` : ""}.</p>;
  return (
    <Lines
      {...{ run, at, most, a, b: b ?? undefined }}
      isLog
      dots
      caption={`Perplexity on ${file}, logarithmic`}
      label={`Perplexity on ${file}`}
    />
  );
}

export function MetricChart({ run, other, at, most, metric }: Props) {
  const a = useMemo(() => series(run, metric), [run, metric]);
  const b = useMemo(() => other && series(other, metric), [other, metric]);
  const name = METRICS.find((x) => x.value === metric)?.label ?? metric;
  if (!a.length) return <p className="quiet small">The {other ? "first " : ""}run does not report the {name}.</p>;
  return <Lines {...{ run, at, most, a, b: b ?? undefined }} caption={name} label={name} />;
}

const compared = (gap: number) => (gap === 0 ? "equal to" : `${fixed(100 * Math.abs(gap), 2)}% ${gap < 0 ? "lower than" : "higher than"}`);

export function DifferenceChart({ run, other, at, most, file, names }: Props & { names: [string, string] }) {
  const loss = useMemo(() => (other ? difference(series(run, "loss_nats"), series(other, "loss_nats")) : []), [run, other]);
  const ratio = useMemo(() => {
    if (!other) return [];
    const log = (points: Point[]) => points.map((x) => ({ step: x.step, value: Math.log(x.value) }));
    return difference(log(perplexities(run, file)), log(perplexities(other, file)));
  }, [run, other, file]);
  const last = upTo(ratio, at);
  if (!loss.length) return <p className="quiet">The two runs have no step in common, so there is no difference to draw.</p>;
  return (
    <>
      <Lines
        {...{ run, at, most, a: loss }}
        zero
        caption="Difference of training loss, first run − second"
        label="Difference of training loss"
      />
      {ratio.length ? (
        <>
          <Lines
            {...{ run, at, most, a: ratio }}
            zero
            dots
            caption={`Difference of loss on ${file}: negative means that the first run is better`}
            label="Difference of evaluation loss"
          />
          {last ? (
            <p className="small">
              At step {whole(last.step)} the perplexity of {names[0]} is <b>{compared(Math.expm1(last.value))}</b> that of {names[1]}.
            </p>
          ) : null}
        </>
      ) : (
        <p className="quiet small">The two runs were not evaluated on the same text at the same steps.</p>
      )}
    </>
  );
}
