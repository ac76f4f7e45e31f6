"use client";

import { useEffect, useState } from "react";
import { Problem } from "@/components/client";
import { Select } from "@/components/fields";
import { Refused, type Schemas } from "@/lib/api";
import { count, whole } from "@/lib/format";
import type { Reading } from "@/lib/use-text";

interface Props {
  model: Schemas["ModelFigures"];
  reading: Reading;
  block: number | null;
  onBlock: (block: string) => void;
  onExample: (example: Schemas["Example"]) => void;
}

export function TextPanel({ model, reading, block, onBlock, onExample }: Props) {
  const [draft, setDraft] = useState(reading.text);
  useEffect(() => setDraft(reading.text), [reading.text]);
  const { figures, isReading } = reading;
  const isSame = draft === reading.text;
  const example = model.examples.find((x) => x.text === reading.text);
  return (
    <>
      {model.examples.length ? (
        <div className="row centre" role="group" aria-label="Texts to begin with">
          <span className="small quiet">Texts to begin with:</span>
          {model.examples.map((x) => (
            <button key={x.name} type="button" aria-pressed={x === example} onClick={() => onExample(x)}>
              {x.name}
            </button>
          ))}
        </div>
      ) : null}
      <label className="field">
        <span>Text</span>
        <textarea
          rows={7}
          value={draft}
          onChange={(event) => setDraft(event.target.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) reading.read(draft);
          }}
        />
      </label>
      <div className="row">
        <button type="button" className="main" disabled={!draft || isReading || isSame} onClick={() => reading.read(draft)}>
          Read this text
        </button>
        <Select
          label="Tokens per block"
          value={block === null ? "" : String(block)}
          options={[
            { value: "", label: "automatic, by the text’s length" },
            ...model.blocks.map((x) => ({
              value: String(x),
              label: `${x} tokens, texts up to ${whole(model.longest[String(x)])}`,
            })),
          ]}
          onChange={onBlock}
        />
        <p className="small quiet" role="status" style={{ flex: "1 1 16rem" }}>
          {isReading
            ? "The model reads … The first text of a length takes some seconds, because its program is compiled."
            : figures && reading.of === reading.text
              ? `${count(figures.length, "token")} in ${count(figures.row_blocks, "block")} of ${figures.block}${figures.is_cut ? "; the rest is more than the model reads" : ""}.`
              : ""}
        </p>
      </div>
      {example ? <p className="small">{example.about}{example.layer !== null && example.layer !== undefined ? ` It is layer ${example.layer}, head ${example.head}.` : ""}</p> : null}
      {!isSame && figures && !isReading ? <p className="small notice" role="status">The results below are of the text before your changes; “Read this text” reads the new one.</p> : null}
      {reading.error instanceof Refused ? (
        <p className="notice" role="alert">This text was refused: {reading.error.message}.</p>
      ) : (
        <Problem error={reading.error} />
      )}
    </>
  );
}
