// What the benchmark charts can show: columns of the result files, and how peers' columns are named.

import type { Schemas } from "./api";
import { bytes, fixed, percent, seconds, short, whole } from "./format";

export type Row = Schemas["ResultRows"]["rows"][number];

interface Series {
  column: string;
  name: string;
}

export interface Metric {
  value: string;
  label: string;
  series: Series[];
  format: (value: number | null) => string;
  /** Columns of the lower end of an error bar, or of a symmetric standard error. */
  least?: string;
  error?: string;
  /** Of the axis: logarithmic where all values are positive, or in both directions around zero. */
  scale?: "log" | "symlog";
}

const own = (column: string): Series[] => [{ column, name: "XSAKE" }];

export const METRICS: Metric[] = [
  {
    value: "teraflops",
    label: "TFLOP/s",
    series: [
      ...own("teraflops"),
      { column: "cudnn_teraflops", name: "cuDNN" },
      { column: "flash_attention_4_teraflops", name: "FlashAttention-4" },
    ],
    format: whole,
  },
  {
    value: "latency",
    label: "latency",
    series: [
      ...own("median_seconds"),
      { column: "selection_and_sparse_seconds", name: "XSAKE, selection included" },
      { column: "jax_nn_seconds", name: "jax.nn" },
      { column: "dense_seconds", name: "dense cuDNN" },
    ],
    least: "least_seconds",
    format: seconds,
    scale: "log",
  },
  { value: "tokens_per_second", label: "tokens per second", series: own("tokens_per_second"), format: whole, scale: "log" },
  { value: "peak_bytes", label: "memory", series: own("peak_bytes"), format: bytes },
  { value: "perplexity_gap", label: "perplexity against dense", series: own("perplexity_gap"), error: "perplexity_gap_standard_error", format: (x) => percent(x, 2), scale: "symlog" },
  { value: "kl", label: "KL of attention", series: own("kl"), error: "kl_standard_error", format: (x) => fixed(x), scale: "log" },
  { value: "logit_kl", label: "KL of predictions", series: own("logit_kl"), error: "logit_kl_standard_error", format: (x) => fixed(x, 4), scale: "log" },
  { value: "recall", label: "attention mass kept", series: own("recall"), error: "recall_standard_error", format: (x) => fixed(x) },
  { value: "error", label: "error of the output", series: own("error"), error: "error_standard_error", format: short, scale: "log" },
];

export function numberIn(row: Row, column: string): number | null {
  const value = row[column];
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

export const densityOf = (row: Row): number | null =>
  numberIn(row, "realised_density_ratio") ?? numberIn(row, "density_ratio") ?? numberIn(row, "density");

/** What a row is about, in words. */
export function nameOf(row: Row): string {
  const parts = [row.case ?? row.method ?? row.run ?? row.variant ?? row.kind ?? row.result, row.selector, row.budget];
  if (!row.case && row.shape) parts.unshift(row.shape);
  if (row.direction) parts.push(row.direction);
  return parts.filter((x) => x !== null && x !== undefined && x !== "").join(" ");
}

/** Rows of one line in a chart against density: the same thing but for its density. */
function lineOf(row: Row): string {
  const name = nameOf(row).replace(/density=[\d.]+|\bfull\b|\bcausal\b|\bdense\b/g, "");
  return `${row.result}/${name}/${row.length ?? ""}/${row.T ?? ""}`;
}

export interface Mark {
  name: string;
  line: string;
  series: string;
  density: number | null;
  value: number;
  low: number;
  high: number;
  row: Row;
}

/** The points of a metric: one for each row and series that has a value. */
export function marks(rows: Row[], metric: Metric): Mark[] {
  return rows.flatMap((row) =>
    metric.series.flatMap(({ column, name }) => {
      const value = numberIn(row, column);
      if (value === null) return [];
      const error = (metric.error && numberIn(row, metric.error)) || 0;
      const least = name === "XSAKE" && metric.least ? numberIn(row, metric.least) : null;
      const series = row.kind && row.method ? String(row.kind) : name;
      const mark = {
        name: nameOf(row),
        line: `${lineOf(row)}/${name}`,
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
