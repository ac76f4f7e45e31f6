"use client";

import { type ReactNode, useEffect, useState } from "react";

/** What depends on the address or the server: it is not part of the exported HTML. */
export function Client({ children }: { children: () => ReactNode }) {
  const [isReady, setReady] = useState(false);
  useEffect(() => setReady(true), []);
  return isReady ? children() : <Waiting isPage>Loading …</Waiting>;
}

/** Holds the space of what is on its way; `isPage` that of a whole page. */
export function Waiting({ children, isPage }: { children: ReactNode; isPage?: boolean }) {
  return (
    <div className={isPage ? "wait page" : "wait"} role="status">
      {children}
    </div>
  );
}

/** The server's own words about what it refused, or why it cannot be reached. */
export function Problem({ error }: { error: Error | null }) {
  if (!error) return null;
  const words =
    error instanceof TypeError ? "The server cannot be reached. Is `xsake serve` still running?" : error.message;
  return (
    <p className="notice" role="alert">
      {words}
    </p>
  );
}
