"use client";

import { Scroll } from "@/components/scroll";
import type { Schemas } from "@/lib/api";
import { bytes, commit, commitTitle, whole } from "@/lib/format";

interface Props {
  list: Schemas["ResultList"];
  file: string;
  onOpen: (name: string) => void;
}

/** Every result file: where it comes from, and the file itself. */
export function Files({ list, file, onOpen }: Props) {
  return (
    <>
      <Scroll label="Result files">
        <table className="data named">
          <thead>
            <tr>
              {["file", "what it holds", "date", "machine", "rows", "commit", "how it was made"].map((x) => (
                <th key={x} scope="col">{x}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {list.results.map((x) => (
              <tr key={x.name} aria-selected={x.name === file}>
                <td>
                  <button type="button" className="plain" onClick={() => onOpen(x.name)}>{x.name}</button>
                </td>
                <td className="wraps">{x.description || x.sources.slice(0, 4).join(", ")}</td>
                <td>{x.date.slice(0, 10)}</td>
                <td className="folds">{x.device}</td>
                <td className="number">{whole(x.rows)}</td>
                <td title={commitTitle(x.commit)}>{commit(x.commit)}</td>
                <td className="wraps">
                  <a href={`/api/results/${encodeURIComponent(x.name)}`} download={`${x.name}.json`}>JSON</a>, {bytes(x.bytes)}
                  <details>
                    <summary>Command and versions<span className="hidden-text"> of {x.name}</span></summary>
                    <pre className="code" tabIndex={0}>
                      {x.command || "not recorded"}
                      {"\n\n"}
                      {Object.entries(x.versions).map(([name, version]) => `${name} ${version}`).join("\n")}
                      {`\ncommit ${x.commit || "not recorded"}`}
                    </pre>
                  </details>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {Object.entries(list.unreadable).map(([name, why]) => (
        <p key={name} className="notice">{name} cannot be read: {why}</p>
      ))}
    </>
  );
}
