"use client";

import { useEffect, useRef } from "react";
import type { Schemas } from "@/lib/api";

export interface Stop {
  /** The panel that the step is about. */
  panel: "text" | "map" | "head" | "controls" | "methods";
  title: string;
  words: string;
}

export const STOPS: Stop[] = [
  {
    panel: "text",
    title: "A model reads a text",
    words:
      "The text is cut into tokens, which are words or parts of words, and the tokens into blocks. To predict the next word, attention compares every token with every earlier one: twice the text, four times the work. Here the same passage comes twice, so there is something to find.",
  },
  {
    panel: "map",
    title: "Every head looks elsewhere",
    words:
      "Each square is an attention head; a layer is a row. A strong colour is a broad head: it spreads its attention over many tokens. A faint one is focused: it needs few. The orange bar is the share of blocks that the head gets to keep.",
  },
  {
    panel: "head",
    title: "One head, block by block",
    words:
      "This head looks for what followed the current word the first time: its attention lies on a second diagonal. Rows are the reading position, columns are what it looks at. Teal blocks are visited, orange ones are dropped.",
  },
  {
    panel: "controls",
    title: "Keep fewer blocks",
    words:
      "Density is the share of blocks that is computed. Drag the slider: masks shrink, the dropped mass grows, and the distribution of the next word begins to move. The work falls in proportion.",
  },
  {
    panel: "methods",
    title: "Which blocks are kept matters more than how many",
    words:
      "Now random blocks take the place of chosen ones, at the same density. The table has every method: compare the predictions that random and HADS change. The words where that happens are marked above it; choose HADS in the table to see its own.",
  },
];

const SHOW_MILLISECONDS = 100; // what a step changes on the page is drawn before the page moves to it

/** What the page shows at a step; the reader may change everything. */
export function stateOf(
  step: number,
  example: Schemas["Example"] | undefined,
  least: number,
): Record<string, string | number | null> {
  const head = { layer: example?.layer ?? 0, head: example?.head ?? 0 };
  switch (step) {
    case 2:
      return { colour: null };
    case 3:
      return { ...head, method: null };
    case 4:
      return { ...head, method: null, density: Math.min(least + 0.15, 1).toFixed(2) };
    case 5:
      return { method: "random", compare: 1 };
    default:
      return {};
  }
}

interface Props {
  step: number;
  /** Whether the panels that the steps are about are there. */
  isReady: boolean;
  onStep: (step: number | null, isDone?: boolean) => void;
}

export function Tour({ step, isReady, onStep }: Props) {
  const title = useRef<HTMLHeadingElement>(null);
  const stop = STOPS[step - 1];
  useEffect(() => title.current?.focus({ preventScroll: true }), [stop]);
  useEffect(() => {
    const show = () => document.querySelector(`[data-panel="${stop?.panel}"]`)?.scrollIntoView({ block: "start", behavior: "smooth" });
    const timer = setTimeout(show, SHOW_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [stop, isReady]);
  if (!stop) return null;
  const isLast = step === STOPS.length;
  return (
    <section
      className="panel tour"
      aria-label="Tour"
      onKeyDown={(event) => event.key === "Escape" && onStep(null)}
    >
      <h2 ref={title} tabIndex={-1}>
        {step} of {STOPS.length}: {stop.title}
      </h2>
      <p>{stop.words}</p>
      <div className="row centre">
        <button type="button" onClick={() => onStep(step - 1)} disabled={step === 1}>
          Back
        </button>
        <button type="button" className="main" onClick={() => onStep(isLast ? null : step + 1, isLast)}>
          {isLast ? "Done" : "Next"}
        </button>
        {isLast ? (
          <span className="small">
            Then see how a budget is split in the <a href="/explorer/">explorer</a>, or what it does to <a href="/training/">training</a>.
          </span>
        ) : (
          <button type="button" className="plain" onClick={() => onStep(null)}>
            End the tour
          </button>
        )}
      </div>
    </section>
  );
}
