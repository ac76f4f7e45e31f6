"use client";

import type { PlotOptions } from "@observablehq/plot";
import { useEffect, useRef, useState } from "react";

type Plot = typeof import("@/lib/plot");
export type Draw = (plot: Plot, width: number) => PlotOptions;

let loaded: Promise<Plot> | undefined;
const LEFT = 52;
const RIGHT = 20;
const BOTTOM = 36;
const USUAL = 16; // px of the page's text at which a chart has its own size

/** Charts grow with the page's text, which is larger on very wide screens. */
const scaleNow = () => Math.max(parseFloat(getComputedStyle(document.documentElement).fontSize) / USUAL, 1);

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
  const [scale, setScale] = useState(scaleNow);
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
    const observer = new ResizeObserver(() => {
      setWidth(Math.floor(element.clientWidth));
      setScale(scaleNow());
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    if (!plot || !width || !host.current) return;
    const drawn = plot.plot({
      width: width / scale,
      height,
      marginLeft: LEFT,
      marginRight: RIGHT,
      marginBottom: BOTTOM,
      ...draw(plot, width / scale),
      style: { background: "none", fontSize: "12px", color: "var(--ink)" },
    });
    for (const part of drawn.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label"); // "line", "dot"
    drawn.setAttribute("width", String(width));
    drawn.setAttribute("height", String(height * scale));
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", label);
    host.current.replaceChildren(drawn);
    setDrawn(true);
  }, [plot, width, scale, height, draw, label]);

  const [left, right, bottom] = [LEFT * scale, RIGHT * scale, BOTTOM * scale];
  const inside = `(100% - ${left + right}px)`;
  return (
    <figure>
      {caption ? <figcaption>{caption}</figcaption> : null}
      <div className="charted">
        <div className="chart" ref={host} style={{ minHeight: height * scale }} aria-busy={!isDrawn} />
        {veil !== undefined && veil < 1 ? (
          <div
            className="veil"
            style={{
              left: `calc(${left}px + ${inside} * ${veil})`,
              width: `calc(${inside} * ${1 - veil} + ${right}px)`,
              bottom: bottom - 4, // half of a circle or of a line lies below the axis
            }}
          />
        ) : null}
      </div>
    </figure>
  );
}
