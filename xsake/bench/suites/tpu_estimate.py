"""What the kernels of `tpu` would need on TPUs, from counted work: nothing is run or timed.

    python -m xsake.bench.suites.tpu_estimate --out benchmarks/results/tpu-estimate.json

    mask ─ visits ─┬─ operations of the matrix products ÷ peak operations a second ─┬─ the larger:
                   └─ bytes between HBM and VMEM ÷ peak bytes a second ─────────────┘  least time

Counted are the blocks that the pipeline copies: a block that two consecutive steps share is copied
once. Not counted are what XLA does before and after the kernels (padding, transposes, the list of
visits), the softmax itself, and the steps' own overhead. A TPU needs longer than this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from xsake.backends import Sizes
from xsake.backends.tpu.visits import EMPTY, Layout, visits_of
from xsake.bench import programs
from xsake.bench.cases import Case
from xsake.bench.timing import provenance
from xsake.block_mask import BlockMask
from xsake.masks import causal, sliding_window

# Peaks of one chip with one TensorCore, from docs.cloud.google.com/tpu/docs/v5e and …/v6e.
CHIPS = {
    "v5e": {"operations_per_second": 197e12, "bytes_per_second": 819e9},
    "v6e": {"operations_per_second": 918e12, "bytes_per_second": 1638e9},
}
T, N, K, H = 16384, 16, 4, 128
BYTES, SCALAR = 2, 4  # of bfloat16, and of a logsumexp
LANES = 128  # the forward writes the logsumexp once for each

CASES = {
    "causal": (causal(), 1.0),
    "causal, density 0.43": (causal(), 0.43),
    "causal, density 0.2": (causal(), 0.2),
    "window of 1,024": (causal() & sliding_window(1023, 0), 1.0),
}


class Work(NamedTuple):
    """Of one kernel."""

    visits: int
    operations: int
    copied_bytes: int


def main(arguments: list[str] | None = None) -> None:
    """Counts and writes one record per case, block size and direction."""
    parser = programs.parser("xsake.bench.suites.tpu_estimate", __doc__)
    programs.add_out(parser)
    given = parser.parse_args(arguments)
    records = [
        record for name in CASES for block in (128, 256, 512) for record in estimate(name, block)
    ]
    given.out.write_text(json.dumps({**provenance(), "results": records}, indent=1) + "\n")


def estimate(name: str, block: int, length: int = T) -> Iterator[dict[str, Any]]:
    """The records of one case: forward, and backward (dq, then dk and dv)."""
    rule, density = CASES[name]
    case = Case(name, T=length, N=N, H=H, rule=rule, head_densities=(density,), block=(block,) * 2)
    blocks = case.blocks()
    assert blocks is not None
    mask = BlockMask.from_dense(blocks, rule, shape=(length, length), block=block)
    sizes = Sizes(1, length, length, N, K, H, H)
    by_row, by_column = (_steps(mask, sizes, flag) for flag in (False, True))
    tile, scalars = block * H * BYTES, block * SCALAR
    kernels = {
        # products · 2 · block² · H; bytes of a kv block, and of a row block with its results
        "forward": [_work(by_row, block, 2, 2 * tile, 2 * tile + scalars * LANES)],
        "backward": [
            _work(by_row, block, 3, 2 * tile, 3 * tile + 2 * scalars),
            _work(by_column, block, 4, 4 * tile, 2 * tile + 2 * scalars),
        ],
    }
    for direction, parts in kernels.items():
        operations, copied = (sum(x) for x in list(zip(*parts, strict=True))[1:])
        record = {
            "case": name,
            "block": block,
            "direction": direction,
            "density_ratio": float(mask.density()),
            "visits": parts[0].visits,
            "operations": operations,
            "copied_bytes": copied,
        }
        for chip, peak in CHIPS.items():
            seconds = operations / peak["operations_per_second"], copied / peak["bytes_per_second"]
            record[f"{chip}_least_seconds"] = max(seconds)
            record[f"{chip}_limit"] = "products" if seconds[0] > seconds[1] else "memory"
        yield record


def _steps(mask: BlockMask, sizes: Sizes, by_column: bool) -> dict[str, int]:
    """How many visits there are, and how often the kv block or the row block changes."""
    layout = Layout.of(mask, sizes, by_column)
    visits = visits_of(mask.transpose() if by_column else mask, layout, has_partial=True)
    of_launch = jax.jit(visits.of_launch)
    found = {"visits": 0, "kv_blocks": 0, "row_blocks": 0}
    for launch in range(int(visits.launches)):
        table, total = of_launch(launch)
        visit = layout.at(np.asarray(table), np.arange(int(total)))
        found["visits"] += int((visit.kind != EMPTY).sum())
        for name, parts in (("kv_blocks", (visit.x, visit.j)), ("row_blocks", visit[:3])):
            place = np.stack([np.broadcast_to(np.asarray(x), int(total)) for x in parts])
            found[name] += 1 + int((place[:, 1:] != place[:, :-1]).any(0).sum())
    return found


def _work(steps: dict[str, int], block: int, products: int, kv_bytes: int, row_bytes: int) -> Work:
    copied = steps["kv_blocks"] * kv_bytes + steps["row_blocks"] * row_bytes
    return Work(steps["visits"], steps["visits"] * products * 2 * block * block * H, copied)


if __name__ == "__main__":
    main()
