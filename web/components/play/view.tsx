"use client";

import { useCallback, useEffect } from "react";
import { Problem, Waiting } from "@/components/client";
import { TextPanel } from "@/components/play/text";
import { Shown } from "@/components/play/shown";
import { stateOf, STOPS, Tour } from "@/components/play/tour";
import { Refused, type Schemas } from "@/lib/api";
import { numberOf, useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";
import { useText } from "@/lib/use-text";

export function Play() {
  const model = useGet("/api/play/model");
  if (!model.data) {
    return model.error ? <Problem error={model.error} /> : <Waiting isPage>The server loads its model …</Waiting>;
  }
  return <WithModel model={model.data} />;
}

function WithModel({ model }: { model: Schemas["ModelFigures"] }) {
  const [query, set] = useQuery();
  const block = query.has("block") ? numberOf(query, "block", 0) || null : null;
  const reading = useText(model, block);
  const { figures, readAgain } = reading;
  const isCurrent = reading.of === reading.text && !reading.isReading;
  const isRefused = reading.of !== reading.text && reading.error !== null;
  const tour = numberOf(query, "tour", 0);
  const stop = STOPS[tour - 1];

  const choose = (example: Schemas["Example"]) => {
    reading.read(example.text, example.name);
    if (typeof example.layer === "number") set({ layer: example.layer, head: example.head });
  };
  const least = figures?.least_density_ratio ?? 0;
  const example = model.examples.find((x) => x.name.startsWith("induction")) ?? model.examples[0];
  useEffect(() => {
    if (!tour) return;
    set(stateOf(tour, example, least));
    if (example && reading.text !== example.text) reading.read(example.text, example.name);
    // Only when the step changes: the reader may move everything in between.
  }, [tour]);

  // The server keeps some texts only, and none when it is started again.
  const onLost = useCallback(
    (error: Error | null) => {
      if (error instanceof Refused && error.status === 404) readAgain();
    },
    [readAgain],
  );
  return (
    <div className="stack">
      <section className={stop?.panel === "text" ? "panel touring" : "panel"} data-panel="text" aria-label="What the model reads">
        <TextPanel model={model} reading={reading} block={block} onBlock={(x) => set({ block: x })} onExample={choose} />
        {tour ? null : (
          <p className="small">
            Never seen sparse attention?{" "}
            <button type="button" className="plain" onClick={() => set({ tour: 1 })}>
              Take the five-step tour
            </button>
          </p>
        )}
      </section>
      {figures && !isRefused ? (
        // Results are those of one text: another one begins anew, and until it is read the old ones are faded.
        <div className={isCurrent ? "stack" : "stack outdated"} aria-busy={!isCurrent}>
          <Shown key={`${figures.id}-${reading.times}`} model={model} text={reading.of} figures={figures} panel={stop?.panel ?? ""} onLost={onLost} />
        </div>
      ) : isRefused && !reading.isReading ? (
        <p className="quiet">There are no results: this text was not read.</p>
      ) : (
        <Waiting isPage>{reading.isReading ? "The model reads …" : reading.error ? "" : "Type or paste a text above."}</Waiting>
      )}
      {tour ? <Tour step={tour} isReady={figures !== null && isCurrent} onStep={(x, isDone) => set({ tour: x, ...(isDone ? { method: null } : {}) })} /> : null}
    </div>
  );
}
