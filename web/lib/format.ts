// Numbers as they are shown. What is not known is a dash.

type Maybe = number | null | undefined;

export const DASH = "–";

function known(value: Maybe): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

export function fixed(value: Maybe, digits = 3): string {
  return known(value) ? value.toFixed(digits).replace("-", "−") : DASH;
}

/** Three significant digits, whatever the size. */
export function short(value: Maybe): string {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("-", "−").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString().replace("-", "−");
}

export function whole(value: Maybe): string {
  return known(value) ? Math.round(value).toLocaleString("en") : DASH;
}

export function percent(value: Maybe, digits = 1): string {
  return known(value) ? `${fixed(100 * value, digits)}%` : DASH;
}

/** The commit of a checkout, shortened; its "+" says that files differed from the commit. */
export function commit(name: string): string {
  return name.replace(/\+$/, "").slice(0, 8) + (isChanged(name) ? "+" : "");
}

/** What the "+" of a commit means, for a tooltip. */
export function commitTitle(name: string): string | undefined {
  return isChanged(name) ? "this commit, with changes that were not committed" : undefined;
}

function isChanged(name: string): boolean {
  return name.endsWith("+");
}

const BYTES = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value: Maybe): string {
  if (!known(value)) return DASH;
  const power = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), BYTES.length - 1);
  return `${Number((value / 1000 ** power).toPrecision(3))} ${BYTES[power]}`;
}

export function seconds(value: Maybe): string {
  if (!known(value)) return DASH;
  if (value < 1e-3) return `${Number((1e6 * value).toPrecision(3))} µs`;
  if (value < 1) return `${Number((1e3 * value).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

export function signed(value: Maybe, digits = 3): string {
  return known(value) && value > 0 ? `+${fixed(value, digits)}` : fixed(value, digits);
}

/** White space of a token made visible, and nothing empty. */
export function visible(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

/** A number of things: "1 row", "2 rows". */
export const count = (n: number, noun: string): string => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A method of Play as it is written everywhere on the page. */
export const methodName = (name: string): string => (name === "hads" ? "HADS" : name.replaceAll("_", " "));
