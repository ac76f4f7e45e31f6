// The figures of the first page: which row of which result file each one is, and what it says.

import { get, type Schemas } from "./api";
import { fixed, percent, signed, whole } from "./format";

type Row = Schemas["ResultRows"]["rows"][number];

export interface Headline {
  result: string;
  figure: string;
  words: string;
  note: string;
}

const DENSITY = 0.43; // the density that the published comparisons share

const numberIn = (row: Row | undefined, column: string): number | null => {
  const value = row?.[column];
  return typeof value === "number" ? value : null;
};
const isNear = (row: Row, column: string) => Math.abs((numberIn(row, column) ?? 9) - DENSITY) < 0.01;

/** From the rows of a file and the sentence that describes it. */
type Make = (rows: Row[], about: string) => Omit<Headline, "result"> | null;

/** Selection and sparse attention together, at the longest shape that was timed. */
const speed: Make = (rows) => {
  const found = rows
    .filter((x) => x.kind === "headline" && x.selector === "mean_query" && x.budget === "kl" && isNear(x, "density_ratio"))
    .sort((a, b) => (numberIn(b, "dense_seconds") ?? 0) - (numberIn(a, "dense_seconds") ?? 0))[0];
  const ratio = numberIn(found, "selection_and_sparse_over_dense");
  if (!found || ratio === null) return null;
  return {
    figure: `${fixed(ratio, 2)} ×`,
    words: `the time of dense ${String(found.dense).replace("cudnn", "cuDNN")} attention at density ${fixed(numberIn(found, "density_ratio"), 2)}, selection included`,
    note: `forward, shape ${found.shape} (B·N·T·H), ${found.device}`,
  };
};

/** HADS and the best fixed pattern, on text that was not calibrated on. */
const quality: Make = (rows, about) => {
  const near = rows.filter((x) => isNear(x, "realised_density_ratio"));
  const hads = near.find((x) => x.method === "mean_query/output");
  const fixedOnes = near.filter((x) => x.kind === "fixed");
  const gap = (x: Row) => numberIn(x, "perplexity_gap") ?? Infinity;
  const best = [...fixedOnes].sort((a, b) => gap(a) - gap(b))[0];
  if (!hads || !best) return null;
  const error = numberIn(hads, "perplexity_gap_standard_error");
  return {
    figure: `${signed(100 * gap(hads), 2)}%`,
    words: `perplexity with HADS at density ${fixed(numberIn(hads, "realised_density_ratio"), 2)}; the best fixed pattern, ${String(best.method).replaceAll("_", " ")}, costs ${signed(100 * gap(best), 1)}%`,
    note: `${about.split(":")[0]}; ± ${percent(error, 2)} standard error, ${whole(numberIn(hads, "length"))} tokens, ${whole(numberIn(hads, "documents"))} documents that were not calibrated on`,
  };
};

const GAP = "perplexity_gap.";

/** Every run of the file that was trained with HADS, against the dense one with the same seed; and what another seed does. */
const training: Make = (rows) => {
  const column = Object.keys(rows[0] ?? {}).find((x) => x.startsWith(GAP) && x.endsWith("test"));
  const gap = (x: Row | undefined) => (column ? numberIn(x, column) : null) ?? NaN;
  const shown = (x: Row | undefined) => `${signed(100 * gap(x), 2)}%`;
  const isDense = (x: Row) => numberIn(x, "density_ratio") === 1;
  const sparse = rows.filter((x) => !isDense(x) && isNear(x, "density_ratio") && Number.isFinite(gap(x)));
  const one = sparse[0];
  const base = rows.find((x) => isDense(x) && x.seed === one?.seed);
  const seed = rows.find((x) => isDense(x) && x.seed !== one?.seed);
  if (!column || !one || !base) return null;
  const runs = sparse.map((x) => `${x.run} (blocks by ${String(x["hads.selector"]).replaceAll("_", " ")}) ${shown(x)}`).join(", ");
  const other = seed ? ` Dense training with another seed, ${seed.run}, differs from ${base.run} by ${shown(seed)}.` : "";
  const which = sparse.length > 1 ? `the ${sparse.length} such runs` : "the only such run";
  return {
    figure: sparse.map(shown).join(" and "),
    words: `perplexity on ${column.slice(GAP.length)} after training with HADS at density ${fixed(numberIn(one, "density_ratio"), 2)} instead of dense: ${which} of this file`,
    note: `${runs}, against ${base.run}.${other} ${whole(numberIn(one, "parameters"))} parameters, ${whole(numberIn(one, "tokens_seen"))} tokens, ${one.device}`,
  };
};

/** The forward kernel at the published density, with FlashAttention-4 on the same machine. */
const kernel: Make = (rows) => {
  const found = rows
    .filter((x) => x.direction === "forward" && isNear(x, "density_ratio") && x.times_faster_than_flash_attention_4 != null)
    .sort((a, b) => (numberIn(b, "teraflops") ?? 0) - (numberIn(a, "teraflops") ?? 0))[0];
  if (!found) return null;
  return {
    figure: `${whole(numberIn(found, "teraflops"))}`,
    words: `TFLOP/s forward at density ${fixed(numberIn(found, "density_ratio"), 2)}, ${fixed(numberIn(found, "times_faster_than_flash_attention_4"), 2)} × FlashAttention-4’s block-sparse forward`,
    note: `${found.case} (B·N·T·H), ${found.device}`,
  };
};

const SOURCES: [string, Make][] = [
  ["hads-speed-", speed],
  ["hads-64-", quality],
  ["training-", training],
  ["hopper-2", kernel],
];

/** The newest file whose name begins so; the server lists the newest first. */
export const newest = (results: Schemas["ResultList"]["results"], prefix: string) => results.find((x) => x.name.startsWith(prefix))?.name;

/** Figures from the newest result file of each kind; a kind without a file has none. */
export async function headlines(): Promise<Headline[]> {
  const { results } = await get("/api/results");
  const found = await Promise.all(
    SOURCES.map(async ([prefix, make]) => {
      const result = newest(results, prefix);
      if (!result) return null;
      const { rows } = await get("/api/rows", { result });
      const made = make(rows, results.find((x) => x.name === result)?.description ?? "");
      return made && { result, ...made };
    }),
  );
  return found.filter((x) => x !== null);
}
