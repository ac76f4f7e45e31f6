"use client";

import type React from "react";
import { useEffect, useMemo } from "react";
import { Blocks } from "@/components/blocks";
import { Problem, Waiting } from "@/components/client";
import { CopyPython } from "@/components/copy";
import { Choices, Numbers, Slider } from "@/components/fields";
import { Heads } from "@/components/heads";
import { Comparison } from "@/components/play/methods";
import { NextToken } from "@/components/play/next";
import { ChangedWords, pieces } from "@/components/play/words";
import type { Schemas } from "@/lib/api";
import { count, fixed, methodName, percent, seconds, visible } from "@/lib/format";
import { numberOf, useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";
import { useSettled } from "@/lib/use-settled";

const DEFAULT_DENSITY = 0.43; // that of the published comparisons
const WORDS_MILLISECONDS = 250; // the slider rests for so long before words are asked for
const LONG_MILLISECONDS = 1000; // and so long with a long text, whose words keep the server busy for a second
const SHORT_BLOCK = 16; // tokens per block of short texts, whose predictions follow the slider

type Figures = Schemas["TextFigures"];
type Method = Schemas["MethodFigures"];

const COLOURS = [
  { value: "entropy", label: "entropy", title: "of tokens, 0: one token, 1: all alike" },
  { value: "block_entropy", label: "block entropy", title: "of blocks" },
  { value: "shares", label: "density", title: "share of its blocks that the head keeps" },
  { value: "recall", label: "mass kept", title: "attention mass in the visited blocks" },
  { value: "kl", label: "KL", title: "KL(sparse ‖ dense) of its attention" },
];

interface Props {
  model: Schemas["ModelFigures"];
  text: string;
  figures: Figures;
  panel: string;
  onLost: (error: Error | null) => void;
}

/** Everything about a text that was read. */
export function Shown({ model, text, figures, panel, onLost }: Props) {
  const [query, set] = useQuery();
  const least = Math.ceil(100 * figures.least_density_ratio) / 100;
  const density = Math.min(Math.max(numberOf(query, "density", DEFAULT_DENSITY), least), 1);
  const wanted = query.get("method") ?? "hads";
  const method = figures.methods.includes(wanted) ? wanted : (figures.methods[0] ?? "sink_window");
  const example = model.examples.find((x) => x.text === text);
  const selected = {
    layer: Math.min(numberOf(query, "layer", example?.layer ?? 0), figures.layers - 1),
    head: Math.min(numberOf(query, "head", example?.head ?? 0), figures.heads - 1),
  };
  const values = { id: figures.id, method, density };
  // Masks and masses take milliseconds and come first; then what the model predicts next, then all words.
  const found = useGet("/api/play/texts/{id}/method", { ...values, predict: false });
  const rest = figures.block > SHORT_BLOCK ? WORDS_MILLISECONDS : 0;
  const isOld = (x: typeof values) => x.id !== figures.id || x.method !== method || x.density !== density;
  const toPredict = useSettled(values, rest, !found.isLoading);
  const predicted = useGet("/api/play/texts/{id}/method", toPredict);
  const isPredicting = predicted.isLoading || isOld(toPredict);
  const toCompare = useSettled(values, rest ? LONG_MILLISECONDS : WORDS_MILLISECONDS, !isPredicting);
  const words = useGet("/api/play/texts/{id}/words", toCompare);
  const isComparing = words.isLoading || isOld(toCompare);
  const texts = useMemo(() => pieces(text, figures.tokens), [text, figures]);
  useEffect(() => onLost(found.error), [found.error, onLost]);
  const about = model.methods.find((x) => x.name === method)?.description;
  const classOf = (name: string) => (panel === name ? "panel touring" : "panel");

  return (
    <>
      <section className={classOf("controls")} data-panel="controls" aria-label="Method and density">
        <Choices
          name="method"
          label="Which blocks are kept"
          value={method}
          options={model.methods
            .filter((x) => figures.methods.includes(x.name))
            .map((x) => ({ value: x.name, label: methodName(x.name), title: x.description }))}
          onChange={(x) => set({ method: x === "hads" ? null : x })}
        />
        <p className="small quiet">{about ? `${about.charAt(0).toUpperCase()}${about.slice(1)}.` : ""}</p>
        <Slider
          label="Density, the share of blocks that is computed:"
          value={density}
          shown={fixed(density, 2)}
          min={least}
          max={1}
          step={0.01}
          isDisabled={least >= 1}
          onChange={(x) => set({ density: x })}
        />
        <p className="small quiet">
          {least >= 1
            ? `This text is too short to leave out any block: it has ${count(figures.row_blocks, "block")}, and the first block and the diagonal are always kept.`
            : `The least density of this text is ${fixed(least, 2)}: the first block and the diagonal are always kept.`}
        </p>
        {found.data ? (
          <Summary found={found.data} next={predicted.data} isStale={found.isLoading} isNextStale={isPredicting} />
        ) : (
          <Waiting>Measuring …</Waiting>
        )}
        <p className="small quiet wide">
          Mass is the share of the attention that the kept blocks hold. KL is how far a distribution is from that of dense attention: 0 is no difference.
        </p>
        <Problem error={found.error ?? predicted.error ?? words.error} />
        <CopyPython code={found.data?.python} what="this method at this density" />
      </section>
      <div className="columns side">
        <section className={classOf("map")} data-panel="map">
          <h2>Heads</h2>
          <div className={found.isLoading ? "stale" : ""}>
            <HeadMap figures={figures} found={found.data} selected={selected} />
          </div>
        </section>
        <section className={classOf("head")} data-panel="head">
          <h2>
            Layer {selected.layer}, head {selected.head}
          </h2>
          <OneHead values={{ ...values, ...selected }} texts={texts} block={figures.block} />
        </section>
      </div>
      <div className="columns wide-left">
        <section className="panel">
          <h2>Words that change</h2>
          {words.data ? (
            <div className={isComparing ? "stale" : ""}>
              <ChangedWords texts={texts} words={words.data} method={words.data.method} />
            </div>
          ) : (
            <Waiting>Comparing …</Waiting>
          )}
        </section>
        <section className="panel">
          <h2>Next word</h2>
          {predicted.data ? (
            <div className={isPredicting ? "stale" : ""}>
              <NextToken found={predicted.data} />
            </div>
          ) : (
            <Waiting>Predicting …</Waiting>
          )}
        </section>
      </div>
      <section className={classOf("methods")} data-panel="methods">
        <h2>All methods at density {fixed(density, 2)}</h2>
        {query.get("compare") ? (
          <Comparison
            id={figures.id}
            methods={figures.methods}
            density={density}
            chosen={method}
            onChoose={(x) => set({ method: x === "hads" ? null : x })}
          />
        ) : (
          <button type="button" onClick={() => set({ compare: 1 })}>
            Measure all {figures.methods.length} methods on this text
          </button>
        )}
      </section>
    </>
  );
}

interface SummaryProps {
  found: Method;
  next: Method | null;
  isStale: boolean;
  isNextStale: boolean;
}

function Summary({ found, next, isStale, isNextStale }: SummaryProps) {
  const stale = (value: React.ReactNode) => <span className={isNextStale ? "stale" : ""}>{value}</span>;
  return (
    <div className={isStale ? "stale" : ""}>
      <Numbers
        figures={[
          { name: "density, realised", value: fixed(found.density_ratio) },
          { name: "attention mass kept", value: fixed(found.mean_recall) },
          { name: "mass dropped", value: fixed(1 - (found.mean_recall ?? NaN)) },
          { name: "KL of attention, nats", value: fixed(found.mean_kl) },
          { name: "KL of next word, nats", value: stale(fixed(next?.next_kl, 4)) },
          {
            name: "most likely next word",
            value: stale(<code>{visible(next?.next[0]?.text ?? "…")}</code>),
            note: percent(next?.next[0]?.probability),
          },
          { name: "time for the masks", value: seconds(found.seconds) },
          { name: "time for the prediction", value: stale(seconds(next?.seconds)) },
        ]}
      />
    </div>
  );
}

interface MapProps {
  figures: Figures;
  found: Method | null;
  selected: { layer: number; head: number };
}

function HeadMap({ figures, found, selected }: MapProps) {
  const [query, set] = useQuery();
  const colour = query.get("colour") ?? "entropy";
  const grids: Record<string, (number | null)[][] | undefined> = {
    entropy: figures.entropy,
    block_entropy: figures.block_entropy,
    shares: found?.shares,
    recall: found?.recall,
    kl: found?.kl,
  };
  const fill = grids[colour] ?? figures.entropy;
  const most = colour === "kl" ? Math.max(...fill.flat().map((x) => x ?? 0), 1e-6) : 1;
  const name = COLOURS.find((x) => x.value === colour)?.label ?? colour;
  return (
    <>
      <Choices name="colour" label="Colour shows" value={colour} options={COLOURS} onChange={(x) => set({ colour: x === "entropy" ? null : x })} />
      <Heads
        fill={fill}
        fillName={name}
        most={most}
        bar={found?.shares ?? figures.entropy.map((x) => x.map(() => 0))}
        barName="density"
        selected={selected}
        onSelect={(layer, head) => set({ layer, head })}
        label="Layers and heads"
      />
      <p className="small quiet">Rows are layers, columns are heads. Focused heads have a low entropy and need few blocks.</p>
    </>
  );
}

interface HeadProps {
  values: { id: string; method: string; density: number; layer: number; head: number };
  texts: string[];
  block: number;
}

function OneHead({ values, texts, block }: HeadProps) {
  const found = useGet("/api/play/texts/{id}/heads/{layer}/{head}", values);
  if (!found.data) return found.error ? <Problem error={found.error} /> : <Waiting>Loading the head …</Waiting>;
  const { data } = found;
  const rows = data.dropped.map((x) => x ?? 0);
  const mean = rows.reduce((a, b) => a + b, 0) / Math.max(rows.length, 1);
  const wordsOf = (i: number) => {
    const words = texts.slice(i * block, (i + 1) * block).join("").replace(/\s+/g, " ").trim();
    return words.length > 60 ? `${words.slice(0, 60)}…` : words;
  };
  return (
    <div className={found.isLoading ? "stale" : ""}>
      <p className="small">
        It keeps {percent(data.share)} of its blocks and drops <b>{fixed(mean)}</b> of its attention. Entropy {fixed(data.entropy)}.
      </p>
      <Blocks
        mass={data.mass}
        chosen={data.chosen}
        dropped={data.dropped}
        wordsOf={wordsOf}
        label={`Attention of layer ${data.layer}, head ${data.head} by blocks`}
      />
    </div>
  );
}
