"use client";

import { useMemo } from "react";
import { Scroll } from "@/components/scroll";
import { headingOf, shown, sorted as sortedColumns } from "@/lib/columns";
import type { Row } from "@/lib/metrics";
import { useQuery } from "@/lib/url";

const PAGE = 100; // rows that are shown at once
const LONG = 48; // characters of a cell

function compare(a: Row[string] | undefined, b: Row[string] | undefined): number {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const cut = (text: string) => (text.length > LONG ? `${text.slice(0, LONG - 1)}…` : text);

/** The rows; a click on a heading sorts. Columns that are the same in all of them are a line above the table. */
export function RawTable({ rows, columns }: { rows: Row[]; columns: string[] }) {
  const [query, set] = useQuery();
  const sort = query.get("sort") ?? "";
  const isDown = sort.startsWith("-");
  const by = isDown ? sort.slice(1) : sort;
  const page = Number(query.get("page") ?? 1);
  const isAll = query.get("columns") === "all";
  const { varying, constant } = useMemo(() => sortedColumns(rows, columns), [rows, columns]);
  const listed = isAll ? columns : varying;
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
      {constant.length && !isAll ? (
        <p className="small wide">
          The same in all rows: {constant.map(([c, value]) => `${headingOf(c)} ${cut(shown(c, value))}`).join(", ")}.
        </p>
      ) : null}
      {varying.length < columns.length ? (
        <label className="small">
          <input type="checkbox" checked={isAll} onChange={(event) => set({ columns: event.target.checked ? "all" : null })} /> show all{" "}
          {columns.length} columns
        </label>
      ) : null}
      <Scroll label="Rows" maxHeight="32rem">
        <table className="data named">
          <thead>
            <tr>
              {listed.map((c) => (
                <th key={c} scope="col" className={numeric.has(c) ? "number" : ""} aria-sort={by === c ? (isDown ? "descending" : "ascending") : undefined}>
                  <button type="button" title={c} onClick={() => press(c)}>
                    {headingOf(c)}
                    {by === c ? (isDown ? " ↓" : " ↑") : ""}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.slice((at - 1) * PAGE, at * PAGE).map((row, i) => (
              <tr key={i}>
                {listed.map((c) => {
                  const text = shown(c, row[c]);
                  const isShort = typeof row[c] === "number" || text.length > LONG;
                  return (
                    <td key={c} className={numeric.has(c) ? "number" : ""} title={isShort ? String(row[c]) : undefined}>
                      {cut(text)}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
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
