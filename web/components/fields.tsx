"use client";

import type { ReactNode } from "react";

export interface Option {
  value: string;
  label: string;
  title?: string;
}

export const options = (values: readonly (string | number)[]): Option[] =>
  values.map((x) => ({ value: String(x), label: String(x) }));

interface SelectProps {
  label: string;
  value: string;
  options: Option[];
  onChange: (value: string) => void;
}

export function Select({ label, value, options: list, onChange }: SelectProps) {
  return (
    <label className="field">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.target.value)}>
        {list.map((x) => (
          <option key={x.value} value={x.value} title={x.title}>
            {x.label}
          </option>
        ))}
      </select>
    </label>
  );
}

/** One of a few, all in sight: radio buttons that look like a row of buttons. */
export function Choices({ label, value, options: list, onChange, name }: SelectProps & { name: string }) {
  return (
    <fieldset className="choices">
      <legend>{label}</legend>
      <div>
        {list.map((x) => (
          <label key={x.value} title={x.title}>
            <input
              type="radio"
              name={name}
              value={x.value}
              checked={x.value === value}
              onChange={() => onChange(x.value)}
            />
            {x.label}
          </label>
        ))}
      </div>
    </fieldset>
  );
}

interface SliderProps {
  label: string;
  value: number;
  shown: string;
  min: number;
  max: number;
  step: number;
  isDisabled?: boolean;
  onChange: (value: number) => void;
}

export function Slider({ label, value, shown, min, max, step, isDisabled, onChange }: SliderProps) {
  return (
    <label className="field" style={{ flex: "1 1 14rem" }}>
      <span>
        {label} <b>{shown}</b>
      </span>
      <input
        type="range"
        min={min}
        max={max}
        step={step}
        disabled={isDisabled}
        value={value}
        aria-valuetext={shown}
        onChange={(event) => onChange(Number(event.target.value))}
      />
    </label>
  );
}

export interface Figure {
  name: string;
  value: ReactNode;
  note?: ReactNode;
}

export function Numbers({ figures }: { figures: Figure[] }) {
  return (
    <dl className="numbers">
      {figures.map((x) => (
        <div key={x.name}>
          <dt>{x.name}</dt>
          <dd>
            {x.value} {x.note ? <small>{x.note}</small> : null}
          </dd>
        </div>
      ))}
    </dl>
  );
}
