import type { Metadata } from "next";
import { Page } from "@/components/benchmarks/page";

export const metadata: Metadata = { title: "Benchmarks" };

export default function BenchmarksPage() {
  return (
    <>
      <h1>Benchmarks</h1>
      <p className="lead">
        Every measurement that this server has, with the machine, the versions and the command that made it. Choose a file, then what the charts show. HADS is head-adaptive dynamic sparsity, XSAKE’s way to choose blocks.
      </p>
      <Page />
    </>
  );
}
