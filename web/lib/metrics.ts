// What the benchmark charts can show: columns of the result files, and how peers' columns are named.

import type { Schemas } from "./api";
import { formatOf } from "./columns";
import { bytes, fixed, percent, seconds, short, whole } from "./format";
import { densityOf, namesOf, numberIn, PARAMETERS, taskOf } from "./names";

export type Row = Schemas["ResultRows"]["rows"][number];
export { numberIn } from "./names";

interface Series {
  column: string;
  name: string;
}

export interface Metric {
  value: string;
  label: string;
  series: Series[];
  format: (value: number) => string;
  /** Columns of the lower end of an error bar, or of a symmetric standard error. */
  least?: string;
  error?: string;
  /** Of the axis: logarithmic where all values are positive, or in both directions around zero. */
  scale?: "log" | "symlog";
  /** Which end of the axis is good. */
  better?: "low" | "high";
}

const OWN = "XSAKE";
const own = (column: string): Series[] => [{ column, name: OWN }];
const named = (columns: Record<string, string>): Series[] => Object.entries(columns).map(([column, name]) => ({ column, name }));

export const METRICS: Metric[] = [
  {
    value: "teraflops",
    label: "TFLOP/s",
    series: [...own("teraflops"), ...named({ cudnn_teraflops: "cuDNN", flash_attention_4_teraflops: "FlashAttention-4", flex_attention_teraflops: "FlexAttention", jax_nn_teraflops: "jax.nn" })],
    format: whole,
    better: "high",
  },
  {
    value: "latency",
    label: "latency",
    series: [
      ...own("median_seconds"),
      ...named({
        selection_and_sparse_seconds: "XSAKE, selection included",
        certificate_seconds: "XSAKE, certified",
        jax_nn_seconds: "jax.nn",
        dense_seconds: "dense cuDNN",
      }),
    ],
    least: "least_seconds",
    format: seconds,
    scale: "log",
    better: "low",
  },
  { value: "tokens_per_second", label: "tokens per second", series: own("tokens_per_second"), format: whole, scale: "log", better: "high" },
  { value: "peak_bytes", label: "memory", series: own("peak_bytes"), format: bytes, better: "low" },
  { value: "accuracy", label: "accuracy of the answers", series: own("accuracy"), error: "accuracy_standard_error", format: (x) => percent(x, 0), better: "high" },
  { value: "perplexity_gap", label: "perplexity against dense", series: own("perplexity_gap"), error: "perplexity_gap_standard_error", format: (x) => percent(x, 2), scale: "symlog", better: "low" },
  { value: "kl", label: "KL of attention, nats", series: own("kl"), error: "kl_standard_error", format: (x) => fixed(x), scale: "log", better: "low" },
  { value: "logit_kl", label: "KL of predictions, nats", series: own("logit_kl"), error: "logit_kl_standard_error", format: (x) => fixed(x, 4), scale: "log", better: "low" },
  { value: "recall", label: "attention mass kept", series: own("recall"), error: "recall_standard_error", format: (x) => fixed(x), better: "high" },
  { value: "error", label: "error of the output", series: own("error"), error: "error_standard_error", format: short, scale: "log", better: "low" },
  { value: "first_call", label: "time of the first call, compilation included", series: own("first_call_seconds"), format: seconds, better: "low" },
  { value: "compile", label: "time to compile", series: own("compile_seconds"), format: seconds, better: "low" },
  {
    value: "balance",
    label: "work of the busiest device ÷ the mean",
    series: named({ before_mean_ratio: "heads in order", after_mean_ratio: "heads balanced", contiguous_ratio: "rows in order", zigzag_ratio: "rows in a zigzag", balanced_ratio: "rows balanced" }),
    format: (x) => fixed(x, 2),
    better: "low",
  },
  {
    value: "traffic",
    label: "bytes that a device receives",
    series: named({ received_bytes: "received", estimated_bytes: "estimated", all_gather_bytes: "if all were gathered" }),
    format: bytes,
    scale: "log",
    better: "low",
  },
  { value: "tpu", label: "least time on a TPU, estimated, not measured", series: named({ v5e_least_seconds: "v5e", v6e_least_seconds: "v6e" }), format: seconds, scale: "log", better: "low" },
  { value: "expected", label: "time, estimated from a cost model", series: own("expected_seconds"), format: seconds, scale: "log", better: "low" },
];

/** The metrics that these rows have: known ones, then every other column of numbers. */
export function metricsOf(rows: Row[], columns: string[]): Metric[] {
  const known = METRICS.filter((x) => marks(rows, x).length);
  const taken = new Set(METRICS.flatMap((x) => [...x.series.map((s) => s.column), x.least, x.error]));
  const others = columns.filter((x) => !taken.has(x) && !PARAMETERS.test(x) && rows.some((row) => numberIn(row, x) !== null));
  return [...known, ...others.map((x): Metric => ({ value: x, label: x.replaceAll("_", " "), series: own(x), error: `${x}_standard_error`, format: formatOf(x) }))];
}

export interface Mark {
  name: string;
  line: string;
  /** Of the small chart that the mark is in, if there are too many lines for one. */
  panel: string;
  series: string;
  density: number | null;
  value: number;
  low: number;
  high: number;
  row: Row;
}

// Columns that tell implementations of the same thing apart, where a file has several of them.
const SPLITS = ["implementation", "backend", "variant"];

/** The points of a metric: one for each row and series that has a value. */
export function marks(rows: Row[], metric: Metric): Mark[] {
  const split = SPLITS.find((x) => new Set(rows.map((row) => row[x] ?? null)).size > 1 && rows.every((row) => row[x]));
  const hasPeers = metric.series.filter((x) => rows.some((row) => numberIn(row, x.column) !== null)).length > 1;
  const names = namesOf(rows);
  return rows.flatMap((row) =>
    metric.series.flatMap(({ column, name }) => {
      const value = numberIn(row, column);
      if (value === null) return [];
      const error = (metric.error && numberIn(row, metric.error)) || 0;
      const least = name === OWN && metric.least ? numberIn(row, metric.least) : null;
      const kind = row.kind && row.method ? String(row.kind) : null;
      const series = kind ?? (split && !hasPeers ? String(row[split]) : name);
      const { short: line, full } = names.get(row) ?? { short: "", full: "" };
      const mark = {
        name: full,
        line: `${row.result}/${line}/${row.length ?? ""}/${row.T ?? ""}/${series}/${name}`,
        panel: taskOf(row) || kind || line,
        series,
        density: densityOf(row),
        value,
        low: least ?? value - error,
        high: value + error,
        row,
      };
      return [mark];
    }),
  );
}
