import type { Metadata } from "next";
import { Page } from "@/components/benchmarks/page";

export const metadata: Metadata = { title: "Benchmarks" };

export default function BenchmarksPage() {
  return (
    <>
      <h1>Benchmarks</h1>
      <p className="lead">
        Every result file that this server has, with the machine, the versions and the command that made it. Nothing is typed by hand. HADS is head-adaptive dynamic sparsity.
      </p>
      <Page />
    </>
  );
}
