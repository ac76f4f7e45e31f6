"use client";

import { type KeyboardEvent, type PointerEvent, useMemo, useState } from "react";
import { Scale } from "@/components/scale";
import { fixed } from "@/lib/format";

type Grid = (number | null)[][];
const GAP = 0.06;
const STRONGEST = 0.5; // mass that has the full colour
const FAINTEST = { kept: 14, dropped: 12 }; // percent of the colour at no mass, so that every block shows
const BARS = 6; // width of the bars beside the map, in blocks of a map of 32

interface Props {
  /** [row blocks][kv blocks], attention mass; a row adds up to 1. */
  mass: Grid;
  /** 1 where the block is visited; without it every block is. */
  chosen?: number[][];
  /** Mass that a row drops. */
  dropped?: (number | null)[];
  label: string;
  /** The words of a block, for the line below the map. */
  wordsOf?: (block: number) => string;
}

const shade = (colour: string, least: number, percent: number) =>
  `color-mix(in oklab, var(${colour}) ${(least + (1 - least / 100) * percent).toFixed(1)}%, var(--surface))`;
const kept = (percent: number) => shade("--accent", FAINTEST.kept, percent);
const lost = (percent: number) => shade("--warn", FAINTEST.dropped, percent);

/**
 * Attention mass of one head by blocks: rows are queries, columns are keys. Visited blocks are in the
 * accent colour, dropped ones in orange; the root of the mass is the strength, so that small ones show.
 */
export function Blocks({ mass, chosen, dropped, label, wordsOf }: Props) {
  const n = mass.length;
  const [at, setAt] = useState<[number, number] | null>(null);
  const bars = dropped ? (BARS * n) / 32 : 0;
  const cells = useMemo(
    () =>
      mass.flatMap((row, i) =>
        row.slice(0, i + 1).map((value, j) => {
          const root = 100 * Math.sqrt(Math.min(Math.max(value ?? 0, 0) / STRONGEST, 1));
          const isKept = chosen ? chosen[i]?.[j] === 1 : true;
          const fill = isKept ? kept(root) : lost(root);
          return <rect key={`${i}-${j}`} x={j} y={i} width={1 - GAP} height={1 - GAP} style={{ fill }} />;
        }),
      ),
    [mass, chosen],
  );

  const point = (event: PointerEvent<SVGSVGElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * (n + bars));
    const y = Math.floor(((event.clientY - box.top) / box.height) * n);
    if (y >= 0 && y < n) setAt([y, Math.min(Math.max(x, 0), y)]);
  };
  const press = (event: KeyboardEvent) => {
    const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const [i, j] = at ?? [n - 1, 0];
    const row = Math.min(Math.max(i + step[0], 0), n - 1);
    setAt([row, Math.min(Math.max(j + step[1], 0), row)]);
  };

  return (
    <div>
      <p className="axes" aria-hidden="true">
        <span>↓ reading position</span>
        <span>what it looks at →</span>
      </p>
      <svg
        className="blocks"
        viewBox={`0 0 ${n + bars} ${n}`}
        role="application"
        aria-label={`${label}. Arrow keys move over its blocks.`}
        tabIndex={0}
        onPointerMove={point}
        onPointerDown={point}
        onKeyDown={press}
        onFocus={() => setAt((old) => old ?? [n - 1, 0])}
      >
        {cells}
        {dropped?.map((value, i) => (
          <rect key={i} x={n + 0.3} y={i} height={1 - GAP} width={(bars - 0.3) * (value ?? 0)} style={{ fill: "var(--warn)" }} />
        ))}
        {at ? <rect className="cursor" x={at[1]} y={at[0]} width={1 - GAP} height={1 - GAP} /> : null}
      </svg>
      <ul className="legend">
        <li><Scale name={chosen ? "visited, mass" : "mass"} low="0" high={`≥ ${STRONGEST}`} from={kept(0)} to={kept(100)} /></li>
        {chosen ? <li><Scale name="dropped, mass" low="0" high={`≥ ${STRONGEST}`} from={lost(0)} to={lost(100)} /></li> : null}
        {dropped ? <li>bars at the right: mass that a row drops</li> : null}
      </ul>
      <p className="small quiet" role="status" style={{ minHeight: "4.6em" }}>
        {at ? <Said {...{ at, mass, chosen, dropped, wordsOf }} /> : "Point at a block, or move over the map with the arrow keys."}
      </p>
    </div>
  );
}

function Said({ at: [i, j], mass, chosen, dropped, wordsOf }: Omit<Props, "label"> & { at: [number, number] }) {
  const state = chosen ? (chosen[i]?.[j] === 1 ? "visited" : "dropped") : "";
  return (
    <>
      Row block {i}
      {wordsOf ? <> “{wordsOf(i)}”</> : null} gives <b>{fixed(mass[i]?.[j], 3)}</b> of its attention to block {j}
      {wordsOf ? <> “{wordsOf(j)}”</> : null}
      {state ? <>, which is {state}</> : null}
      {dropped ? <>; the row drops {fixed(dropped[i], 3)} in all</> : null}.
    </>
  );
}
