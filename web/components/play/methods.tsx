"use client";

import { useEffect, useState } from "react";
import { Problem } from "@/components/client";
import { get, type Schemas } from "@/lib/api";
import { fixed, percent, signed } from "@/lib/format";

interface Row {
  method: Schemas["MethodFigures"];
  words: Schemas["WordFigures"];
}

const IDLE_MILLISECONDS = 500; // after the last change of the density

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
        const figures = await get("/api/play/texts/{id}/method", values);
        const words = await get("/api/play/texts/{id}/words", values);
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
      <div className={isCurrent ? "scroll" : "scroll stale"} tabIndex={0} role="region" aria-label="All methods at this density">
        <table className="data">
          <thead>
            <tr>
              <th scope="col">method</th>
              {["density", "mass kept", "KL of attention", "KL of next token", "words changed", "perplexity"].map((x) => (
                <th key={x} scope="col" className="number">{x}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.rows.map(({ method, words }) => (
              <tr key={method.method} aria-selected={method.method === chosen}>
                <td>
                  <button type="button" className="plain" onClick={() => onChoose(method.method)}>
                    {method.method.replaceAll("_", " ")}
                  </button>
                </td>
                <td className="number">{fixed(method.density_ratio)}</td>
                <td className="number">{fixed(method.mean_recall)}</td>
                <td className="number">{fixed(method.mean_kl)}</td>
                <td className="number">{fixed(method.next_kl, 4)}</td>
                <td className="number">{percent(words.changed_ratio)}</td>
                <td className="number">{signed(100 * (words.perplexity_gap ?? NaN), 2)}%</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p className="small quiet" role="status">
        {left > 0 ? `${left} methods are still to be measured …` : "All methods are measured, on the same text and at the same density."}
      </p>
      <Problem error={error} />
    </>
  );
}
