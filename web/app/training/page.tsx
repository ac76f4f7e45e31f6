import type { Metadata } from "next";
import { Page } from "@/components/training/page";

export const metadata: Metadata = { title: "Training" };

export default function TrainingPage() {
  return (
    <>
      <h1>Training</h1>
      <p className="lead">
        Every run writes what happens to a file of events. This page plays that file, at any speed, and follows it while a run is
        still writing. Runs with HADS, head-adaptive dynamic sparsity, give every head a budget of blocks and recalibrate it as they train.
      </p>
      <Page />
    </>
  );
}
