"use client";

import type { KeyboardEvent } from "react";
import { useQuery } from "@/lib/url";

interface Node {
  id: string;
  name: string;
  path: string;
  about: string;
  page?: { href: string; name: string };
  wide: [number, number];
  narrow: [number, number];
}

const NODES: Node[] = [
  { id: "profile", name: "Profile", path: "xsake/hads/profile.py", wide: [0, 0], narrow: [0, 0], page: { href: "/explorer/", name: "Explorer" },
    about: "One pass of dense attention over calibration text measures how every head of every layer spreads its attention over blocks of keys." },
  { id: "budget", name: "Budget", path: "xsake/hads/budget.py", wide: [1, 0], narrow: [1, 0], page: { href: "/explorer/", name: "Explorer" },
    about: "A policy splits one global budget over the heads: broad heads keep more blocks, focused heads fewer. The mean is the budget, exactly." },
  { id: "plan", name: "Plan", path: "xsake/hads/plan.py", wide: [2, 0], narrow: [0, 1], page: { href: "/explorer/", name: "Explorer" },
    about: "One file with the budgets and the way blocks are selected. The model, the trainer and this server all use it." },
  { id: "rule", name: "Rule", path: "xsake/masks/", wide: [1, 1], narrow: [1, 1],
    about: "Causal, windows, documents, any function of positions: says which query may see which key. Rules combine with &, | and ~." },
  { id: "mask", name: "BlockMask", path: "xsake/block_mask/", wide: [2, 1], narrow: [0, 2], page: { href: "/play/", name: "Play" },
    about: "For every head and every row of query blocks, the list of key blocks to visit. Every backend reads this one format." },
  { id: "qkv", name: "q, k, v", path: "[B, T, N, H]", wide: [1, 2], narrow: [1, 2],
    about: "Queries, keys and values as jax.nn has them: batch, length, heads, head size. Any length, grouped heads too." },
  { id: "door", name: "dot_product_attention", path: "xsake/attention.py", wide: [2, 2], narrow: [0, 3],
    about: "The signature of jax.nn.dot_product_attention. It checks the call, chooses the fastest backend that can run it, and can say why." },
  { id: "hopper", name: "hopper", path: "xsake/backends/hopper/", wide: [3, 1], narrow: [0, 4], page: { href: "/benchmarks/?file=every&contains=hopper", name: "Benchmarks" },
    about: "Kernels for H100 and H200, forward and backward, that visit the listed blocks only." },
  { id: "xla", name: "xla", path: "xsake/backends/xla/", wide: [3, 2], narrow: [1, 4], page: { href: "/benchmarks/?file=every&contains=cpu", name: "Benchmarks" },
    about: "Plain JAX that loops over the listed blocks: any device." },
  { id: "dense", name: "dense", path: "xsake/backends/dense.py", wide: [3, 3], narrow: [1, 5],
    about: "Plain JAX that computes all logits at once: short or nearly dense calls take less time here than by blocks." },
  { id: "tpu", name: "tpu", path: "xsake/backends/tpu/", wide: [3, 0], narrow: [1, 6],
    about: "Kernels for TPUs. They are used by name only, until they have run on a TPU." },
  { id: "reference", name: "reference", path: "xsake/backends/reference.py", wide: [3, 4], narrow: [1, 3],
    about: "The definition, with the whole T × S matrix in memory. Every other backend is tested against it." },
  { id: "nsa", name: "NSA", path: "xsake/nsa/", wide: [1, 3], narrow: [0, 8], page: { href: "/benchmarks/?file=every&contains=nsa", name: "Benchmarks" },
    about: "Native Sparse Attention: every token selects its own blocks by pooled keys, beside a window and a view of the whole; MoBA and MSA are options of it. All of it has gradients." },
  { id: "parallel", name: "Several devices", path: "xsake/parallel/", wide: [2, 3], narrow: [1, 8], page: { href: "/benchmarks/?file=every&contains=parallel", name: "Benchmarks" },
    about: "Splits batches, heads and sequences over devices and processes; sends only blocks that some row visits, and balances the work." },
  { id: "doors", name: "Other libraries", path: "xsake/integrations/", wide: [0, 2], narrow: [0, 9],
    about: "The signatures of Flax, EasyDeL, ejkernel, Levanter and others, so that their models can use XSAKE as they are." },
  { id: "model", name: "Model", path: "xsake/model/", wide: [0, 5], narrow: [0, 5], page: { href: "/play/", name: "Play" },
    about: "A decoder that loads Hugging Face and GGUF checkpoints, generates, and takes a plan." },
  { id: "train", name: "Trainer", path: "xsake/train/", wide: [1, 5], narrow: [0, 6], page: { href: "/training/", name: "Training" },
    about: "Trains sparse from scratch, recalibrates the plan as heads change, resumes, and logs events." },
  { id: "bench", name: "Benchmarks", path: "xsake/bench/", wide: [2, 5], narrow: [0, 7], page: { href: "/benchmarks/", name: "Benchmarks" },
    about: "Times and checks every case against its peers and writes result files, which is all that these pages show." },
  { id: "server", name: "Server", path: "xsake/server/", wide: [3, 5], narrow: [1, 7],
    about: "What answers this page: runs, profiles, plans, masks and results over HTTP, on this machine only." },
];

