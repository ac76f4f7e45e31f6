"use client";

import { useCallback, useMemo } from "react";
import { Blocks } from "@/components/blocks";
import { Chart, type Draw } from "@/components/chart";
import { Problem, Waiting } from "@/components/client";
import { CopyPython } from "@/components/copy";
import { Choices, options, Select, Slider } from "@/components/fields";
import { MaskDrawing } from "@/components/explorer/mask";
import { CostTable } from "@/components/explorer/table";
import { Heads } from "@/components/heads";
import { address, type Schemas } from "@/lib/api";
import { fixed, percent, whole } from "@/lib/format";
import { numberOf, useQuery } from "@/lib/url";
import { useGet } from "@/lib/use-get";

const POLICIES = [
  { value: "output", label: "output", title: "The next block goes to the head where it reduces the error of the layer's output most." },
  { value: "loss", label: "loss", title: "The next block goes to the head where it changes the loss of the model most." },
  { value: "kl", label: "KL", title: "The next block goes to the row of blocks where it reduces the KL of attention most." },
  { value: "entropy", label: "entropy", title: "Broad heads keep more blocks than focused ones, in proportion to their entropy." },
  { value: "uniform", label: "uniform", title: "Every head keeps the same share: the control." },
];
const DEFAULT = { density: 0.43, policy: "output", other: "uniform", selector: "mean_query" };
const PLAN = "/api/profiles/{name}/plan";
const LENGTHS = [0.25, 0.5, 1, 2, 4, 8, 16]; // of the profile's own

type Summary = Schemas["ProfileSummary"];
type Plan = Schemas["PlanFigures"];

export function Explorer() {
  const [query, set] = useQuery();
  const list = useGet("/api/profiles");
  if (!list.data) return list.error ? <Problem error={list.error} /> : <Waiting isPage>Loading the profiles …</Waiting>;
  const { profiles } = list.data;
  const profile = profiles.find((x) => x.name === query.get("profile")) ?? profiles.at(-1);
  if (!profile) return <p>There is no profile. `xsake calibrate` makes one; name its folder with `xsake serve --profiles`.</p>;
  return <OfProfile key={profile.name} profiles={profiles} profile={profile} onProfile={(x) => set({ profile: x, length: null, layer: null, head: null })} />;
}

interface Props {
  profiles: Summary[];
  profile: Summary;
  onProfile: (name: string) => void;
}

