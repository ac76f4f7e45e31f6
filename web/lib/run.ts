// Events of a run, as events.jsonl has them (xsake/observe/events.py), in the shapes that charts need.

interface Common {
  step: number;
  time_unix_seconds: number;
}
export interface TrainStep extends Common {
  event: "TrainStep";
  loss_nats: number | null;
  learning_rate: number;
  gradient_norm: number | null;
  skipped_steps: number;
  density_ratio: number;
  visited_density_ratio: number | null;
  tokens_seen: number;
  step_seconds: number;
  tokens_per_second: number;
  mfu_ratio: number | null;
  peak_bytes: number | null;
}
export interface Evaluated extends Common {
  event: "Evaluated";
  file: string;
  loss_nats: number | null;
  perplexity: number | null;
  density_ratio: number;
}
export interface PlanSwapped extends Common {
  event: "PlanSwapped";
  plan_hash: string;
  requested_density_ratio: number;
  density_ratio: number;
  head_density_ratios: number[][];
  calibration_seconds: number;
}
export interface Other extends Common {
  event: "RunStarted" | "Resumed" | "CheckpointSaved" | "Sampled" | "HeadsObserved" | "Stopped";
  [field: string]: unknown;
}
export type RunEvent = TrainStep | Evaluated | PlanSwapped | Other;

export interface Run {
  all: RunEvent[];
  steps: TrainStep[];
  evaluations: Evaluated[];
  plans: PlanSwapped[];
  resumed: number[];
  files: string[];
  /** Steps of the schedule, or the last step if that is not known. */
  planned: number;
  last: number;
}

export function toRun(all: RunEvent[]): Run {
  const steps: TrainStep[] = [];
  const evaluations: Evaluated[] = [];
  const plans: PlanSwapped[] = [];
  const resumed: number[] = [];
  let planned = 0;
  let last = 0;
  for (const event of all) {
    last = Math.max(last, event.step);
    if (event.event === "TrainStep") steps.push(event);
    else if (event.event === "Evaluated") evaluations.push(event);
    else if (event.event === "PlanSwapped") plans.push(event);
    else if (event.event === "Resumed") resumed.push(event.step);
    if ("steps" in event && typeof event.steps === "number") planned = event.steps;
  }
  const files = [...new Set(evaluations.map((x) => x.file))];
  return { all, steps, evaluations, plans, resumed, files, planned: Math.max(planned, last), last };
}

/** The last of some events that are ordered by step, up to a step. */
export function upTo<E extends { step: number }>(events: E[], step: number): E | null {
  let low = 0;
  let high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((events[middle] as E).step <= step) low = middle + 1;
    else high = middle;
  }
  return events[low - 1] ?? null;
}

export interface Point {
  step: number;
  value: number;
}

const MOST_POINTS = 2000; // of a line; a chart is not wider

/** One metric of one run, known values only; a long run is thinned, its last step stays. */
export function series(run: Run, metric: keyof TrainStep): Point[] {
  const stride = Math.ceil(run.steps.length / MOST_POINTS);
  return run.steps.flatMap((x, i) => {
    const value = x[metric];
    const isKept = i % stride === 0 || i === run.steps.length - 1;
    return isKept && typeof value === "number" ? [{ step: x.step, value }] : [];
  });
}

export function perplexities(run: Run, file: string): Point[] {
  return run.evaluations.flatMap((x) =>
    x.file === file && x.perplexity !== null ? [{ step: x.step, value: x.perplexity }] : [],
  );
}

/** a − b at the steps of a that b covers, b interpolated between its own steps. */
export function difference(a: Point[], b: Point[]): Point[] {
  const found: Point[] = [];
  let j = 0;
  for (const { step, value } of a) {
    while (j + 1 < b.length && (b[j + 1] as Point).step <= step) j += 1;
    const left = b[j];
    if (!left || left.step > step) continue;
    const right = b[j + 1];
    if (!right) {
      if (left.step === step) found.push({ step, value: value - left.value });
      continue;
    }
    const share = (step - left.step) / (right.step - left.step);
    found.push({ step, value: value - (left.value + share * (right.value - left.value)) });
  }
  return found;
}

/** An event in words, for the log. */
export function words(event: RunEvent): string {
  switch (event.event) {
    case "Evaluated":
      return `perplexity ${event.perplexity?.toFixed(2) ?? "not finite"} on ${event.file}`;
    case "PlanSwapped":
      return `recalibrated in ${event.calibration_seconds.toFixed(1)} s: density ${event.density_ratio.toFixed(3)}`;
    case "Resumed":
      return `resumed from a checkpoint on ${String(event.device)}${event.note ? `: ${String(event.note)}` : ""}`;
    case "RunStarted":
      return `started on ${String(event.device)}, ${Number(event.parameters).toLocaleString("en")} parameters`;
    case "CheckpointSaved":
      return "checkpoint";
    case "Sampled":
      return `“${String(event.prompt)}” → “${String(event.text).slice(0, 200)}”`;
    case "HeadsObserved":
      return `heads observed in ${Number(event.observe_seconds).toFixed(1)} s`;
    case "Stopped":
      return `stopped: ${String(event.reason)}`;
    default:
      return event.event;
  }
}
