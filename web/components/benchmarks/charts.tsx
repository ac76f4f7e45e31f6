"use client";

import { useCallback, useMemo } from "react";
import { Chart, type Draw } from "@/components/chart";
import { percent } from "@/lib/format";
import { type Mark, type Metric, marks, type Row } from "@/lib/metrics";

const COLOURS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)", "var(--c8)"];
const MOST_CASES = 60;

const INSET = 8; // px between the frame and the outermost marks, which are circles
const SYMLOG_TICKS = [-0.01, -0.002, 0, 0.002, 0.01, 0.03, 0.1, 0.3, 1, 3, 10];

/** The axis of a metric: perplexities near zero and far from it are on one chart. */
function axisOf(metric: Metric, found: Mark[], isLog: boolean, ticks: number) {
  if (metric.scale === "symlog") {
    const domain: [number, number] = [Math.min(...found.map((x) => x.low)), Math.max(...found.map((x) => x.high))];
    const inside = SYMLOG_TICKS.filter((x) => x >= domain[0] && x <= domain[1]);
    const digits = (x: number) => (inside.length < 2 ? 2 : x !== 0 && Math.abs(x) < 0.01 ? 1 : 0);
    return { type: "symlog" as const, constant: 0.002, domain, ticks: inside.length < 2 ? ticks : inside, tickFormat: (x: number) => percent(x, digits(x)) };
  }
  return { type: isLog ? ("log" as const) : ("linear" as const), ticks, tickFormat: (x: number) => metric.format(x) };
}

const title = (metric: Metric) => (x: Mark) =>
  [
    x.name,
    `${x.series}: ${metric.format(x.value)}${x.high > x.value ? ` ± ${metric.format(x.high - x.value)}` : ""}`,
    x.density === null ? "" : `density ${x.density.toFixed(3)}`,
    `${x.row.result}, ${x.row.device}`,
  ]
    .filter(Boolean)
    .join("\n");

interface Props {
  rows: Row[];
  metric: Metric;
}

export function Charts({ rows, metric }: Props) {
  const found = useMemo(() => marks(rows, metric), [rows, metric]);
  const series = useMemo(() => [...new Set(found.map((x) => x.series))], [found]);
  if (!found.length) return <p className="quiet">None of these rows has this metric.</p>;
  const isLog = metric.scale === "log" && found.every((x) => x.low > 0);
  const colour = { domain: series, range: series.map((_, i) => COLOURS[i % COLOURS.length] as string) };
  return (
    <>
      <ul className="legend">
        {series.map((name, i) => (
          <li key={name}><i style={{ background: COLOURS[i % COLOURS.length] }} />{name}</li>
        ))}
      </ul>
      <div className="columns two">
        <AgainstDensity {...{ found, metric, isLog, colour }} />
        <ByCase {...{ found, metric, isLog, colour }} />
      </div>
    </>
  );
}

interface ChartProps {
  found: Mark[];
  metric: Metric;
  isLog: boolean;
  colour: { domain: string[]; range: string[] };
}

function AgainstDensity({ found, metric, isLog, colour }: ChartProps) {
  const points = useMemo(() => found.filter((x) => x.density !== null).sort((a, b) => (a.density ?? 0) - (b.density ?? 0)), [found]);
  const key = JSON.stringify(colour);
  const draw = useCallback<Draw>(
    (plot) => ({
      marginLeft: 68,
      inset: INSET,
      x: { domain: [0, 1], label: "density", grid: true },
      y: { ...axisOf(metric, points, isLog, 6), label: null, grid: true },
      color: { type: "ordinal", ...(JSON.parse(key) as ChartProps["colour"]) },
      marks: [
        plot.lineY(points, { x: "density", y: "value", z: "line", stroke: "series", strokeOpacity: 0.45 }),
        plot.ruleX(points, { x: "density", y1: "low", y2: "high", stroke: "series", strokeWidth: 2 }),
        plot.dot(points, { x: "density", y: "value", fill: "series", r: 3 }),
        plot.tip(points, plot.pointer({ x: "density", y: "value", title: title(metric), fill: "var(--surface)", stroke: "var(--line)" })),
      ],
    }),
    [points, metric, isLog, key],
  );
  if (!points.length) return <p className="quiet small">These rows have no density.</p>;
  return (
    <Chart
      draw={draw}
      height={420}
      label={`${metric.label} against density, ${points.length} measurements; the table below has the numbers`}
      caption={`${metric.label} against density${isLog ? ", logarithmic" : metric.scale === "symlog" ? ", logarithmic away from zero" : ""}${metric.error ? "; bars: ± one standard error" : ""}${metric.least ? "; bars: least to median" : ""}`}
    />
  );
}

function ByCase({ found, metric, isLog, colour }: ChartProps) {
  const { points, names, left } = useMemo(() => {
    const all = [...new Set(found.map((x) => x.name))];
    const kept = new Set(all.slice(0, MOST_CASES));
    return { points: found.filter((x) => kept.has(x.name)), names: [...kept], left: all.length - kept.size };
  }, [found]);
  const key = JSON.stringify(colour);
  const draw = useCallback<Draw>(
    (plot, width) => {
      const letters = width < 500 ? 20 : 42;
      return {
        marginLeft: Math.min(6.2 * letters, width * 0.5),
        marginTop: 24,
        inset: INSET,
        x: { ...axisOf(metric, points, isLog, Math.max(width / 160, 2)), label: null, grid: true, axis: "top" },
        y: { domain: names, label: null, tickFormat: (x: string) => (x.length > letters ? `${x.slice(0, letters - 1)}…` : x) },
        color: { type: "ordinal", ...(JSON.parse(key) as ChartProps["colour"]) },
        marks: [
          plot.ruleY(points, { y: "name", x1: "low", x2: "high", stroke: "series", strokeWidth: 2 }),
          plot.dot(points, { x: "value", y: "name", fill: "series", r: 4 }),
          plot.tip(points, plot.pointer({ x: "value", y: "name", title: title(metric), fill: "var(--surface)", stroke: "var(--line)" })),
        ],
      };
    },
    [points, names, metric, isLog, key],
  );
  return (
    <div>
      <Chart
        draw={draw}
        height={Math.max(160, 19 * names.length + 60)}
        label={`${metric.label} of ${names.length} cases, peers side by side; the table below has the numbers`}
        caption={`${metric.label} by case, peers side by side`}
      />
      {left > 0 ? <p className="small quiet">{left} more cases match; filters narrow them down.</p> : null}
    </div>
  );
}
