"use client";

import { useEffect, useState } from "react";

/**
 * A value that follows another one when that has been still for a while and `isFree`: the server
 * answers one call at a time, and the quick ones come first.
 */
export function useSettled<T>(value: T, milliseconds: number, isFree: boolean): T {
  const [settled, setSettled] = useState(value);
  const text = JSON.stringify(value);
  useEffect(() => {
    if (!isFree) return;
    const timer = setTimeout(() => setSettled(JSON.parse(text) as T), milliseconds);
    return () => clearTimeout(timer);
  }, [text, milliseconds, isFree]);
  return settled;
}
