"use client";

import { Scroll } from "@/components/scroll";
import type { Schemas } from "@/lib/api";
import { fixed, percent, signed, whole } from "@/lib/format";

type Plan = Schemas["PlanFigures"];

const estimated = (value: number | null) => (value === null ? "no estimate" : fixed(value));

const ROWS: { name: string; value: (plan: Plan) => string }[] = [
  { name: "density", value: (x) => fixed(x.density_ratio, 4) },
  { name: "blocks visited", value: (x) => `${whole(x.visited_blocks)} of ${whole(x.causal_blocks)}` },
  { name: "multiplications ÷ those of dense attention, selection included", value: (x) => fixed(x.cost_ratio) },
  { name: "KL of attention, estimated", value: (x) => estimated(x.estimated_kl) },
  { name: "error of the output, estimated", value: (x) => estimated(x.estimated_output_error) },
  { name: "attention mass kept, estimated", value: (x) => estimated(x.estimated_recall) },
];

/** Two plans: what the profile estimates, and what was measured. */
export function CostTable({ plans, ownLength }: { plans: [Plan, Plan]; ownLength: number }) {
  const isUnknown = plans[0].estimated_kl === null;
  return (
    <>
      <Scroll label="Cost and quality of the two plans">
        <table className="data folds">
          <thead>
            <tr>
              <th scope="col"><span className="hidden-text">quantity</span></th>
              {plans.map((x, i) => (
                <th key={i} scope="col" className="number">{x.policy}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {ROWS.map((row) => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                {plans.map((x, i) => (
                  <td key={i} className="number">{row.value(x)}</td>
                ))}
              </tr>
            ))}
            <tr>
              <th scope="row">perplexity against dense, measured</th>
              {plans.map((x, i) => (
                <td key={i} className="number"><Measured plan={x} ownLength={ownLength} /></td>
              ))}
            </tr>
          </tbody>
        </table>
      </Scroll>
      <p className={isUnknown ? "small notice" : "small quiet"}>{isUnknown ? "Why there is no estimate" : "Estimates"}: {plans[0].estimate_note}.</p>
      {[...new Set(plans.flatMap((x) => x.notes))].map((x) => (
        <p key={x} className="small notice">{x}</p>
      ))}
    </>
  );
}

function Measured({ plan, ownLength }: { plan: Plan; ownLength: number }) {
  if (!plan.measured.length && plan.length !== ownLength) {
    return <span className="quiet">not measured at {whole(plan.length)} tokens</span>;
  }
  if (!plan.measured.length) return <span className="quiet">not published for this model and density</span>;
  return (
    <>
      {plan.measured.map((x) => (
        <div key={`${x.result}-${x.method}`}>
          {signed(100 * (x.perplexity_gap ?? NaN), 2)}% ± {percent(x.perplexity_gap_standard_error, 2)}{" "}
          <a href={`/benchmarks/?file=${encodeURIComponent(x.result)}`}>{x.result}</a>
        </div>
      ))}
    </>
  );
}
