"""Block patterns from the literature, each at a requested density; causal.

A pattern ranks the kv blocks of every row block and keeps the first counts[i] of row block i. The
ranking defines the pattern; the counts make the total number of blocks match the density exactly.

    pattern          keeps first                                  count of row block i
    sliding_window   the nearest blocks, not block 0              constant
    sink_window      block 0, then the nearest                    constant
    longformer       blocks 0 and 1, then the nearest             constant
    bigbird          block 0; the rest half nearest, half random  constant
    strided          a third nearest, the rest at a stride        proportional to i + 1
    random           random                                       proportional to i + 1
    seed_entropy     random                                       by the head's entropy
    vertical_slash   columns and diagonals of the last queries    proportional to i + 1

All but sliding_window keep the forced blocks, as HADS does. Forced blocks are part of the
budget in every pattern.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import ArrayLike, Bool, Float, Int

from xsake import selection
from xsake.hads import budget, row_blocks
from xsake.hads.chunks import PLAIN, Softmax, attention_weights
from xsake.hads.statistics import block_mass

# pattern: how its blocks are allocated, see the table above
COUNTS = {
    "sliding_window": "level",
    "sink_window": "level",
    "longformer": "level",
    "bigbird": "level",
    "strided": "share",
    "random": "share",
    "seed_entropy": "entropy",
    "vertical_slash": "share",
}


def counts(
    name: str,
    density: float,
    layers: int,
    heads: int,
    n: int,
    entropies: Float[ArrayLike, "layers heads"] | None = None,
) -> Int[np.ndarray, "layers heads n"]:
    """How many blocks each row block of a pattern keeps, int32; seed_entropy needs `entropies`."""
    kind = COUNTS[name]
    if kind == "level":
        return budget.level(density, layers, heads, n).counts
    if kind == "share":
        return budget.uniform(density, layers, heads, n).counts
    if entropies is None:
        raise ValueError(f"{name} allocates blocks by entropy; pass entropies=")
    return budget.entropy(entropies, density, n).counts


def order(
    name: str, n: int, heads: int = 1, seed: int = 0, near: int = 0
) -> Float[np.ndarray, "heads n n"]:
    """Scores of a pattern that does not depend on the input; the highest are kept first.

    Args:
      name: one of `ORDERED`.
      n: row blocks.
      heads: each has its own random blocks.
      seed: of the random blocks.
      near: how many blocks next to the diagonal strided and bigbird keep first.
    """
    row, column = np.ogrid[:n, :n]
    away = (row - column).astype(np.float64)
    random = np.random.default_rng(seed).random((heads, n, n))
    nearest = -away / n
    if name == "sink_window":
        scores = nearest
    elif name == "longformer":
        scores = np.where(column < 2, 1, nearest)
    elif name == "bigbird":
        scores = np.where(away <= near, 2 + nearest, random)
    elif name == "strided":
        stride = max(2, near)
        scores = np.where(away <= near, 2 + nearest, (away % stride == 0) + nearest)
    elif name in ("random", "seed_entropy"):
        scores = random
    else:
        raise ValueError(f"pattern {name!r} has no fixed order; those that have one are {ORDERED}")
    return np.broadcast_to(scores, (heads, n, n))


FIXED = ("sliding_window", "sink_window", "longformer", "bigbird", "strided", "random")
ORDERED = (*FIXED[1:], "seed_entropy")  # patterns that `order` ranks


def fixed(
    name: str, density: float, layers: int, heads: int, n: int, seed: int = 0
) -> Bool[np.ndarray, "layers heads n n"]:
    """The blocks of a fixed pattern."""
    many = counts(name, density, layers, heads, n)
    if name == "sliding_window":
        row, column = np.ogrid[:n, :n]
        return (column <= row) & (column > row - many[..., None])
    typical = int(many[0, 0, -1])
    near = {"bigbird": typical // 2, "strided": typical // 3}.get(name, 0)
    scores = np.stack([order(name, n, heads, seed + layer, near) for layer in range(layers)])
    return np.asarray(selection.keep_top(scores, many))


def vertical_slash(
    q: Float[ArrayLike, "T N H"],
    k: Float[ArrayLike, "T K H"],
    block: int,
    last: int = 64,
    softmax: Softmax = PLAIN,
) -> Float[Array, "N n n"]:
    """Scores of blocks by the columns and diagonals that the last queries attend to.

        score[i, j] = log(column_j + diagonal_{i - j})

    from the exact attention of the last `last` queries, as MInference estimates its pattern.
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    T, N, _ = q.shape
    n = row_blocks.count_blocks(T, block)
    last = min(last, T)
    p, _, positions = attention_weights(q[T - last :], k, T - last, T, softmax)
    p = jnp.pad(p, ((0, 0), (0, 0), (0, n * block - T)))
    columns = p.reshape(N, last, n, block).sum((1, 3)) / last
    away = (positions[:, None] - jnp.arange(n * block)) // block  # blocks between query and key
    away = jnp.clip(away, 0, n - 1)
    diagonals = jax.vmap(lambda x: jnp.zeros(n).at[away.reshape(-1)].add(x.reshape(-1)))(p) / last
    row, column = np.ogrid[:n, :n]
    return jnp.log(columns[:, None, :] + diagonals[:, np.maximum(row - column, 0)] + 1e-30)


def oracle(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], block: int, softmax: Softmax = PLAIN
) -> Float[Array, "N n n"]:
    """Log of this input's true block mass: it costs as much as dense attention."""
    return jnp.log(block_mass(q, k, block, softmax=softmax) + 1e-30)
