"use client";

import { useEffect, useState } from "react";
import { Problem } from "@/components/client";
import { type Headline, headlines } from "@/lib/headlines";

export function Headlines() {
  const [found, setFound] = useState<Headline[] | null>(null);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    headlines().then(setFound, setError);
  }, []);
  if (error) return <Problem error={error} />;
  return (
    <ul className="headlines" style={{ minHeight: "20rem" }} aria-busy={found === null}>
      {found?.map((x) => (
        <li key={x.result} className="panel">
          <b>{x.figure}</b>
          <p>{x.words}</p>
          <p className="small quiet">{x.note}</p>
          <p className="small">
            <a href={`/benchmarks/?file=${encodeURIComponent(x.result)}`}>{x.result}</a>{" "}
            <a href={`/api/results/${encodeURIComponent(x.result)}`} aria-label={`JSON of ${x.result}`}>
              JSON
            </a>
          </p>
        </li>
      ))}
    </ul>
  );
}
