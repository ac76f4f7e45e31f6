"use client";

import { useEffect, useMemo, useState } from "react";
import { address, get } from "./api";
import { type Run, type RunEvent, toRun } from "./run";

const POINTS = 3000; // TrainSteps of a run that are fetched; a longer run is thinned by the server

export type Link = "" | "connecting" | "open" | "lost";

/**
 * The events of a run. Those of a run folder go on by server-sent events: the page of a finished
 * run and of a running one is the same.
 */
export function useRun(name: string, isFolder: boolean): {
  run: Run | null;
  error: Error | null;
  link: Link;
} {
  const [events, setEvents] = useState<{ name: string; all: RunEvent[] } | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const [link, setLink] = useState<Link>("");

  useEffect(() => {
    setError(null);
    setLink("");
    if (!name) {
      setEvents(null);
      return;
    }
    let isHere = true;
    let source: EventSource | undefined;
    let waiting: RunEvent[] = [];
    let frame = 0;

    const deliver = () => {
      frame = 0;
      const fresh = waiting;
      waiting = [];
      setEvents((old) => ({ name, all: [...(old?.name === name ? old.all : []), ...fresh] }));
    };
    const follow = (after: string) => {
      setLink("connecting");
      source = new EventSource(address("/api/runs/{name}/live", { name, after }));
      source.onopen = () => setLink("open");
      source.onerror = () => setLink("lost");
      source.onmessage = (message) => {
        waiting.push(JSON.parse(message.data) as RunEvent);
        frame ||= requestAnimationFrame(deliver);
      };
      source.addEventListener("reset", () => {
        waiting = [];
        setEvents({ name, all: [] });
      });
    };
    get("/api/runs/{name}/events", { name, points: POINTS }).then(
      (page) => {
        if (!isHere) return;
        setEvents({ name, all: page.events as unknown as RunEvent[] });
        if (isFolder) follow(page.next);
      },
      (why: Error) => {
        if (!isHere) return;
        setEvents(null);
        setError(why);
      },
    );
    return () => {
      isHere = false;
      source?.close();
      cancelAnimationFrame(frame);
    };
  }, [name, isFolder]);

  const run = useMemo(() => (events?.name === name ? toRun(events.all) : null), [events, name]);
  return { run, error, link };
}
