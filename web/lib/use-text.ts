"use client";

import { useCallback, useEffect, useRef, useState } from "react";
import { readText, type Schemas } from "./api";
import { packed, setFragment, setQuery, unpacked } from "./url";

type Figures = Schemas["TextFigures"];
type Model = Schemas["ModelFigures"];

export interface Reading {
  /** What was sent to the model. */
  text: string;
  figures: Figures | null;
  /** The text that `figures` are of: another one than `text` while that is read, or was refused. */
  of: string;
  /** Counts the times that a text was read again, because the server had forgotten it. */
  times: number;
  isReading: boolean;
  error: Error | null;
  read: (text: string, example?: string) => void;
  readAgain: () => void;
}

/** The text of the address: an example by name, or a text packed into the fragment. */
async function textOfAddress(model: Model, example: string | null): Promise<string> {
  const fragment = window.location.hash.slice(1);
  if (fragment.startsWith("text=")) return unpacked(fragment.slice(5));
  const found = model.examples.find((x) => x.name === example) ?? model.examples[0];
  return found?.text ?? "";
}

/** A text and what the model says of it. */
export function useText(model: Model | null, block: number | null): Reading {
  const [text, setText] = useState("");
  const [found, setFound] = useState<{ figures: Figures | null; of: string }>({ figures: null, of: "" });
  const [isReading, setReading] = useState(false);
  const [error, setError] = useState<Error | null>(null);
  const [generation, setGeneration] = useState(0);
  const [times, setTimes] = useState(0);
  const newest = useRef(0);
  const known = useRef("");
  const isChosen = useRef(false); // a text was chosen before that of the address was unpacked

  useEffect(() => {
    if (!model) return;
    const load = () => textOfAddress(model, new URLSearchParams(window.location.search).get("example"));
    void load().then((x) => isChosen.current || setText(x), setError);
  }, [model]);

  useEffect(() => {
    if (!text) return;
    const mine = ++newest.current;
    setReading(true);
    setError(null);
    readText(text, block)
      .then(
        (figures) => {
          if (mine !== newest.current) return;
          if (known.current === figures.id) setTimes((x) => x + 1);
          known.current = figures.id;
          setFound({ figures, of: text });
        },
        (why: Error) => mine === newest.current && setError(why),
      )
      .finally(() => mine === newest.current && setReading(false));
  }, [text, block, generation]);

  const read = useCallback((given: string, name?: string) => {
    isChosen.current = true;
    setText(given);
    setQuery({ example: name });
    if (name) setFragment("");
    else void packed(given).then((x) => setFragment(`text=${x}`));
  }, []);
  const readAgain = useCallback(() => setGeneration((x) => x + 1), []);
  return { text, ...found, times, isReading, error, read, readAgain };
}
