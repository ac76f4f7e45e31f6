"use client";

import { useMemo } from "react";
import { short } from "@/lib/format";
import type { Row } from "@/lib/metrics";
import { useQuery } from "@/lib/url";

const PAGE = 100; // rows that are shown at once

function shown(value: Row[string] | undefined): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : short(value);
  return String(value);
}

function compare(a: Row[string] | undefined, b: Row[string] | undefined): number {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** All columns of the rows; a click on a heading sorts. */
export function RawTable({ rows, columns }: { rows: Row[]; columns: string[] }) {
  const [query, set] = useQuery();
  const sort = query.get("sort") ?? "";
  const isDown = sort.startsWith("-");
  const by = isDown ? sort.slice(1) : sort;
  const page = Number(query.get("page") ?? 1);
  const sorted = useMemo(() => {
    if (!by) return rows;
    const found = [...rows].sort((a, b) => compare(a[by], b[by]));
    return isDown ? found.reverse() : found;
  }, [rows, by, isDown]);
  const pages = Math.max(Math.ceil(rows.length / PAGE), 1);
  const at = Math.min(Math.max(page, 1), pages);
  const numeric = useMemo(() => new Set(columns.filter((c) => rows.some((x) => typeof x[c] === "number"))), [rows, columns]);
  const press = (column: string) => set({ sort: by !== column ? column : isDown ? null : `-${column}`, page: null });
  return (
    <>
      <div className="scroll" style={{ maxHeight: "32rem" }} tabIndex={0} role="region" aria-label="Rows">
        <table className="data">
          <thead>
            <tr>
              {columns.map((c) => (
                <th key={c} scope="col" className={numeric.has(c) ? "number" : ""} aria-sort={by === c ? (isDown ? "descending" : "ascending") : undefined}>
                  <button type="button" onClick={() => press(c)}>
                    {c}
                    {by === c ? (isDown ? " ↓" : " ↑") : ""}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.slice((at - 1) * PAGE, at * PAGE).map((row, i) => (
              <tr key={i}>
                {columns.map((c) => (
                  <td key={c} className={numeric.has(c) ? "number" : ""} title={typeof row[c] === "number" ? String(row[c]) : undefined}>
                    {shown(row[c])}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {pages > 1 ? (
        <div className="row centre">
          <button type="button" disabled={at === 1} onClick={() => set({ page: at - 1 })}>Previous rows</button>
          <span className="small">page {at} of {pages}</span>
          <button type="button" disabled={at === pages} onClick={() => set({ page: at + 1 })}>Next rows</button>
        </div>
      ) : null}
    </>
  );
}
