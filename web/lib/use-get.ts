"use client";

import { useCallback, useEffect, useRef, useState } from "react";
import { address, get, type GetPath, type Got, type Values } from "./api";

export interface Loaded<T> {
  data: T | null;
  /** Address that `data` answers; a newer one may be on its way. */
  of: string;
  error: Error | null;
  isLoading: boolean;
  reload: () => void;
}

/**
 * The answer of a route; `null` asks for nothing. Of a slider that moves, one call is under way at
 * a time and the newest value comes next; the previous answer stays until then.
 */
export function useGet<P extends GetPath>(route: P | null, values: Values = {}): Loaded<Got<P>> {
  const wanted = route === null ? "" : address(route, values);
  const [state, setState] = useState<{ data: Got<P> | null; of: string; error: Error | null }>({
    data: null,
    of: "",
    error: null,
  });
  const latest = useRef(wanted);
  const busy = useRef(false);
  const alive = useRef(true);
  const [generation, setGeneration] = useState(0);

  useEffect(() => {
    alive.current = true;
    return () => {
      alive.current = false;
    };
  }, []);

  useEffect(() => {
    latest.current = wanted;
    if (busy.current || !wanted) return;
    const work = async () => {
      busy.current = true;
      let asked = "";
      while (alive.current && latest.current && asked !== latest.current) {
        asked = latest.current;
        try {
          const data = await get(asked as P);
          if (alive.current) setState({ data, of: asked, error: null });
        } catch (error) {
          if (alive.current) setState((old) => ({ ...old, of: asked, error: error as Error }));
        }
      }
      busy.current = false;
    };
    void work();
  }, [wanted, generation]);

  const reload = useCallback(() => setGeneration((x) => x + 1), []);
  return { ...state, isLoading: wanted !== "" && state.of !== wanted, reload };
}