const EDGES: [string, string][] = [
  ["profile", "budget"], ["budget", "plan"], ["plan", "mask"], ["rule", "mask"], ["mask", "door"], ["qkv", "door"],
  ["door", "tpu"], ["door", "hopper"], ["door", "xla"], ["door", "dense"], ["door", "reference"],
];

// Only where the boxes are next to each other.
const EDGES_OF_WIDE: [string, string][] = [["doors", "qkv"], ["parallel", "door"]];

const BOX = { width: 190, height: 54, x: 236, y: 84 };

/** The architecture; a click on a part tells what it does. */
export function Drawing() {
  const [query, set] = useQuery();
  const node = NODES.find((x) => x.id === query.get("part")) ?? (NODES.find((x) => x.id === "plan") as Node);
  const chosen = node.id;
  const choose = (id: string) => set({ part: id });
  return (
    <div className="drawing">
      <Picture layout="wide" chosen={chosen} onChoose={choose} />
      <Picture layout="narrow" chosen={chosen} onChoose={choose} />
      <div role="status" style={{ minHeight: "6rem" }}>
        <h3>
          {node.name} <code className="quiet">{node.path}</code>
        </h3>
        <p>
          {node.about} {node.page ? <a href={node.page.href}>See it in {node.page.name}.</a> : null}
        </p>
      </div>
    </div>
  );
}

interface PictureProps {
  layout: "wide" | "narrow";
  chosen: string;
  onChoose: (id: string) => void;
}

function Picture({ layout, chosen, onChoose }: PictureProps) {
  const columns = layout === "wide" ? 4 : 2;
  const rows = layout === "wide" ? 6 : 10;
  const corner = (id: string): [number, number] => {
    const [x, y] = (NODES.find((n) => n.id === id) as Node)[layout];
    return [x * BOX.x + 1, y * BOX.y + 1];
  };
  const width = (columns - 1) * BOX.x + BOX.width + 2;
  const height = (rows - 1) * BOX.y + BOX.height + 2;
  const press = (event: KeyboardEvent, id: string) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onChoose(id);
  };
  return (
    <svg className={layout} viewBox={`0 0 ${width} ${height}`} role="group" aria-label="Architecture" width="100%">
      {[...EDGES, ...(layout === "wide" ? EDGES_OF_WIDE : [])].map(([from, to]) => (
        <Arrow key={`${from}-${to}`} from={corner(from)} to={corner(to)} />
      ))}
      {NODES.map((node) => {
        const [x, y] = corner(node.id);
        return (
          <g
            key={node.id}
            className="node"
            role="button"
            tabIndex={0}
            aria-pressed={node.id === chosen}
            onClick={() => onChoose(node.id)}
            onKeyDown={(event) => press(event, node.id)}
          >
            <rect x={x} y={y} width={BOX.width} height={BOX.height} rx={6} />
            <text x={x + BOX.width / 2} y={y + 23} textAnchor="middle" fontWeight={600}>
              {node.name}
            </text>
            <text className="note" x={x + BOX.width / 2} y={y + 41} textAnchor="middle">
              {node.path.replace("xsake/", "")}
            </text>
          </g>
        );
      })}
    </svg>
  );
}

/** From the edge of one box to the edge of another, with a head. */
function Arrow({ from, to }: { from: [number, number]; to: [number, number] }) {
  const { width, height } = BOX;
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const isAside = Math.abs(dx) > Math.abs(dy) / 3 && dx !== 0;
  const start = isAside
    ? [from[0] + (dx > 0 ? width : 0), from[1] + height / 2]
    : [from[0] + width / 2, from[1] + (dy > 0 ? height : 0)];
  const end = isAside
    ? [to[0] + (dx > 0 ? 0 : width), to[1] + height / 2]
    : [to[0] + width / 2, to[1] + (dy > 0 ? 0 : height)];
  const [x0, y0] = start as [number, number];
  const [x1, y1] = end as [number, number];
  const angle = Math.atan2(y1 - y0, x1 - x0);
  const head = [angle + 2.7, angle - 2.7].map((a) => `${x1 + 7 * Math.cos(a)},${y1 + 7 * Math.sin(a)}`);
  return <path aria-hidden="true" d={`M${x0},${y0}L${x1},${y1}M${head[0]}L${x1},${y1}L${head[1]}`} />;
}
