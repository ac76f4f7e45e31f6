"use client";

import { useMemo } from "react";
import { Problem, Waiting } from "@/components/client";
import { CopyPython } from "@/components/copy";
import { options, Select, Slider } from "@/components/fields";
import type { Schemas } from "@/lib/api";
import { count, fixed } from "@/lib/format";
import { numberOf, useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";

const LENGTHS = [512, 1024, 2048, 4096, 8192];
const BLOCKS = [16, 32, 64, 128];
const WINDOW = "rule.sink_window";

/** A mask of a rule or of a pattern, as the library computes it. */
export function MaskDrawing() {
  const choices = useGet("/api/masks/choices");
  if (!choices.data) return choices.error ? <Problem error={choices.error} /> : <Waiting>Loading the rules …</Waiting>;
  return <Drawing choices={choices.data} />;
}

function Drawing({ choices }: { choices: Schemas["MaskChoices"] }) {
  const [query, set] = useQuery();
  const mask = query.get("mask") ?? WINDOW;
  const [kind, name] = mask.split(".") as [string, string];
  const rule = kind === "rule" ? choices.rules.find((x) => x.name === name) : undefined;
  const length = numberOf(query, "tokens", 2048);
  const block = numberOf(query, "tile", 64);
  const density = numberOf(query, "share", 0.25);
  const parameters = Object.fromEntries(
    (rule?.parameters ?? []).map((x) => [x.name, numberOf(query, `p.${x.name}`, x.default ?? 0)]),
  );
  const values = rule ? { rule: name, ...parameters } : { method: name, density };
  const found = useGet("/api/masks", { ...values, length, block });
  const known = [
    ...choices.rules.map((x) => ({ value: `rule.${x.name}`, label: `rule: ${x.name.replaceAll("_", " ")}`, title: x.description })),
    ...choices.methods
      .filter((x) => x.is_fixed)
      .map((x) => ({ value: `method.${x.name}`, label: `pattern: ${x.name.replaceAll("_", " ")}`, title: x.description })),
  ];
  return (
    <div className="columns two">
      <div className="stack">
        <div className="row">
          <Select label="Rule, or pattern at a density" value={mask} options={known} onChange={(x) => set({ mask: x })} />
          <Select label="Tokens" value={String(length)} options={options(LENGTHS)} onChange={(x) => set({ tokens: x })} />
          <Select label="Block" value={String(block)} options={options(BLOCKS)} onChange={(x) => set({ tile: x })} />
        </div>
        <p className="small quiet">{known.find((x) => x.value === mask)?.title}.</p>
        {rule ? (
          <div className="row">
            {rule.parameters.map((x) => (
              <label className="field" key={x.name}>
                <span>{x.name.replaceAll("_", " ")}</span>
                <input
                  type="number"
                  min={0}
                  step={x.is_whole ? 1 : 0.05}
                  value={parameters[x.name]}
                  style={{ width: "7rem" }}
                  onChange={(event) => set({ [`p.${x.name}`]: event.target.value })}
                />
              </label>
            ))}
          </div>
        ) : (
          <Slider label="Density:" value={density} shown={fixed(density, 2)} min={0.05} max={1} step={0.01} onChange={(x) => set({ share: x })} />
        )}
        <Problem error={found.error} />
        {found.data ? (
          <div className={found.isLoading ? "stale" : ""}>
            <p>
              Density <b>{fixed(found.data.density_ratio)}</b> of {found.data.density_of}: {count(found.data.visited_blocks, "block")} of{" "}
              {found.data.block} × {found.data.block} tokens {found.data.visited_blocks === 1 ? "is" : "are"} visited.
            </p>
            <CopyPython code={found.data.python} what="this mask" />
          </div>
        ) : null}
      </div>
      {found.data ? <div className={found.isLoading ? "stale" : ""}><Grid found={found.data} /></div> : <Waiting>Computing …</Waiting>}
    </div>
  );
}

/** Blocks of a mask; all of a kind are one path, since there may be thousands. */
function Grid({ found }: { found: Schemas["MaskFigures"] }) {
  const { blocks } = found;
  const [partial, full] = useMemo(() => {
    const path = (kind: number) =>
      blocks.flatMap((row, i) => row.flatMap((x, j) => (x === kind ? [`M${j} ${i}h.94v.94h-.94z`] : []))).join("");
    return [path(1), path(2)];
  }, [blocks]);
  const n = blocks.length;
  return (
    <figure>
      <svg className="blocks" viewBox={`0 0 ${n} ${n}`} role="img" aria-label={`Blocks of ${found.title}`} style={{ background: "var(--sunken)" }}>
        <path d={full} style={{ fill: "var(--accent)" }} />
        <path d={partial} style={{ fill: "color-mix(in oklab, var(--accent) 50%, var(--surface))" }} />
      </svg>
      <ul className="legend">
        <li><i style={{ background: "var(--accent)" }} />full: every pair of tokens</li>
        <li><i style={{ background: "color-mix(in oklab, var(--accent) 50%, var(--surface))" }} />partial: the rule decides inside</li>
        <li><i style={{ background: "var(--sunken)", border: "1px solid var(--line)" }} />never read</li>
      </ul>
    </figure>
  );
}
