import type { Metadata } from "next";
import { Page } from "@/components/explorer/page";

export const metadata: Metadata = { title: "HADS explorer" };

export default function ExplorerPage() {
  return (
    <>
      <h1>HADS explorer</h1>
      <p className="lead">
        A profile says where every head of a model looks. Choose a budget and a policy, and see how many blocks each head gets, what that costs and what it loses.
      </p>
      <Page />
    </>
  );
}
