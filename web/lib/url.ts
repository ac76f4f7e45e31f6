"use client";

// The state of a page is its address: whoever has the link sees the same.

import { useCallback, useSyncExternalStore } from "react";

type Changes = Record<string, string | number | boolean | null | undefined>;

const FLUSH_MILLISECONDS = 250; // browsers refuse addresses that change more often than this
const listeners = new Set<() => void>();
let current: string | null = null;
let timer: ReturnType<typeof setTimeout> | undefined;

function search(): string {
  if (current === null) current = window.location.search;
  return current;
}

function subscribe(listener: () => void): () => void {
  const moved = () => {
    current = window.location.search;
    listener();
  };
  listeners.add(listener);
  window.addEventListener("popstate", moved);
  return () => {
    listeners.delete(listener);
    window.removeEventListener("popstate", moved);
  };
}

function flush(): void {
  timer = undefined;
  const { pathname, hash } = window.location;
  window.history.replaceState(window.history.state, "", pathname + search() + hash);
}

/** Changes parts of the address; null and "" remove them. */
export function setQuery(changes: Changes): void {
  const query = new URLSearchParams(search());
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "" || value === false) query.delete(name);
    else query.set(name, value === true ? "1" : String(value));
  }
  const text = query.toString();
  current = text ? `?${text}` : "";
  timer ??= setTimeout(flush, FLUSH_MILLISECONDS);
  for (const listener of listeners) listener();
}

/** The query of the address, and what changes it. */
export function useQuery(): [URLSearchParams, (changes: Changes) => void] {
  const text = useSyncExternalStore(subscribe, search, () => "");
  const set = useCallback((changes: Changes) => setQuery(changes), []);
  return [new URLSearchParams(text), set];
}

/** A number of the query, within limits; `otherwise` where there is none. */
export function numberOf(query: URLSearchParams, name: string, otherwise: number): number {
  const text = query.get(name);
  const value = text === null ? NaN : Number(text);
  return Number.isFinite(value) ? value : otherwise;
}

async function through(bytes: Uint8Array, stream: CompressionStream | DecompressionStream) {
  const source = new Blob([bytes as BlobPart]).stream();
  return new Uint8Array(await new Response(source.pipeThrough(stream)).arrayBuffer());
}

/** A text as a short fragment of an address; a fragment never leaves the browser. */
export async function packed(text: string): Promise<string> {
  const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
  const letters = Array.from(bytes, (x) => String.fromCharCode(x)).join("");
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export async function unpacked(fragment: string): Promise<string> {
  const letters = atob(fragment.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (x) => x.charCodeAt(0));
  return new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw")));
}

export function setFragment(fragment: string): void {
  const { pathname } = window.location;
  window.history.replaceState(window.history.state, "", pathname + search() + (fragment && `#${fragment}`));
}
