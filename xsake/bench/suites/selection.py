"""The kernels of selection on a Hopper GPU, one by one: python -m xsake.bench.suites.selection.

    random q, k ─ outliers ─ queries ─ scores, with every candidate tiling ─ best_blocks ─▶ JSON

The result of each tiling is compared with plain JAX in float32; one that differs is not timed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

from xsake.backends.hopper.limits import BLOCKS
from xsake.bench import programs
from xsake.bench.suites import Record
from xsake.bench.timing import beside, compiled_together, provenance, time_on_device
from xsake.block_scores import PARTS, by_kernel, queries
from xsake.evaluate.table import to_json
from xsake.hads import budget

KEYS_PER_PEAK = (1, 4)
LIMIT = 1e-3  # largest error of a score, in nats


def main(
    out: Path,
    shapes: tuple[tuple[int, int, int, int], ...] = ((1, 8192, 16, 128), (1, 8192, 9, 64)),
    blocks: tuple[int, ...] = (128,),
    density: float = 0.20,
    dtype: str = "bfloat16",
) -> None:
    """Times the three kernels of the selector `outlier_queries`, on random inputs.

    Args:
      out: the result file.
      shapes: (B, T, N, H) of q and k.
      blocks: 64, 128 or both.
      density: of the lists.
      dtype: of q and k.
    """
    if not set(blocks) <= set(BLOCKS):
        programs.stop(f"--blocks are {blocks}; choose among {BLOCKS}")
    programs.stop_without("hopper", "selection")
    programs.check_outputs(out)
    rows: list[Record] = []
    for shape, block in itertools.product(shapes, blocks):
        for record in _measured(shape, block, density, dtype):
            print(record, flush=True)
            rows.append(record)
            out.write_text(to_json({"provenance": provenance(), "rows": rows}))


def _measured(
    shape: tuple[int, int, int, int], block: int, density: float, dtype: str
) -> Iterator[Record]:
    from xsake.backends.hopper import best_blocks, scores

    B, T, N, _ = shape
    q, k = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
    counts = jnp.asarray(budget.uniform(density, 1, N, -(-T // block)).counts)
    facts = {"shape": "·".join(map(str, shape)), "block": block}

    @jax.jit
    def find(q: Array, k: Array) -> Array:
        return by_kernel.queries_of(q, k, block, PARTS, queries.outliers)

    with beside():
        chosen = find(q, k)
        wanted = {peak: _plain(chosen, k, block, peak) for peak in KEYS_PER_PEAK}
    sums = None
    yield facts | {"kernel": "outliers", **_timed(find, q, k)}
    how: Any = {"block": block, "causal": True, "parts": PARTS}
    calls = {
        (peak, tiling): (
            functools.partial(scores.sums, keys_per_peak=peak, tiling=tiling, **how),
            (chosen, k),
        )
        for peak in KEYS_PER_PEAK
        for tiling in candidates(chosen, k, block)
    }
    for (peak, tiling), score in compiled_together(calls).items():
        with beside():
            found = score(chosen, k)
            error = _error(found, wanted[peak])
        # JSON has no NaN
        known = error if np.isfinite(error) else None
        record = facts | {"kernel": "scores", "keys_per_peak": peak, **dataclasses.asdict(tiling)}
        record["largest_error"] = known
        if error < LIMIT:
            sums = found
            record |= _timed(score, chosen, k)
        yield record
    if sums is None:
        raise ValueError("no tiling has the right scores")

    @jax.jit
    def choose(sums: Array, counts: Array) -> Any:
        how = {"length": T, "block": block, "parts": PARTS, "band": 0}
        return best_blocks.best_blocks(sums, counts, **how)[:4]

    yield facts | {"kernel": "best_blocks", **_timed(choose, sums, counts)}


def candidates(chosen: Array, k: Array, block: int) -> list[Any]:
    """Tilings of the scores kernel for these queries and keys, each with its own sizes."""
    from xsake.backends.hopper.scores import ScoresShape, ScoresTiling

    found: dict[Any, ScoresTiling] = {}
    for warpgroups, (q_kib, k_kib, groups) in itertools.product(
        (2, 3, 4), ((64, 128, 1), (96, 128, 1), (64, 128, 2), (128, 96, 2), (160, 64, 2))
    ):
        tiling = ScoresTiling(warpgroups, q_kib << 10, k_kib << 10, groups)
        shape = ScoresShape.of(chosen, k, block, True, PARTS, tiling)
        found.setdefault((warpgroups, shape), tiling)
    return list(found.values())


def _timed(fn: Any, *args: Any) -> Record:
    return {"device_seconds": time_on_device(fn, *args)}


def _plain(chosen: Array, k: Array, block: int, keys_per_peak: int) -> Array:
    """The scores of the first and the last head, by plain JAX: float32 [B, 2, blocks, queries]."""
    heads = np.array([0, chosen.shape[2] - 1])
    by_head = chosen[:, :, heads].astype(jnp.float32), k[:, :, heads].astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("brnh,bsnh->bnsr", *by_head)
    logits = jnp.pad(logits, ((0, 0), (0, 0), (0, -k.shape[1] % block), (0, 0)), "edge")
    real = np.arange(logits.shape[2]) < k.shape[1]
    weight = jnp.where(real[:, None], jnp.exp2(logits), 0)
    groups = -1, keys_per_peak, block // keys_per_peak, logits.shape[3]
    return jnp.log(weight.reshape(*logits.shape[:2], *groups).max(3).sum(3))


def _error(found: Array, wanted: Array) -> float:
    """The largest difference of a score that a query sees."""
    _, _, blocks, R = wanted.shape
    sees = np.arange(R) // PARTS >= np.arange(blocks)[:, None]
    heads = np.array([0, found.shape[1] - 1])
    away = jnp.abs(found[:, heads, :, :R] - wanted)
    return float(jnp.where(sees, away, 0).max())


if __name__ == "__main__":
    tyro.cli(main, prog="python -m xsake.bench.suites.selection")
