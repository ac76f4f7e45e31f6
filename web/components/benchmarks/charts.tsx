"use client";

import { useCallback, useMemo } from "react";
import { Chart, type Draw } from "@/components/chart";
import { count, percent } from "@/lib/format";
import { type Mark, type Metric, marks, type Row } from "@/lib/metrics";
import { useQuery } from "@/lib/url";

const COLOURS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)", "var(--c8)"];
const MOST_CASES = 24; // of the chart by case, at first
const FEW_LINES = 8; // that one chart against density can show; more are split into small charts
const MOST_PANELS = 9; // small charts, at first
const MOST_ON_PHONES = 4;
const NARROW = 640; // px

const INSET = 8; // px between the frame and the outermost marks, which are circles
const SYMLOG_TICKS = [-0.01, -0.002, 0, 0.002, 0.01, 0.03, 0.1, 0.3, 1, 3, 10];

/** 1, 2 and 5 times powers of ten inside a domain; none if they are too few to read an axis by. */
function logTicks([low, high]: [number, number], most: number): number[] | undefined {
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  const inside = (digits: number[]) => powers.flatMap((x) => digits.map((d) => d * x)).filter((x) => x >= low && x <= high);
  return [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]].map(inside).filter((x) => x.length >= 2 && x.length <= most + 1).at(-1);
}

/** The axis of a metric: perplexities near zero and far from it are on one chart. */
function axisOf(metric: Metric, domain: [number, number], isLog: boolean, ticks: number) {
  if (metric.scale === "symlog") {
    const inside = SYMLOG_TICKS.filter((x) => x >= domain[0] && x <= domain[1]);
    const digits = (x: number) => (inside.length < 2 ? 2 : x !== 0 && Math.abs(x) < 0.01 ? 1 : 0);
    return { type: "symlog" as const, constant: 0.002, domain, ticks: inside.length < 2 ? ticks : inside, tickFormat: (x: number) => percent(x, digits(x)) };
  }
  return { domain, type: isLog ? ("log" as const) : ("linear" as const), ticks: (isLog && logTicks(domain, ticks)) || ticks, tickFormat: (x: number) => metric.format(x) };
}

const rangeOf = (found: Mark[]): [number, number] => [Math.min(...found.map((x) => x.low)), Math.max(...found.map((x) => x.high))];

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
  /** Of what densities are the share, if all rows agree. */
  densityOf: string;
}

