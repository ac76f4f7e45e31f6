"use client";

import { useEffect, useState } from "react";

/** Copies a script; the server wrote it, and it runs as it is. */
export function CopyPython({ code, what }: { code: string | undefined; what: string }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), 2500);
    return () => clearTimeout(timer);
  }, [said]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(code ?? "");
      setSaid("Copied");
    } catch {
      setSaid("The browser refused; open the script and copy it");
    }
  };
  return (
    <div>
      <div className="row centre">
        <button type="button" onClick={copy} disabled={!code}>
          Copy as Python<span className="hidden-text">: {what}</span>
        </button>
        <span className="small quiet" role="status">
          {said}
        </span>
      </div>
      {code ? (
        <details className="small">
          <summary>Show the script<span className="hidden-text"> of {what}</span></summary>
          <pre className="code" tabIndex={0}>
            {code}
          </pre>
        </details>
      ) : null}
    </div>
  );
}
