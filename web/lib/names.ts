// What rows of result files are called in charts: by what they are about, and by whatever else tells them apart.

import { headingOf, shown } from "./columns";
import { whole } from "./format";
import type { Row } from "./metrics";

/** Numbers that say what was measured, not how it came out. */
export const PARAMETERS = /^(T|S|B|N|K|H|Hv|length|batch|block|band|width|pairs|devices|layers|rows|repeats?|seed|prompts|documents|samples|itemsize|group|refresh|programs|steps|logit|tokens)$|(^|_)(heads|size|selected|loops|documents|windows)$|^hads\.|^load_|density|standard_error$/;

export function numberIn(row: Row, column: string): number | null {
  const value = row[column];
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

export const densityOf = (row: Row): number | null =>
  numberIn(row, "realised_density_ratio") ?? numberIn(row, "density_ratio") ?? numberIn(row, "density");

/** A task and its length, for rows of such files. */
export const taskOf = (row: Row) => (row.family ? `${String(row.family).replaceAll("_", " ")}, ${whole(numberIn(row, "length"))} tokens` : "");

const joined = (parts: (Row[string] | undefined)[]) => parts.filter((x) => x !== null && x !== undefined && x !== "").join(" ");

function subjectOf(row: Row): string {
  const what = row.case ?? row.method ?? row.what ?? row.run ?? row.variant ?? row.role ?? row.kind ?? row.result;
  return joined([taskOf(row), row.case ? "" : row.shape, what, row.part, row.selector, row.budget, row.direction]);
}

/** The same without the density: what has one line in a chart against it. */
const lineOf = (row: Row) => subjectOf(row).replace(/,? ?(density[= ][\d.]+|\bfull\b|\bcausal\b|\bdense\b)/g, "").replace(/^[, ]+/, "").trim() || subjectOf(row);

export interface Names {
  /** Of a line in a chart against density. */
  short: string;
  /** Of the row, its density included where its case has it. */
  full: string;
}

// Never part of a name: already in it, shown as colours, or not what was asked for.
const LEFT_OUT = new Set(
  "case method what run variant role kind part selector budget direction family shape result date device suite implementation backend clock commit command platform_key samples repeat repeats right_by_prompt".split(" "),
);
const OUTCOME = /density|standard_error$|_hash$|_limit$|^load_/;

/** Whether a column says what was measured: a parameter, or a text. */
const isNaming = (column: string, rows: Row[]) =>
  !LEFT_OUT.has(column) &&
  !OUTCOME.test(column) &&
  rows.every((x) => x[column] === null || x[column] === undefined || typeof x[column] === (PARAMETERS.test(column) ? "number" : "string"));

/** Rows of one line that differ in more than their density get the columns in which they do. */
export function namesOf(rows: Row[]): Map<Row, Names> {
  const found = new Map<Row, Names>();
  for (const group of grouped(rows, (x) => `${lineOf(x)}/${x.implementation ?? x.backend ?? x.variant ?? ""}`)) {
    const columns = [...new Set(group.flatMap(Object.keys))].filter((x) => isNaming(x, group));
    let parts = [group];
    const telling: string[] = [];
    for (const column of columns) {
      const finer = parts.flatMap((x) => grouped(x, (row) => String(row[column] ?? "")));
      if (finer.length > parts.length) telling.push(column);
      parts = finer;
    }
    for (const row of group) {
      const words = telling.map((x) => (typeof row[x] === "number" ? `${headingOf(x)} ${shown(x, row[x])}` : String(row[x] ?? "")));
      const extra = words.filter(Boolean).join(", ");
      found.set(row, { short: joined([lineOf(row), extra && `(${extra})`]), full: joined([subjectOf(row), extra && `(${extra})`]) });
    }
  }
  return found;
}

function grouped(rows: Row[], keyOf: (row: Row) => string): Row[][] {
  const found = new Map<string, Row[]>();
  for (const row of rows) {
    const key = keyOf(row);
    const group = found.get(key);
    if (group) group.push(row);
    else found.set(key, [row]);
  }
  return [...found.values()];
}
