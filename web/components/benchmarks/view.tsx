"use client";

import { useMemo } from "react";
import { Charts } from "@/components/benchmarks/charts";
import { Files } from "@/components/benchmarks/files";
import { Words } from "@/components/benchmarks/words";
import { RawTable } from "@/components/benchmarks/table";
import { Problem, Waiting } from "@/components/client";
import { CopyPython } from "@/components/copy";
import { options, Select } from "@/components/fields";
import { address } from "@/lib/api";
import { count } from "@/lib/format";
import { newest } from "@/lib/headlines";
import { metricsOf, type Row } from "@/lib/metrics";
import { useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";

const LIMIT = 5000;
const EVERY = "every";
const FIRST = ["hopper-2", "hads-64-"]; // files to begin with: speed, then quality

// name in the address → columns of a row, of which the first that it has counts
const FILTERS: { name: string; label: string; columns: string[] }[] = [
  { name: "device", label: "Machine", columns: ["device"] },
  { name: "direction", label: "Direction", columns: ["direction"] },
  { name: "T", label: "Length, T", columns: ["T", "length"] },
  { name: "H", label: "Head size, H", columns: ["H"] },
  { name: "kind", label: "Kind", columns: ["kind", "suite"] },
  { name: "family", label: "Task", columns: ["family"] },
  { name: "by", label: "Implementation", columns: ["implementation", "backend", "variant"] },
];

const columnOf = (row: Row, columns: string[]) => columns.find((x) => row[x] !== null && row[x] !== undefined);

/** The values of a filter, in the rows that there are. */
function valuesOf(rows: Row[], columns: string[]): { column: string; value: string }[] {
  const found = new Map<string, { column: string; value: string }>();
  for (const row of rows) {
    const column = columnOf(row, columns);
    if (column) found.set(`${column}=${row[column]}`, { column, value: String(row[column]) });
  }
  return [...found.values()].sort((a, b) => a.value.localeCompare(b.value, "en", { numeric: true }));
}

export function Benchmarks() {
  const [query, set] = useQuery();
  const list = useGet("/api/results");
  const results = list.data?.results ?? [];
  const first = FIRST.map((x) => newest(results, x)).find((x) => x !== undefined) ?? results[0]?.name;
  const file = query.get("file") === EVERY ? "" : (query.get("file") ?? first ?? "");
  const isKnown = list.data !== null; // before, the file to begin with is not
  const everything = useGet(isKnown ? "/api/rows" : null, { limit: LIMIT, result: file });
  const where = FILTERS.map((x) => query.get(x.name)).filter((x) => x !== null);
  const values = {
    result: file,
    where,
    contains: query.get("contains"),
    density_from: query.get("from"),
    density_to: query.get("to"),
  };
  const found = useGet(isKnown ? "/api/rows" : null, { ...values, limit: LIMIT });
  const rows = useMemo(() => found.data?.rows ?? [], [found.data]);
  const metrics = useMemo(() => metricsOf(rows, found.data?.columns ?? []), [rows, found.data]);
  const metric = metrics.find((x) => x.value === query.get("metric")) ?? metrics[0];
  if (!list.data || !everything.data || !found.of) {
    const error = list.error ?? everything.error ?? found.error;
    return error ? <Problem error={error} /> : <Waiting isPage>Loading the results …</Waiting>;
  }

  const meanings = new Set(results.filter((x) => !file || x.name === file).map((x) => x.density_of));
  const densityOf = meanings.size === 1 ? ([...meanings][0] ?? "") : "";
  const about = results.find((x) => x.name === file)?.description;
  const link = address("/api/rows", { ...values, limit: LIMIT });
  const python = `import json\nfrom urllib.request import urlopen\n\nrows = json.load(urlopen(${JSON.stringify(window.location.origin + link)}))["rows"]\nprint(len(rows), rows[0])\n`;
  const nothing =
    found.isLoading || everything.isLoading
      ? "Loading …"
      : everything.data.total
        ? "No row matches these filters."
        : "This file has no rows; its JSON, in the list below, has what it holds.";
  const change = (changes: Record<string, string | null>) => set({ ...changes, page: null });
  return (
    <div className="stack">
      <section className="panel" aria-label="Filters">
        <div className="row">
          <Select
            label="Result file"
            value={file || EVERY}
            options={[{ value: EVERY, label: "every file" }, ...options(list.data.results.map((x) => x.name))]}
            onChange={(x) => change({ file: x, ...Object.fromEntries(FILTERS.map((f) => [f.name, null])) })}
          />
          {FILTERS.map((x) => {
            const choices = valuesOf(everything.data?.rows ?? [], x.columns);
            if (choices.length < 2 && !query.get(x.name)) return null;
            return (
              <Select
                key={x.name}
                label={x.label}
                value={query.get(x.name) ?? ""}
                options={[{ value: "", label: "any" }, ...choices.map((c) => ({ value: `${c.column}=${c.value}`, label: c.value }))]}
                onChange={(value) => change({ [x.name]: value })}
              />
            );
          })}
          <Text label="Search in all columns" value={query.get("contains") ?? ""} onChange={(x) => change({ contains: x })} />
          <Text label="Density from" type="number" value={query.get("from") ?? ""} onChange={(x) => change({ from: x })} />
          <Text label="to" type="number" value={query.get("to") ?? ""} onChange={(x) => change({ to: x })} />
          <button type="button" onClick={() => change(Object.fromEntries(["contains", "from", "to", ...FILTERS.map((f) => f.name)].map((x) => [x, null])))}>
            Clear the filters
          </button>
        </div>
        {about ? <p>{about}</p> : null}
        <Problem error={found.error} />
        <div className="row centre">
          <span className="small" role="status">{found.data ? count(found.data.total, "row") : "Loading …"}</span>
          <a className="button" href={`${link}&format=csv`} download="xsake-results.csv">CSV</a>
          <a className="button" href={link} download="xsake-results.json">JSON</a>
          <CopyPython code={rows.length ? python : undefined} what="these rows" />
        </div>
      </section>
      <section className="panel">
        <div className="row between">
          <h2>{metric ? metric.label : "No chart"}</h2>
          {metric ? (
            <Select label="What the charts show" value={metric.value} options={metrics.map((x) => ({ value: x.value, label: x.label }))} onChange={(x) => set({ metric: x })} />
          ) : null}
        </div>
        <div className={found.isLoading ? "stale" : ""}>
          {metric ? <Charts rows={rows} metric={metric} densityOf={densityOf} /> : <p className="quiet">{rows.length ? "These rows have no number to draw; the table has what they hold." : nothing}</p>}
        </div>
        <Words rows={rows} />
      </section>
      <section className="panel">
        <h2>Rows</h2>
        <p className="small quiet">
          Density is the share of {densityOf || "blocks"} that is computed{densityOf ? "" : "; files differ in which blocks they count"}. Shapes are batch·heads·tokens·head size.
        </p>
        {found.data && rows.length ? <RawTable rows={rows} columns={found.data.columns} /> : <p className="quiet">{nothing}</p>}
      </section>
      <section className="panel">
        <h2>Result files</h2>
        <Files list={list.data} file={file} onOpen={(x) => change({ file: x })} />
      </section>
    </div>
  );
}

interface TextProps {
  label: string;
  value: string;
  type?: string;
  onChange: (value: string) => void;
}

function Text({ label, value, type = "search", onChange }: TextProps) {
  const range = type === "number" ? { min: 0, max: 1, step: 0.05, style: { width: "6rem" } } : {};
  return (
    <label className="field">
      <span>{label}</span>
      <input type={type} value={value} onChange={(event) => onChange(event.target.value)} {...range} />
    </label>
  );
}
