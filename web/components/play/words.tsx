"use client";

import { memo, useMemo } from "react";
import { Scroll } from "@/components/scroll";
import type { Schemas } from "@/lib/api";
import { count, fixed, methodName, percent, signed, visible } from "@/lib/format";

type Words = Schemas["WordFigures"];

/** The characters of a text that each token covers; offsets count code points, as in Python. */
export function pieces(text: string, tokens: Schemas["Token"][]): string[] {
  const points = Array.from(text);
  return tokens.map((x) => points.slice(x.begin, x.end).join(""));
}

interface Props {
  texts: string[];
  words: Words;
  method: string;
}

/** Where the most likely next word is another one than with dense attention. */
export const ChangedWords = memo(function ChangedWords({ texts, words, method }: Props) {
  const changed = useMemo(() => new Map(words.changed.map((x) => [x.position + 1, x])), [words]);
  return (
    <>
      <p className="small">
        With <b>{methodName(method)}</b> at density {fixed(words.density_ratio)}, the model expects another word than with
        dense attention at <b>{percent(words.changed_ratio)}</b> of the places. Loss {fixed(words.loss_nats)} nats instead of{" "}
        {fixed(words.dense_loss_nats)}: perplexity {signed(100 * (words.perplexity_gap ?? NaN), 2)}%.
      </p>
      <p className="small quiet">
        The text itself stays as it is. A word is marked where the prediction changes: before it, the model expects another word than with dense attention.
      </p>
      <div className="reading small" tabIndex={0} role="region" aria-label="The text, with changed predictions marked">
        {texts.map((text, i) => {
          const found = changed.get(i);
          if (!found) return <span key={i}>{text}</span>;
          const title = `dense expects ${visible(found.dense)}, this method ${visible(found.sparse)}`;
          return (
            <mark key={i} className="token changed" title={title}>
              {text || "∅"}
            </mark>
          );
        })}
      </div>
      <details className="small">
        <summary>
          List {count(words.changed.length, "changed prediction")}
        </summary>
        <Scroll label="Changed predictions" maxHeight="18rem">
          <table className="data">
            <thead>
              <tr>
                {["after", "dense expects", "sparse expects", "the text has", "KL, nats"].map((x) => (
                  <th key={x} scope="col">{x}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {words.changed.map((x) => (
                <tr key={x.position}>
                  <td><code>{visible(texts.slice(Math.max(x.position - 3, 0), x.position + 1).join(""))}</code></td>
                  <td><code>{visible(x.dense)}</code> {percent(x.dense_probability)}</td>
                  <td><code>{visible(x.sparse)}</code> {percent(x.sparse_probability)}</td>
                  <td><code>{visible(texts[x.position + 1] ?? "")}</code></td>
                  <td className="number">{fixed(x.kl, 4)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      </details>
    </>
  );
});