export function Charts({ rows, metric, densityOf }: Props) {
  const found = useMemo(() => marks(rows, metric), [rows, metric]);
  const points = useMemo(() => found.filter((x) => x.density !== null).sort((a, b) => (a.density ?? 0) - (b.density ?? 0)), [found]);
  const series = useMemo(() => [...new Set(found.map((x) => x.series))], [found]);
  const lines = useMemo(() => new Set(points.map((x) => x.line)).size, [points]);
  if (!found.length) return <p className="quiet">None of these rows has this metric.</p>;
  const isLog = metric.scale === "log" && found.every((x) => x.low > 0);
  const colour = { domain: series, range: series.map((_, i) => COLOURS[i % COLOURS.length] as string) };
  const isSplit = lines > FEW_LINES;
  return (
    <>
      {series.length > 1 ? (
        <ul className="legend">
          {series.map((name, i) => (
            <li key={name}><i style={{ background: COLOURS[i % COLOURS.length] }} />{name}</li>
          ))}
        </ul>
      ) : null}
      {points.length && densityOf ? <p className="small quiet">Density is the share of {densityOf}.</p> : null}
      <div className={points.length && !isSplit ? "columns two" : "stack"}>
        {isSplit ? <Panels {...{ found: points, metric, isLog, colour }} /> : points.length ? <AgainstDensity {...{ found: points, metric, isLog, colour }} height={420} /> : null}
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

const scaleOf = (metric: Metric, isLog: boolean) => (isLog ? ", logarithmic" : metric.scale === "symlog" ? ", logarithmic away from zero" : "");
const barsOf = (metric: Metric, found: Mark[]) =>
  found.every((x) => x.low === x.high) ? "" : metric.least ? "; bars: least to median" : "; bars: ± one standard error";
const goodOf = (metric: Metric) => (metric.better ? `; ${metric.better === "low" ? "lower" : "higher"} is better` : "");

/** The line that is best on the average, of those with most points; none where every line is another peer. */
function bestOf(metric: Metric, found: Mark[]): string | null {
  const lines = new Map<string, Mark[]>();
  for (const x of found) lines.set(x.line, [...(lines.get(x.line) ?? []), x]);
  if (!metric.better || lines.size <= new Set(found.map((x) => x.series)).size) return null;
  const most = Math.max(...[...lines.values()].map((x) => x.length));
  const sign = metric.better === "low" ? 1 : -1;
  const mean = (x: Mark[]) => x.reduce((sum, mark) => sum + sign * mark.value, 0) / x.length;
  const full = [...lines].filter(([, x]) => x.length === most).sort((a, b) => mean(a[1]) - mean(b[1]));
  return full[0]?.[0] ?? null;
}

/** Too many lines for one chart: a small one for each shape, task or kind, all on the same scale. */
function Panels({ found, metric, isLog, colour }: ChartProps) {
  const [query, set] = useQuery();
  const panels = useMemo(() => {
    const all = new Map<string, Mark[]>();
    for (const x of found) all.set(x.panel, [...(all.get(x.panel) ?? []), x]);
    return [...all].filter(([, x]) => new Set(x.map((mark) => mark.density)).size > 1); // a line has two points
  }, [found]);
  const kept = query.get("charts") === "all" ? panels : panels.slice(0, window.innerWidth < NARROW ? MOST_ON_PHONES : MOST_PANELS);
  const shared = kept.flatMap(([, x]) => x);
  return (
    <div>
      <p className="small quiet">
        {metric.label} against density{scaleOf(metric, isLog)}{barsOf(metric, found)}{goodOf(metric)}. All charts have the same scale; in those with many lines, the thick one is the best.
      </p>
      <div className="panels">
        {kept.map(([name, marks]) => {
          const best = bestOf(metric, marks);
          const bestName = best ? (marks.find((x) => x.line === best)?.row.method ?? "") : "";
          return <AgainstDensity key={name} {...{ found: marks, metric, isLog, colour, shared, best }} height={230} name={bestName ? `${name}; best: ${bestName}` : name} />;
        })}
      </div>
      <More shown={kept.length} all={panels.length} noun="chart" onAll={() => set({ charts: "all" })} />
    </div>
  );
}

function More({ shown, all, noun, onAll }: { shown: number; all: number; noun: string; onAll: () => void }) {
  if (shown >= all) return null;
  return (
    <p className="small">
      The first {shown} of {count(all, noun)}; filters narrow them down. <button type="button" className="plain" onClick={onAll}>Show all {all}</button>
    </p>
  );
}

interface AgainstProps extends ChartProps {
  height: number;
  /** Of a small chart: its name, the marks whose scale it shares, and the line to stress. */
  name?: string;
  shared?: Mark[];
  best?: string | null;
}

function AgainstDensity({ found, metric, isLog, colour, height, name, shared = found, best }: AgainstProps) {
  const isLow = shared.every((x) => (x.density ?? 0) < 0.7);
  const key = JSON.stringify([colour, rangeOf(shared)]);
  const draw = useCallback<Draw>(
    (plot) => {
      const [colours, range] = JSON.parse(key) as [ChartProps["colour"], [number, number]];
      return {
        marginLeft: 68,
        inset: INSET,
        x: { domain: [0, isLow ? 0.7 : 1], label: "density", grid: true, ticks: name ? 4 : undefined },
        y: { ...axisOf(metric, range, isLog, name ? 4 : 6), label: null, grid: true },
        color: { type: "ordinal", ...colours },
        marks: [
          plot.lineY(found, { x: "density", y: "value", z: "line", stroke: "series", strokeOpacity: best ? 0.3 : 0.6 }),
          plot.lineY(found.filter((x) => x.line === best), { x: "density", y: "value", stroke: "series", strokeWidth: 3 }),
          plot.ruleX(found, { x: "density", y1: "low", y2: "high", stroke: "series", strokeWidth: 2 }),
          plot.dot(found, { x: "density", y: "value", fill: "series", r: name ? 2.5 : 3 }),
          plot.tip(found, plot.pointer({ x: "density", y: "value", title: title(metric), fill: "var(--surface)", stroke: "var(--line)" })),
        ],
      };
    },
    [found, metric, isLog, isLow, key, name, best],
  );
  return (
    <Chart
      draw={draw}
      height={height}
      label={`${name ? `${name}: ` : ""}${metric.label} against density, ${found.length} measurements; the table below has the numbers`}
      caption={name ?? `${metric.label} against density${scaleOf(metric, isLog)}${barsOf(metric, found)}${goodOf(metric)}`}
    />
  );
}

const LINE = 15; // px of a line of a label
const MOST_LINES = 3; // of a label; the rest of a longer one is cut

/** A name on as many lines as it needs, and that number. */
function folded(name: string, letters: number): string[] {
  const lines: string[] = [];
  for (const word of name.split(" ")) {
    const last = lines.at(-1);
    if (last !== undefined && last.length + word.length < letters) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word.length > letters ? `${word.slice(0, letters - 1)}…` : word);
  }
  return lines.length > MOST_LINES ? [...lines.slice(0, MOST_LINES - 1), `… ${lines.at(-1)}`] : lines;
}

/** What all names begin with, up to the end of a word: it is said once, above them. */
function beginningOf(names: string[]): string {
  const [first = "", ...others] = names;
  let n = others.length ? first.length : 0;
  for (const x of others) while (!x.startsWith(first.slice(0, n))) n--;
  return first.slice(0, first.lastIndexOf(" ", n - 1) + 1);
}

/** Whether some case has dots of one colour that differ in density. */
function hasSeveralDensities(points: Mark[]): boolean {
  const densities = new Map<string, number | null>();
  return points.some((x) => {
    const key = `${x.name}/${x.series}`;
    const isOther = densities.has(key) && densities.get(key) !== x.density;
    densities.set(key, x.density);
    return isOther;
  });
}

function ByCase({ found, metric, isLog, colour }: ChartProps) {
  const [query, set] = useQuery();
  const isAll = query.get("cases") === "all";
  const { points, names, all } = useMemo(() => {
    const every = [...new Set(found.map((x) => x.name))];
    const kept = new Set(isAll ? every : every.slice(0, MOST_CASES));
    return { points: found.filter((x) => kept.has(x.name)), names: [...kept], all: every.length };
  }, [found, isAll]);
  const peers = new Set(found.map((x) => x.series)).size > 1 ? ", peers side by side" : "";
  const isFaded = useMemo(() => hasSeveralDensities(points), [points]);
  const beginning = beginningOf(names);
  const key = JSON.stringify(colour);
  const isNarrow = window.innerWidth < NARROW;
  const letters = isNarrow ? 22 : 42;
  const labels = useMemo(() => new Map(names.map((x) => [x, folded(x.slice(beginning.length), letters)])), [names, beginning, letters]);
  const lines = Math.max(...[...labels.values()].map((x) => x.length), 1);
  const draw = useCallback<Draw>(
    (plot, width) => {
      const strength = (x: Mark) => (isFaded && x.density !== null ? 0.25 + 0.75 * Math.min(x.density, 1) : 1);
      return {
        marginLeft: Math.min(7 * letters, width * 0.5),
        marginTop: 24,
        marginBottom: 8,
        inset: INSET,
        x: { ...axisOf(metric, rangeOf(points), isLog, Math.max(width / 160, 2)), label: null, grid: true, axis: "top" },
        y: { domain: names, label: null, tickFormat: (x: string) => labels.get(x)?.join("\n") ?? x },
        color: { type: "ordinal", ...(JSON.parse(key) as ChartProps["colour"]) },
        marks: [
          plot.ruleY(points, { y: "name", x1: "low", x2: "high", stroke: "series", strokeWidth: 2 }),
          plot.dot(points, { x: "value", y: "name", fill: "series", fillOpacity: strength, stroke: "series", r: 4 }),
          plot.tip(points, plot.pointer({ x: "value", y: "name", title: title(metric), fill: "var(--surface)", stroke: "var(--line)" })),
        ],
      };
    },
    [points, names, labels, letters, metric, isLog, isFaded, key],
  );
  return (
    <div>
      <Chart
        draw={draw}
        height={Math.max(160, (LINE * lines + 4) * names.length + 60)}
        label={`${metric.label} of ${names.length} cases${peers}; the table below has the numbers`}
        caption={`${metric.label} by case${peers}${goodOf(metric)}${isFaded ? "; fainter dots: lower density" : ""}${beginning ? `. All cases: ${beginning.replace(/[\s,(]+$/, "")}` : ""}`}
      />
      <More shown={names.length} all={all} noun="case" onAll={() => set({ cases: "all" })} />
    </div>
  );
}
