"use client";

import type { PlotOptions } from "@observablehq/plot";
import { useEffect, useRef, useState } from "react";

type Plot = typeof import("@/lib/plot");
export type Draw = (plot: Plot, width: number) => PlotOptions;

let loaded: Promise<Plot> | undefined;
const LEFT = 52;
const RIGHT = 20;
const BOTTOM = 36;

interface Props {
  draw: Draw;
  /** What the chart shows, for those who do not see it. */
  label: string;
  height: number;
  caption?: React.ReactNode;
  /** Covers what lies right of this share of the x axis: a replay draws nothing again. */
  veil?: number;
}

/** A chart of Observable Plot that fits its container. Its height is reserved before it is drawn. */
export function Chart({ draw, label, height, caption, veil }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const [plot, setPlot] = useState<Plot | null>(null);
  const [width, setWidth] = useState(0);
  const [isDrawn, setDrawn] = useState(false);

  useEffect(() => {
    loaded ??= import("@/lib/plot");
    let isHere = true;
    void loaded.then((module) => isHere && setPlot(module));
    return () => {
      isHere = false;
    };
  }, []);

  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(Math.floor(element.clientWidth)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    if (!plot || !width || !host.current) return;
    const drawn = plot.plot({
      width,
      height,
      marginLeft: LEFT,
      marginRight: RIGHT,
      marginBottom: BOTTOM,
      ...draw(plot, width),
      style: { background: "none", fontSize: "12px", color: "var(--ink)" },
    });
    for (const part of drawn.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label"); // "line", "dot"
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", label);
    host.current.replaceChildren(drawn);
    setDrawn(true);
  }, [plot, width, height, draw, label]);

  const inside = `(100% - ${LEFT + RIGHT}px)`;
  return (
    <figure>
      {caption ? <figcaption>{caption}</figcaption> : null}
      <div className="charted">
        <div className="chart" ref={host} style={{ minHeight: height }} aria-busy={!isDrawn} />
        {veil !== undefined && veil < 1 ? (
          <div
            className="veil"
            style={{
              left: `calc(${LEFT}px + ${inside} * ${veil})`,
              width: `calc(${inside} * ${1 - veil} + ${RIGHT}px)`,
              bottom: BOTTOM - 4, // half of a circle or of a line lies below the axis
            }}
          />
        ) : null}
      </div>
    </figure>
  );
}
