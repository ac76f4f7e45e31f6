// Columns of result rows: the unit that a name ends with, and which of them tell rows apart.

import { bytes, fixed, percent, seconds, short, whole } from "./format";
import type { Row } from "./metrics";

type Format = (value: number) => string;

const UNITS: [RegExp, Format][] = [
  [/(^|_)seconds($|[._])/, seconds],
  [/(^|_)bytes($|_)/, bytes],
  [/_percent$/, (x) => `${short(x)}%`],
  [/^accuracy|^perplexity_gap|_gap_ratio$/, (x) => percent(x, 2)],
  [/(^|_)density($|_)|_ratio$/, (x) => fixed(x)],
  [/teraflops$|tokens_per_second$|^parameters$|^tokens_seen$|^operations$/, whole],
];

/** How numbers of a column are written: with the unit that its name ends with. */
export const formatOf = (column: string): Format => UNITS.find(([pattern]) => pattern.test(column))?.[1] ?? ((x) => (Number.isInteger(x) ? whole(x) : short(x)));

/** A cell as text; what there is not is nothing. */
export function shown(column: string, value: Row[string] | undefined): string {
  if (value === null || value === undefined) return "";
  return typeof value === "number" ? formatOf(column)(value) : String(value);
}

/** A column in words. */
export const headingOf = (column: string): string => column.replaceAll(".", ": ").replaceAll("_", " ");

export interface Sorted {
  /** Columns with several values. */
  varying: string[];
  /** Columns with one value in all rows, and that value. */
  constant: [string, Row[string]][];
}

/** Which columns differ between rows; those without any value are left out. */
export function sorted(rows: Row[], columns: string[]): Sorted {
  const found: Sorted = { varying: [], constant: [] };
  for (const column of columns) {
    const values = new Set(rows.map((x) => x[column] ?? null));
    const [first] = values;
    if (values.size > 1) found.varying.push(column);
    else if (first !== null && first !== undefined) found.constant.push([column, first]);
  }
  return rows.length > 1 ? found : { varying: found.constant.map(([x]) => x), constant: [] };
}
