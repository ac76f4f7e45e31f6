import type { Metadata } from "next";
import { Page } from "@/components/play/page";

export const metadata: Metadata = { title: "Play" };

export default function PlayPage() {
  return (
    <>
      <h1>Play</h1>
      <p className="lead">
        A small model reads your text on this machine. See what each of its heads looks at, keep only some of the blocks, and watch
        what the model says next. HADS, head-adaptive dynamic sparsity, gives every head a budget of its own.
      </p>
      <Page />
    </>
  );
}
