interface Props {
  /** What the colour shows. */
  name: string;
  low: string;
  high: string;
  /** The two ends, as CSS colours. */
  from: string;
  to: string;
}

/** A colour scale with its two ends. */
export function Scale({ name, low, high, from, to }: Props) {
  return (
    <span className="scale">
      {name} {low}
      <i aria-hidden="true" style={{ background: `linear-gradient(to right in oklab, ${from}, ${to})` }} />
      {high}
    </span>
  );
}
