"use client";

import { useEffect, useState } from "react";
import { Problem } from "@/components/client";
import { Scroll } from "@/components/scroll";
import { get, type Schemas } from "@/lib/api";
import { count, fixed, methodName, percent, signed } from "@/lib/format";

interface Row {
  method: Schemas["MethodFigures"];
  words: Schemas["WordFigures"];
}

const IDLE_MILLISECONDS = 500; // after the last change of the density

const COLUMNS = 6;

/** The figures of a method; of one that is still to be measured, dots. */
function cells(row: Row | undefined): string[] {
  if (!row) return Array.from({ length: COLUMNS }, () => "…");
  const { method, words } = row;
  const gap = words.perplexity_gap;
  return [
    fixed(method.density_ratio),
    fixed(method.mean_recall),
    fixed(method.mean_kl),
    fixed(method.next_kl, 4),
    percent(words.changed_ratio),
    gap === null ? fixed(gap) : `${signed(100 * gap, 2)}%`,
  ];
}

/** Methods that keep the same blocks: all heads have the same density, mass and KL. */
function alike(rows: Row[]): string[][] {
  const groups = new Map<string, string[]>();
  for (const { method } of rows) {
    const key = JSON.stringify([method.shares, method.recall, method.kl]);
    groups.set(key, [...(groups.get(key) ?? []), method.method]);
  }
  return [...groups.values()].filter((x) => x.length > 1);
}

interface Props {
  id: string;
  methods: string[];
  density: number;
  chosen: string;
  onChoose: (method: string) => void;
}

/** Every method on the same text at the same density; they are measured one after the other. */
export function Comparison({ id, methods, density, chosen, onChoose }: Props) {
  const [rows, setRows] = useState<{ of: string; rows: Row[] }>({ of: "", rows: [] });
  const [error, setError] = useState<Error | null>(null);
  const key = `${id}/${density}`;
  const list = methods.join(",");
  useEffect(() => {
    let isHere = true;
    const measure = async () => {
      const found: Row[] = [];
      for (const method of list.split(",")) {
        const values = { id, method, density };
        const words = await get("/api/play/texts/{id}/words", values); // first: its pass has the next word too
        const figures = await get("/api/play/texts/{id}/method", values);
        if (!isHere) return;
        found.push({ method: figures, words });
        setRows({ of: key, rows: [...found] });
      }
    };
    setError(null);
    const timer = setTimeout(() => void measure().catch((why) => isHere && setError(why)), IDLE_MILLISECONDS);
    return () => {
      isHere = false;
      clearTimeout(timer);
    };
  }, [id, density, key, list]);

  const isCurrent = rows.of === key;
  const left = methods.length - (isCurrent ? rows.rows.length : 0);
  return (
    <>
      <Scroll label="All methods at this density" isStale={!isCurrent}>
        <table className="data named">
          <thead>
            <tr>
              <th scope="col">method</th>
              {["density", "mass kept", "KL of attention", "KL of next word", "predictions changed", "perplexity"].map((x) => (
                <th key={x} scope="col" className="number">{x}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {methods.map((name) => (
              <tr key={name} aria-selected={name === chosen}>
                <td>
                  <button type="button" className="plain" onClick={() => onChoose(name)}>
                    {methodName(name)}
                  </button>
                </td>
                {cells(rows.rows.find((x) => x.method.method === name)).map((x, i) => (
                  <td key={i} className="number">{x}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <p className="small quiet" role="status">
        {left > 0 ? `${count(left, "method")} still to be measured …` : "All methods are measured, on the same text and at the same density."}
      </p>
      {isCurrent ? alike(rows.rows).map((names) => (
        <p key={names.join()} className="small quiet">
          {names.map(methodName).join(" and ")} keep the same blocks of this text at this density, so their figures are the same.
        </p>
      )) : null}
      {methods.includes("oracle") ? (
        <p className="small quiet">
          The oracle knows the attention mass of every block beforehand and keeps those of highest mass. It is an oracle of mass only: its
          predictions, and so its perplexity, can be further from dense than another method’s.
        </p>
      ) : null}
      <Problem error={error} />
    </>
  );
}
