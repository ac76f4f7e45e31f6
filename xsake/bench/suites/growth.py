"""How the time of attention grows with the length: python -m xsake.bench.suites.growth.

    causal         all blocks
    density=D      a share D of the causal blocks, at random, the same for all heads
    window=W       the last W keys

Random inputs, batch 1, forward only. Each record has the token pairs that are computed, which a
time that is proportional to work would follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xsake import BlockMask, dot_product_attention, masks, selection
from xsake.bench.suites import Record
from xsake.bench.timing import provenance, time_queued
from xsake.evaluate.table import to_json
from xsake.hads import budget

LENGTHS = tuple(2048 << i for i in range(9))  # 2k to 512k


def growth(
    out: Path,
    lengths: tuple[int, ...] = LENGTHS,
    heads: int = 4,
    head_size: int = 128,
    density: float = 0.2,
    window: int = 4096,
    block: int = 128,
    dtype: str = "bfloat16",
) -> None:
    """Times dense, block-sparse and windowed attention at every length; `out` is a JSON file."""
    rows: list[Record] = []
    for length in lengths:
        size = (1, length, heads, head_size)
        q, k, v = (jax.random.normal(jax.random.key(i), size, dtype) for i in range(3))
        for name, mask in _masks(length, density, window, block).items():
            run = jax.jit(lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask))
            compiled = run.lower(q, k, v, mask).compile()
            seconds = time_queued(compiled, q, k, v, mask, seconds=0.03, rounds=3).median_seconds
            pairs = int(mask.kv_count.sum()) * block**2
            rows.append(
                {
                    "kind": "growth",
                    "length": length,
                    "heads": heads,
                    "head_size": head_size,
                    "block": block,
                    "mask": name,
                    "pairs": pairs,
                    "operations": 4 * pairs * heads * head_size,
                    "seconds": seconds,
                }
            )
            print(rows[-1], flush=True)
            out.write_text(to_json({"provenance": provenance(), "rows": rows}))


def _masks(length: int, density: float, window: int, block: int) -> dict[str, BlockMask]:
    """The masks by name, one list for all heads."""
    shape, n = (length, length), -(-length // block)
    scores = jax.random.uniform(jax.random.key(3), (1, n, n))
    counts = jnp.asarray(budget.uniform(density, 1, 1, n).counts[0])
    rules: dict[str, Any] = {
        "causal": masks.causal(),
        f"window={window}": masks.causal() & masks.sliding_window(window - 1, 0),
    }
    found = {name: BlockMask.from_rule(rule, shape, block=block) for name, rule in rules.items()}
    found[f"density={density:g}"] = selection.to_mask(
        selection.keep_top(scores, counts), length, block
    )
    return found


if __name__ == "__main__":
    import tyro

    tyro.cli(growth)
