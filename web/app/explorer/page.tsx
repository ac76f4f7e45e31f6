import type { Metadata } from "next";
import { Page } from "@/components/explorer/page";

export const metadata: Metadata = { title: "HADS explorer" };

export default function ExplorerPage() {
  return (
    <>
      <h1>HADS explorer</h1>
      <p className="lead">
        HADS is head-adaptive dynamic sparsity: every head of a model gets its own budget of blocks. Choose a budget and a policy, and see how
        many blocks each head gets, what that costs and what it loses.
      </p>
      <Page />
    </>
  );
}