function OfProfile({ profiles, profile, onProfile }: Props) {
  const [query, set] = useQuery();
  const policy = query.get("policy") ?? DEFAULT.policy;
  const other = query.get("other") ?? DEFAULT.other;
  const selector = query.get("selector") ?? (profile.selectors.includes(DEFAULT.selector) ? DEFAULT.selector : (profile.selectors[0] ?? "static"));
  const policies = POLICIES.filter((x) => profile.policies.includes(x.value));
  const length = numberOf(query, "length", profile.length);
  // The least density of another length is in every plan of that length; density 1 is always possible.
  const isOwn = length === profile.length;
  const dense = useGet(isOwn ? null : PLAN, { name: profile.name, density: 1, selector, length, policy: "uniform" });
  const exact = isOwn ? profile.least_density_ratio : dense.isLoading || dense.error ? null : (dense.data?.least_density_ratio ?? null);
  const least = Math.ceil(100 * (exact ?? 0.01)) / 100;
  const wanted = numberOf(query, "density", DEFAULT.density);
  const density = Math.max(wanted, least);
  const values = { name: profile.name, density, selector, length };
  const a = useGet(exact === null ? null : PLAN, { ...values, policy });
  const b = useGet(exact === null ? null : PLAN, { ...values, policy: other });
  const isStale = a.isLoading || b.isLoading || exact === null;
  const selected = {
    layer: Math.min(numberOf(query, "layer", 0), profile.layers - 1),
    head: Math.min(numberOf(query, "head", 0), profile.heads - 1),
  };
  const onSelect = (layer: number, head: number) => set({ layer, head });
  if ((!a.of || !b.of) && !dense.error) return <Waiting isPage>Making two plans …</Waiting>; // nothing was answered yet
  return (
    <div className="stack">
      <section className="panel" aria-label="Plan">
        <div className="row">
          <Select label="Profile" value={profile.name} options={options(profiles.map((x) => x.name))} onChange={onProfile} />
          <Select label="Blocks are chosen by" value={selector} options={options(profile.selectors)} onChange={(x) => set({ selector: x })} />
          <Select
            label="Length"
            value={String(length)}
            options={[...new Set([...LENGTHS.map((x) => x * profile.length), length])].sort((x, y) => x - y).map((x) => ({ value: String(x), label: `${whole(x)} tokens` }))}
            onChange={(x) => set({ length: Number(x) === profile.length ? null : x })}
          />
          <Slider
            label="Density, mean over all heads:"
            value={density}
            shown={fixed(density, 2)}
            min={least}
            max={1}
            step={0.01}
            onChange={(x) => set({ density: x })}
          />
        </div>
        <div className="row">
          <Choices name="policy" label="Policy" value={policy} options={policies} onChange={(x) => set({ policy: x })} />
          <Choices name="other" label="Compared with" value={other} options={policies} onChange={(x) => set({ other: x })} />
        </div>
        <p className="small quiet">
          A profile is a measurement of where the heads of a model look. A policy splits the budget over heads and rows; the selector, “blocks
          are chosen by”, picks the blocks of each row within it. Density is the share of causal blocks that is computed.
        </p>
        <p className="small quiet">
          Measured on {whole(profile.documents)} documents of {whole(profile.length)} tokens in blocks of {profile.block}; model{" "}
          {profile.model_hash.slice(0, 8)}, data {profile.data_hash.slice(0, 8)}. The first block and the diagonal are always kept:{" "}
          {exact === null ? "…" : `at least density ${fixed(exact, 2)} at ${whole(length)} tokens.`}
          {wanted < density && exact !== null ? ` Density ${fixed(wanted, 2)} is not possible at this length; ${fixed(density, 2)} is shown.` : ""}
        </p>
        <Problem error={dense.error ?? a.error ?? b.error} />
      </section>
      <div className="columns two">
        <Budget plan={a.data} name={policy} isStale={a.isLoading || exact === null} selected={selected} onSelect={onSelect} values={{ ...values, policy }} />
        <Budget plan={b.data} name={other} isStale={b.isLoading || exact === null} selected={selected} onSelect={onSelect} values={{ ...values, policy: other }} />
      </div>
      <section className="panel">
        <h2>Cost and quality</h2>
        {a.data && b.data ? (
          <div className={isStale ? "stale" : ""}>
            <CostTable plans={[a.data, b.data]} ownLength={profile.length} />
          </div>
        ) : (
          <Waiting>Making the plans …</Waiting>
        )}
      </section>
      <OfHead profile={profile} selected={selected} plans={[a.data, b.data]} names={[policy, other]} density={density} />
      <section className="panel">
        <h2>Draw a mask</h2>
        <MaskDrawing />
      </section>
    </div>
  );
}

interface BudgetProps {
  plan: Plan | null;
  name: string;
  isStale: boolean;
  selected: { layer: number; head: number };
  onSelect: (layer: number, head: number) => void;
  values: Record<string, string | number>;
}

/** The share of its blocks that each head keeps, and the plan to take away. */
function Budget({ plan, name, isStale, selected, onSelect, values }: BudgetProps) {
  const label = POLICIES.find((x) => x.value === name);
  const share = plan?.shares[selected.layer]?.[selected.head];
  return (
    <section className="panel">
      <h2>Budgets by {label?.label ?? name}</h2>
      <p className="small quiet two-lines">{label?.title}</p>
      {plan ? (
        <div className={isStale ? "stale" : ""}>
          <Heads fill={plan.shares} fillName="density" selected={selected} onSelect={onSelect} label={`Budgets by ${name}`} />
          <p className="small">
            Layer {selected.layer}, head {selected.head} keeps <b>{percent(share)}</b> of its blocks; all heads together{" "}
            {percent(plan.density_ratio)}.
          </p>
        </div>
      ) : (
        <Waiting>Making the plan …</Waiting>
      )}
      <div className="row top">
        <CopyPython code={plan?.python} what={`the plan by ${name}`} />
        <a className="button" href={address("/api/profiles/{name}/plan/file", values)} download>
          Download the plan<span className="hidden-text"> by {name}</span>
        </a>
      </div>
    </section>
  );
}

interface HeadProps {
  profile: Summary;
  selected: { layer: number; head: number };
  plans: [Plan | null, Plan | null];
  names: [string, string];
  density: number;
}

