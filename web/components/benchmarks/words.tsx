"use client";

import type { Row } from "@/lib/metrics";

// Words of the columns that name a row, for those that some row has.
const WORDS: { columns: string[]; meanings: Record<string, string> }[] = [
  {
    columns: ["kind"],
    meanings: {
      dense: "every block",
      fixed: "a pattern that does not look at the text",
      seed: "the method of the earlier XSAKE: random blocks, as many as a head's entropy asks for",
      static: "blocks that mattered in calibration, the same for every text",
      "run time": "blocks are chosen on each text, as many for each head as calibration found",
      oracle: "the same number of blocks, but chosen by the true attention: the best that a selector could do",
    },
  },
  {
    columns: ["family"],
    meanings: {
      passkey: "a five-digit key is hidden in a novel and asked for at its end",
      needles: "three words have numbers, and the number of one is asked for",
      lookup: "a list of words and numbers, and the number of one is asked for",
      variables: "X is a number and Y is X; the number of Y is asked for",
      common_words: "a list in which one word recurs; that word is asked for",
      copy: "a passage comes twice, and goes on as it did",
    },
  },
  {
    columns: ["direction"],
    meanings: {
      forward: "the output",
      backward: "its gradients, without the output",
      "forward+backward": "the output and its gradients",
    },
  },
];

/** What the words in these rows mean. */
export function Words({ rows }: { rows: Row[] }) {
  const found = WORDS.flatMap(({ columns, meanings }) => {
    const values = new Set(rows.flatMap((row) => columns.map((x) => row[x])));
    return Object.entries(meanings).filter(([word]) => values.has(word));
  });
  const isHads = rows.some((x) => typeof x.method === "string" && x.method.includes("/"));
  if (!found.length && !isHads) return null;
  return (
    <details className="small">
      <summary>What the words mean</summary>
      <dl className="words">
        {isHads ? (
          <div>
            <dt>selector/policy</dt>
            <dd>a method of HADS: the selector chooses the blocks, the policy splits the budget over heads</dd>
          </div>
        ) : null}
        {found.map(([word, meaning]) => (
          <div key={word}>
            <dt>{word.replaceAll("_", " ")}</dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}
