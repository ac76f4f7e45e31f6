"use client";

import type React from "react";
import { type KeyboardEvent, useId, useRef } from "react";
import { Scale } from "@/components/scale";
import { fixed } from "@/lib/format";

type Grid = (number | null)[][];

interface Props {
  /** [layers][heads], 0 to 1: the colour of a head. */
  fill: Grid;
  fillName: string;
  /** [layers][heads], 0 to 1: the bar at its foot. */
  bar?: Grid;
  barName?: string;
  /** Largest value of `fill`; darker is not possible. */
  most?: number;
  selected: { layer: number; head: number } | null;
  onSelect: (layer: number, head: number) => void;
  label: string;
}

/** A map of layers × heads; arrow keys move, Enter selects. */
export function Heads({ fill, fillName, bar, barName, most = 1, selected, onSelect, label }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const id = useId();
  const heads = fill[0]?.length ?? 0;
  const at = selected ?? { layer: 0, head: 0 };

  const move = (event: KeyboardEvent, layer: number, head: number) => {
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const to: HTMLElement | null | undefined = host.current?.querySelector(
      `[data-at="${layer + step[0]}-${head + step[1]}"]`,
    );
    to?.focus();
    to?.click();
  };

  return (
    <>
      <p className="axes" aria-hidden="true">
        <span>↓ layer</span>
        <span>head →</span>
      </p>
      <div
        ref={host}
        className={bar ? "heads" : "heads plain"}
        role="group"
        aria-label={label}
        aria-describedby={id}
        style={
          { gridTemplateColumns: `1.6rem repeat(${heads}, minmax(0, 1fr))`, "--columns": heads } as React.CSSProperties
        }
      >
        <span id={id} className="hidden-text">
          Arrow keys move between layers and heads.
        </span>
        <span className="axis" aria-hidden="true" />
        {fill[0]?.map((_, head) => (
          <span key={head} className="axis" aria-hidden="true">
            {head}
          </span>
        ))}
        {fill.map((row, layer) => [
          <span key={`layer-${layer}`} className="axis" aria-hidden="true">
            {layer}
          </span>,
          ...row.map((value, head) => {
            const share = bar?.[layer]?.[head] ?? null;
            const words = [
              `Layer ${layer}, head ${head}`,
              `${fillName} ${fixed(value, 3)}`,
              ...(bar ? [`${barName} ${fixed(share, 3)}`] : []),
            ].join(", ");
            const isHere = at.layer === layer && at.head === head;
            const style = {
              "--fill": `${(100 * Math.min((value ?? 0) / most, 1)).toFixed(1)}%`,
              "--bar": `${(100 * (share ?? 0)).toFixed(1)}%`,
            } as React.CSSProperties;
            return (
              <button
                key={`${layer}-${head}`}
                type="button"
                data-at={`${layer}-${head}`}
                aria-label={words}
                aria-pressed={selected !== null && isHere}
                tabIndex={isHere ? 0 : -1}
                title={words}
                style={style}
                onClick={() => onSelect(layer, head)}
                onKeyDown={(event) => move(event, layer, head)}
              >
                <i />
              </button>
            );
          }),
        ])}
      </div>
      <ul className="legend">
        <li><Scale name={fillName} low="0" high={fixed(most, most === 1 ? 0 : 2)} from="var(--sunken)" to="var(--accent)" /></li>
        {bar ? <li><i style={{ background: "var(--warn)", height: "0.3rem", verticalAlign: "0.2rem" }} />{barName} of the head</li> : null}
      </ul>
    </>
  );
}