function OfHead({ profile, selected, plans, names, density }: HeadProps) {
  const { layer, head } = selected;
  const figures = useGet("/api/profiles/{name}", { name: profile.name });
  const one = useGet("/api/profiles/{name}/heads/{layer}/{head}", { name: profile.name, layer, head });
  return (
    <div className="columns two">
      <div className="stack">
        <section className="panel">
          <h2>Attention that is kept</h2>
          {figures.data ? <Retained figures={figures.data} layer={layer} head={head} density={density} /> : <Waiting>Loading …</Waiting>}
        </section>
        <section className="panel">
          <h2>Blocks that each row keeps</h2>
          <Counts plans={plans} names={names} layer={layer} head={head} />
        </section>
      </div>
      <section className="panel">
        <h2>
          Layer {layer}, head {head} on the calibration text
        </h2>
        {one.data ? (
          <>
            <p className="small">
              Entropy {fixed(one.data.entropy)} of tokens, {fixed(one.data.block_entropy)} of blocks: 0 looks at one, 1 at all alike.
              Rows are blocks of queries, columns blocks of keys.
            </p>
            <Blocks mass={one.data.mass} label={`Mean attention of layer ${layer}, head ${head}`} />
          </>
        ) : (
          <Waiting>Loading the head …</Waiting>
        )}
      </section>
    </div>
  );
}

interface RetainedProps {
  figures: Schemas["ProfileFigures"];
  layer: number;
  head: number;
  density: number;
}

/** How much attention mass a head keeps in its best blocks, by density. */
function Retained({ figures, layer, head, density }: RetainedProps) {
  const lines = useMemo(() => {
    const { densities, retained, retained_mean: mean } = figures;
    const points = (curve: (number | null)[], name: string) =>
      densities.map((x, i) => ({ density: x, kept: curve[i] ?? null, name }));
    return {
      all: retained.flatMap((row, i) => row.flatMap((curve, j) => points(curve, `${i}-${j}`))),
      mean: points(mean, "mean"),
      own: points(retained[layer]?.[head] ?? [], "own"),
    };
  }, [figures, layer, head]);
  const draw = useCallback<Draw>(
    (plot) => ({
      x: { domain: [0, 1], label: "density" },
      y: { domain: [0, 1], label: "mass kept", grid: true },
      marks: [
        plot.lineY(lines.all, { x: "density", y: "kept", z: "name", stroke: "var(--c8)", strokeOpacity: 0.28, strokeWidth: 1 }),
        plot.lineY(lines.mean, { x: "density", y: "kept", stroke: "var(--ink)", strokeWidth: 2, strokeDasharray: "5 3" }),
        plot.lineY(lines.own, { x: "density", y: "kept", stroke: "var(--accent)", strokeWidth: 3 }),
        plot.ruleX([density], { stroke: "var(--warn)" }),
      ],
    }),
    [lines, density],
  );
  return (
    <>
      <Chart draw={draw} height={280} label={`Attention mass kept by density; layer ${layer}, head ${head} and all others`} />
      <ul className="legend">
        <li><i className="line" style={{ background: "var(--accent)" }} />layer {layer}, head {head}</li>
        <li><i className="line" style={{ background: "var(--ink)" }} />mean</li>
        <li><i className="line" style={{ background: "var(--c8)" }} />every other head</li>
        <li><i className="line" style={{ background: "var(--warn)" }} />the density above</li>
      </ul>
      <CopyPython code={figures.python} what="this profile" />
    </>
  );
}

interface CountsProps {
  plans: [Plan | null, Plan | null];
  names: [string, string];
  layer: number;
  head: number;
}

function Counts({ plans, names, layer, head }: CountsProps) {
  const [a, b] = plans.map((x) => x?.counts[layer]?.[head] ?? []);
  const draw = useCallback<Draw>(
    (plot) => {
      const points = (counts: number[]) => counts.map((count, row) => ({ row, count, allowed: row + 1 }));
      const most = Math.max(a?.length ?? 0, 1);
      return {
        x: { domain: [0, most], label: "row block" },
        y: { domain: [0, most], label: "blocks", grid: true },
        marks: [
          plot.areaY(points(a ?? []), { x: "row", y1: 0, y2: "allowed", curve: "step", fill: "var(--sunken)" }),
          plot.lineY(points(b ?? []), { x: "row", y: "count", stroke: "var(--c8)", curve: "step" }),
          plot.lineY(points(a ?? []), { x: "row", y: "count", stroke: "var(--accent)", strokeWidth: 2, curve: "step" }),
        ],
      };
    },
    [a, b],
  );
  return (
    <>
      <Chart draw={draw} height={280} label={`Blocks kept by row block of layer ${layer}, head ${head}, under two policies`} />
      <ul className="legend">
        <li><i className="line" style={{ background: "var(--accent)" }} />{names[0]}</li>
        <li><i className="line" style={{ background: "var(--c8)" }} />{names[1]}</li>
        <li><i style={{ background: "var(--sunken)", border: "1px solid var(--line)" }} />what causality allows</li>
      </ul>
    </>
  );
}
