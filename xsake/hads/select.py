"""Which blocks: from calibration or from this input, as many as the budget of each row says.

    q [T, N, H] ─┐ pooled | antidiagonal | gaussian
    k [T, K, H] ─┴─ estimate ─┐
    calibrated mass ─ static ─┴─ scores [N, n, n] ─┐
                                   counts [N, n] ──┴─ keep_top ─ bool [N, n, n] ─ BlockMask

All of it runs under jit with static sizes, n = T / block.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import masks
from xsake.block_mask import BlockMask
from xsake.hads import rows

STRIPS = 4  # of rows, in which `gaussian` is computed
LARGE = 3e38  # finite in float32: scores that are not stay below the forced blocks


@functools.partial(jax.jit, static_argnames="band")
def keep_top(scores: Any, counts: Any, band: int = 0) -> Array:
    """Marks the counts[…, i] best allowed blocks of every row i, the forced ones first.

    Args:
      scores: [..., n, n]; NaN is the lowest score.
      counts: int [..., n]; fewer than the forced keeps the forced, more than i + 1 keeps all.
      band: blocks before the diagonal that are forced too.

    Returns:
      bool [..., n, n]; of equal scores the earlier block is taken, so a row keeps exactly its
      count.

    >>> keep_top(jnp.zeros((4, 4)), jnp.array([1, 2, 2, 3])).sum(-1)
    Array([1, 2, 2, 3], dtype=int32)
    """
    s = _with_forced(scores, band)
    n = s.shape[-1]
    counts = jnp.clip(jnp.asarray(counts), rows.floors(n, band), rows.ceilings(n))
    counts = jnp.broadcast_to(counts, s.shape[:-1])[..., None]
    last = jnp.take_along_axis(jnp.sort(s, axis=-1), n - counts, axis=-1)  # the worst that is kept
    above, level = s > last, s == last
    room = counts - above.sum(-1, keepdims=True)
    return (above | level & (jnp.cumsum(level, -1) <= room)) & rows.allowed(n)


def ranks(scores: Any, band: int = 0) -> Array:
    """The place of every block in its row's order, int32 [..., n, n]: forced first, then by score.

    `ranks(scores) < counts` is `keep_top(scores, counts)`, for all counts at once.
    """
    return places(_with_forced(scores, band))


def places(scores: Array) -> Array:
    """Each entry's place when its row is sorted from the highest, int32; equal ones keep order.

    By counting, n² for a row: no sort, and nothing but the result in memory.
    """
    above = scores[..., None, :] > scores[..., :, None]
    n = scores.shape[-1]
    level = (scores[..., None, :] == scores[..., :, None]) & np.tri(n, k=-1, dtype=bool)
    return (above | level).sum(-1, dtype=jnp.int32)


def _with_forced(scores: Any, band: int) -> Array:
    """Scores that put forced blocks first (inf) and what causality forbids last (-inf)."""
    n = scores.shape[-1]
    finite = jnp.nan_to_num(
        jnp.asarray(scores, jnp.float32), nan=-LARGE, posinf=LARGE, neginf=-LARGE
    )
    always, may = rows.forced(n, band), rows.allowed(n)
    return jnp.where(always, jnp.inf, jnp.where(may, finite, -jnp.inf))


def counts_for_mass(scores: Any, share: float, floor: Any, cap: Any, band: int = 0) -> Array:
    """Top-p: the fewest blocks whose estimated mass reaches `share`, within floor and cap.

    Args:
      scores: [..., n, n] logarithms of estimated mass.
      share: of each row's estimated mass, 0 to 1.
      floor: int [..., n], at least so many.
      cap: int [..., n], at most so many: the budget.
      band: as in `keep_top`.

    Returns:
      int32 [..., n] for `keep_top`.
    """
    n = scores.shape[-1]
    may = rows.allowed(n)
    p = jax.nn.softmax(jnp.where(may, jnp.nan_to_num(scores, nan=-1e30), -jnp.inf), axis=-1)
    order = jnp.argsort(-_with_forced(scores, band), axis=-1, stable=True)
    needed = (jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), -1) < share).sum(-1) + 1
    return jnp.clip(needed, floor, cap).astype(jnp.int32)


# ------------------------------------------------------------------------------------------- scores


@functools.partial(jax.jit, static_argnames=("selector", "block"))
def estimate(selector: str, q: Any, k: Any, block: int) -> Array:
    """Scores of one sequence's blocks, float32 [N, n, n], from q [T, N, H] and k [T, K, H].

    They are logarithms of estimated mass up to a constant for each row.
    """
    if selector not in ESTIMATES:
        raise ValueError(
            f"selector {selector!r} does not look at q and k; those that do are {list(ESTIMATES)}"
        )
    if q.ndim != 3 or k.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q must be [T, N, H] and k [T, K, H] with K dividing N, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    return ESTIMATES[selector](q, k, block)


def pooled(q: Array, k: Array, block: int) -> Array:
    """Mean query against mean key: q̄_i · k̄_j / √H.

    [T, N, H] and [T, K, H] -> [N, n, n]. The mean of a short last block is over what it has.
    """
    return _by_group(_means(q, block, block), _means(k, block, block)) / math.sqrt(q.shape[-1])


def gaussian(q: Array, k: Array, block: int, part: int = 4) -> Array:
    """Mean query against the mean and variance of every `part` keys, summed over the block.

        score[i, j] = log Σ_{parts b of j} size_b · exp(s q̄_i · k̄_b + s²/2 Σ_d q̄_id² var_bd)

    with s = 1/√H: the exact sum over keys if those of a part were normal with independent
    dimensions. Means alone miss blocks in which a few keys stand out, and those carry the mass.
    Blocks after the row's own are -inf.
    `part` = 1 takes every key as it is; the cost is that of q·kᵀ ÷ (block · part / 2).
    """
    part = math.gcd(part, block)
    T, scale = q.shape[0], 1 / math.sqrt(q.shape[-1])
    means = _means(k, part, block)
    spread = jnp.maximum(_means(k.astype(jnp.float32) ** 2, part, block) - means**2, 0)
    q = _means(q, block, block) * scale
    # one product of twice the depth instead of two, in the type that tensor cores were given
    queries = jnp.concatenate([q, q**2], -1).astype(k.dtype)
    keys = jnp.concatenate([means, spread / 2], -1).astype(k.dtype)
    size = jnp.log(_sizes(T, part, block).astype(jnp.float32))
    n, per_block = q.shape[0], block // part

    def strip(begin: int, end: int) -> Array:
        """Rows begin … end - 1, which see the blocks before `end`."""
        seen = slice(end * per_block)
        logits = _by_group(queries[begin:end], keys[seen]) + size[seen]
        found = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], end, per_block), axis=-1)
        return jnp.pad(found, ((0, 0), (0, 0), (0, n - end)), constant_values=-jnp.inf)

    # a few strips of rows, so that little of what causality forbids is computed
    edges = [n * i // STRIPS for i in range(STRIPS + 1)]
    found = jnp.concatenate([strip(a, b) for a, b in itertools.pairwise(edges) if a < b], axis=1)
    return jnp.where(rows.allowed(n), found, -jnp.inf)


def antidiagonal(q: Array, k: Array, block: int, stride: int = 16) -> Array:
    """Strided sums: groups of `stride` tokens meet along their antidiagonal, as XAttention does.

        s[a, b] = Σ_r q[a·stride + stride-1-r] · k[b·stride + r] / (stride · √H)
        score[i, j] = log mean_{a of i} Σ_{b of j} softmax_b(s[a, b])

    Every query and every key is in one product of a group pair, at 1/stride of the cost of q·kᵀ.
    """
    stride = math.gcd(stride, block)
    T = q.shape[0]
    parts = block // stride
    padded = rows.count_blocks(T, block) * block

    def grouped(x: Array, step: int) -> Array:
        """[T, N, H] -> [T / stride, N, stride · H]."""
        x = jnp.pad(x, ((0, padded - T), (0, 0), (0, 0))).reshape(-1, stride, *x.shape[1:])
        return x[:, ::step].transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    logits = _by_group(grouped(q, -1), grouped(k, 1)) / (stride * math.sqrt(q.shape[-1]))
    group = jnp.arange(padded // stride)
    live = (group * stride < T) & (group <= group[:, None])
    p = jax.nn.softmax(jnp.where(live, logits, -jnp.inf), axis=-1)
    N, A, _ = p.shape
    mass = p.reshape(N, A // parts, parts, A // parts, parts).sum(4).mean(2)
    return jnp.log(jnp.maximum(mass, 1e-30))


ESTIMATES = {"pooled": pooled, "antidiagonal": antidiagonal, "gaussian": gaussian}
SELECTORS = ("static", *ESTIMATES)


def _sizes(T: int, part: int, block: int) -> Array:
    """Tokens in each part, up to the end of the last block: `part`, then less, then 0."""
    padded = rows.count_blocks(T, block) * block
    return jnp.clip(T - jnp.arange(0, padded, part), 0, part)


def _means(x: Array, part: int, block: int) -> Array:
    """float32 [n · block / part, N, H]: the mean of every `part` tokens, 0 where there are none."""
    sizes = _sizes(x.shape[0], part, block)
    padded = jnp.pad(x, ((0, len(sizes) * part - x.shape[0]), (0, 0), (0, 0)))
    sums = padded.reshape(-1, part, *x.shape[1:]).astype(jnp.float32).sum(1)
    return sums / jnp.maximum(sizes, 1)[:, None, None]


def _by_group(q: Array, k: Array) -> Array:
    """q [A, N, H] · k [B, K, H] -> float32 [N, A, B], each query head with its own kv head."""
    A, N, H = q.shape
    B, K, _ = k.shape
    grouped = q.reshape(A, K, N // K, H)
    logits = jnp.einsum("akgh,bkh->kgab", grouped, k, preferred_element_type=jnp.float32)
    return logits.reshape(N, A, B)


# --------------------------------------------------------------------------------------------- mask


def to_mask(blocks: Any, length: int, block: int) -> BlockMask:
    """The marked blocks [N, n, n] or [B, N, n, n] as a BlockMask, causal inside them.

    Its capacity is all that causality allows, so that no choice can overflow it.
    """
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)
