"""Patterns that others use, each at the density asked for, causal, forced blocks included.

A pattern is an order of every row's blocks and a count for every row: its first `counts` blocks.
The order says what the pattern is; the counts make its density exact, to a block in all.

    sliding_window   nearest only, the first block not kept       every row the same count
    sink_window      the first block, then nearest                every row the same count
    longformer       the first two blocks, then nearest           every row the same count
    bigbird          first, half of the rest nearest, half random every row the same count
    strided          a third nearest, the rest at a stride        each row its share
    random           any                                          each row its share
    uniform_top_k    highest calibrated mass                      each row its share
    seed_entropy     any                                          each head by its entropy
    vertical_slash   columns and diagonals of the last queries    each row its share

All but the plain window keep the first block and the diagonal, as HADS does; all count them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import selection
from xsake.hads import budget, rows
from xsake.hads.statistics import softmax_rows

# name: how its counts are dealt out; see the table above
COUNTS = {
    "sliding_window": "level",
    "sink_window": "level",
    "longformer": "level",
    "bigbird": "level",
    "strided": "share",
    "random": "share",
    "uniform_top_k": "share",
    "seed_entropy": "entropy",
    "vertical_slash": "share",
}


def counts(
    name: str, density: float, layers: int, heads: int, n: int, entropies: Any = None
) -> np.ndarray:
    """How many blocks each row of a pattern keeps, int32 [layers, heads, n].

    `entropies` [layers, heads] is needed by seed_entropy alone.
    """
    kind = COUNTS[name]
    if kind == "level":
        return budget.level(density, layers, heads, n).counts
    if kind == "share":
        return budget.uniform(density, layers, heads, n).counts
    if entropies is None:
        raise ValueError(f"{name} deals blocks out by entropy; give the profile's entropies")
    return budget.entropy(entropies, density, n).counts


def order(name: str, n: int, heads: int = 1, seed: int = 0, near: int = 0) -> np.ndarray:
    """Scores of a pattern that knows nothing of the input, [heads, n, n]; the highest go first.

    Args:
      name: one of the patterns above that needs neither calibration nor input.
      n: rows of blocks.
      heads: how many heads draw their own random blocks.
      seed: of the random ones.
      near: how many blocks strided and bigbird take next to the diagonal.
    """
    row, column = np.ogrid[:n, :n]
    away = (row - column).astype(np.float64)
    draws = np.random.default_rng(seed).random((heads, n, n))
    nearest = -away / n
    if name == "sink_window":
        scores = nearest
    elif name == "longformer":
        scores = np.where(column < 2, 1, nearest)
    elif name == "bigbird":
        scores = np.where(away <= near, 2 + nearest, draws)
    elif name == "strided":
        stride = max(2, near)
        scores = np.where(away <= near, 2 + nearest, (away % stride == 0) + nearest)
    elif name in ("random", "seed_entropy"):
        scores = draws
    else:
        raise ValueError(f"{name!r} is no fixed pattern; those are {FIXED}")
    return np.broadcast_to(scores, (heads, n, n))


FIXED = ("sliding_window", "sink_window", "longformer", "bigbird", "strided", "random")


def fixed(name: str, density: float, layers: int, heads: int, n: int, seed: int = 0) -> np.ndarray:
    """The blocks of a fixed pattern, bool [layers, heads, n, n]."""
    many = counts(name, density, layers, heads, n)
    if name == "sliding_window":
        row, column = np.ogrid[:n, :n]
        return (column <= row) & (column > row - many[..., None])
    typical = int(many[0, 0, -1])
    near = {"bigbird": typical // 2, "strided": typical // 3}.get(name, 0)
    kept = [
        np.asarray(selection.keep_top(order(name, n, heads, seed + layer, near), many[layer]))
        for layer in range(layers)
    ]
    return np.stack(kept)


def vertical_slash(q: Any, k: Any, block: int, last: int = 64) -> Array:
    """Columns and diagonals that the last queries look at, scored for every block, [N, n, n].

        score[i, j] = log(column_j + diagonal_{i - j})

    from the exact attention of the last `last` queries, as MInference estimates its pattern.
    q [T, N, H], k [T, K, H].
    """
    T, N, _ = q.shape
    n = rows.count_blocks(T, block)
    last = min(last, T)
    p, _, position = softmax_rows(q[T - last :], k, T - last, T)
    p = jnp.pad(p, ((0, 0), (0, 0), (0, n * block - T)))
    columns = p.reshape(N, last, n, block).sum((1, 3)) / last
    away = (position[:, None] - jnp.arange(n * block)) // block  # blocks between query and key
    away = jnp.clip(away, 0, n - 1)
    diagonals = jax.vmap(lambda x: jnp.zeros(n).at[away.reshape(-1)].add(x.reshape(-1)))(p) / last
    row, column = np.ogrid[:n, :n]
    return jnp.log(columns[:, None, :] + diagonals[:, np.maximum(row - column, 0)] + 1e-30)


def oracle(q: Any, k: Any, block: int) -> Array:
    """The true mass of this input, log [N, n, n]: what no method at run time can know cheaply."""
    return jnp.log(block_mass(q, k, block) + 1e-30)


def block_mass(q: Any, k: Any, block: int, at_once: int = 256) -> Array:
    """Mean attention of every row block to every block, [N, n, n], streamed over rows."""
    T, N, H = q.shape
    n = rows.count_blocks(T, block)
    group = max(1, at_once // block)
    chunks = -(-n // group)
    q = jnp.pad(q, ((0, chunks * group * block - T), (0, 0), (0, 0)))
    k = jnp.pad(k, ((0, n * block - T), (0, 0), (0, 0)))

    def rows_of(chunk: Array) -> Array:
        begins = chunk * group * block
        p, _, position = softmax_rows(
            jax.lax.dynamic_slice_in_dim(q, begins, group * block), k, begins, T
        )
        real = (position < T).reshape(group, block)
        mass = p.reshape(N, group, block, n, block).sum(-1)
        mass = (mass * real[..., None]).sum(2)
        return mass / jnp.maximum(real.sum(-1), 1)[:, None]

    found = jax.lax.map(rows_of, jnp.arange(chunks))
    return jnp.moveaxis(found, 0, 1).reshape(N, -1, n)[:, :n]
