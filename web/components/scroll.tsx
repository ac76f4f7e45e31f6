"use client";

import { type ReactNode, useCallback, useEffect, useLayoutEffect, useRef, useState } from "react";

interface Props {
  label: string;
  maxHeight?: string;
  isStale?: boolean;
  children: ReactNode;
}

/** A table that scrolls, by the keyboard too. Where columns are out of sight it says so, and its edge is shaded. */
export function Scroll({ label, maxHeight, isStale, children }: Props) {
  const host = useRef<HTMLDivElement>(null);
  const [left, setLeft] = useState(0); // columns before and after those in sight, in pixels
  const [right, setRight] = useState(0);
  const look = useCallback(() => {
    const element = host.current;
    if (!element) return;
    setLeft(Math.round(element.scrollLeft));
    setRight(Math.max(Math.round(element.scrollWidth - element.clientWidth - element.scrollLeft), 0));
  }, []);
  useLayoutEffect(look); // before the first paint, so that the hint moves nothing
  useEffect(() => {
    const element = host.current;
    if (!element) return;
    const observer = new ResizeObserver(look);
    observer.observe(element);
    if (element.firstElementChild) observer.observe(element.firstElementChild);
    return () => observer.disconnect();
  }, [look]);
  const isWide = left + right > 1;
  return (
    <>
      {isWide ? <p className="small quiet sideways">{right > 1 ? "More columns to the right: scroll sideways, or use the arrow keys →" : "← More columns to the left"}</p> : null}
      <div className={`edges${left > 1 ? " before" : ""}${right > 1 ? " after" : ""}`}>
        <div className={isStale ? "scroll stale" : "scroll"} ref={host} onScroll={look} style={{ maxHeight }} tabIndex={0} role="region" aria-label={label}>
          {children}
        </div>
      </div>
    </>
  );
}
