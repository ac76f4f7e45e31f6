"""Which blocks: from calibration or from this input, as many as the budget of each row says.

    q [T, N, H] ─┐ pooled | antidiagonal | gaussian | mean_query | past_query
    k [T, K, H] ─┴─ estimate ─┐
    calibrated mass ─ static ─┴─ scores [N, n, n] ─┐
                                   counts [N, n] ──┴─ keep_top ─ bool [N, n, n] ─ BlockMask

All of it runs under jit with static sizes, n = T / block. A part of a text asks for its rows alone:
q [R · block, N, H] from row `first` on, against the k of the whole text; scores are [N, R, n].
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

from xsake import _jax, masks
from xsake.backends import scores as kernels
from xsake.block_mask import BlockMask
from xsake.hads import rows

COUNTED = 64  # blocks of a row, up to which a GPU finds the best without sorting
STRIPS = 4  # of rows, in which sums over keys are computed
LARGE = 3e38  # finite in float32: scores that are not stay below the forced blocks


@functools.partial(jax.jit, static_argnames="band")
def keep_top(scores: Any, counts: Any, band: int = 0, first: Any = 0) -> Array:
    """Marks the counts[…, i] best allowed blocks of every row i, the forced ones first.

    Args:
      scores: [..., R, n], rows first … first + R - 1; NaN is the lowest score.
      counts: int [..., R]; fewer than the forced keeps the forced, more than a row may have all.
      band: blocks before the diagonal that are forced too.
      first: number of the first row.

    Returns:
      bool [..., R, n]; of equal scores the earlier block is taken, so a row keeps exactly its
      count.

    >>> keep_top(jnp.zeros((4, 4)), jnp.array([1, 2, 2, 3])).sum(-1)
    Array([1, 2, 2, 3], dtype=int32)
    """
    counted = _jax.platform() == "gpu" and jnp.shape(scores)[-1] <= COUNTED
    return (_kept_by_counting if counted else _kept_by_sorting)(scores, counts, band, first)


def _kept_by_counting(scores: Any, counts: Any, band: int, first: Any) -> Array:
    """`keep_top` in few steps but n² for a row: on a GPU, the number of steps is what costs."""
    always, may = _standing(scores, band, first)
    return (always | (ranks(scores, band, first) < jnp.asarray(counts)[..., None])) & may


def _kept_by_sorting(scores: Any, counts: Any, band: int, first: Any) -> Array:
    """`keep_top` for long rows, and where a device does one thing after another."""
    s = _with_forced(scores, band, first)
    n = s.shape[-1]
    always, may = _standing(s, band, first)
    counts = jnp.clip(jnp.asarray(counts), *(x.sum(-1, dtype=jnp.int32) for x in (always, may)))
    counts = jnp.broadcast_to(counts, s.shape[:-1])[..., None]
    last = jnp.take_along_axis(jnp.sort(s, axis=-1), n - counts, axis=-1)  # the worst that is kept
    above, level = s > last, s == last
    room = counts - above.sum(-1, keepdims=True)
    return (above | level & (jnp.cumsum(level, -1) <= room)) & may


def ranks(scores: Any, band: int = 0, first: Any = 0) -> Array:
    """The place of every block in its row's order, int32 [..., R, n]: forced first, then by score.

    `ranks(scores) < counts` is `keep_top(scores, counts)`, for all counts at once. By counting, n²
    for a row: no sort, and nothing but the result in memory.
    """
    scores = _with_forced(scores, band, first)
    above = scores[..., None, :] > scores[..., :, None]
    n = scores.shape[-1]
    level = (scores[..., None, :] == scores[..., :, None]) & np.tri(n, k=-1, dtype=bool)
    return (above | level).sum(-1, dtype=jnp.int32)


def _standing(scores: Any, band: int, first: Any) -> tuple[Array, Array]:
    """(forced, allowed) for scores [..., R, n]: rows of `rows.forced` and `rows.allowed`."""
    R, n = scores.shape[-2:]
    row, column = first + jnp.arange(R)[:, None], jnp.arange(n)
    may = column <= row
    return may & ((column == 0) | (column >= row - band)), may


def _with_forced(scores: Any, band: int, first: Any = 0) -> Array:
    """Scores that put forced blocks first (inf) and what causality forbids last (-inf)."""
    finite = jnp.nan_to_num(
        jnp.asarray(scores, jnp.float32), nan=-LARGE, posinf=LARGE, neginf=-LARGE
    )
    always, may = _standing(scores, band, first)
    return jnp.where(always, jnp.inf, jnp.where(may, finite, -jnp.inf))


def counts_for_mass(scores: Any, share: float, cap: Any, band: int = 0, first: Any = 0) -> Array:
    """Top-p: the fewest blocks whose estimated mass reaches `share`; the forced at least.

    Args:
      scores: [..., R, n] logarithms of estimated mass.
      share: of each row's estimated mass, 0 to 1.
      cap: int [..., R], at most so many: the budget.
      band: as in `keep_top`.
      first: as in `keep_top`.

    Returns:
      int32 [..., R] for `keep_top`.
    """
    always, may = _standing(scores, band, first)
    p = jax.nn.softmax(jnp.where(may, jnp.nan_to_num(scores, nan=-1e30), -jnp.inf), axis=-1)
    order = jnp.argsort(-_with_forced(scores, band, first), axis=-1, stable=True)
    needed = (jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), -1) < share).sum(-1) + 1
    return jnp.clip(needed, always.sum(-1), cap).astype(jnp.int32)


# ------------------------------------------------------------------------------------------- scores


@functools.partial(jax.jit, static_argnames=("selector", "block"))
def estimate(selector: str, q: Any, k: Any, block: int, first: Any = 0) -> Array:
    """Scores of one sequence's blocks, float32 [N, R, n], from q [T, N, H] and k [S, K, H].

    They are logarithms of estimated mass up to a constant for each row, and have no gradient. q may
    be a part of the text: R whole blocks from row `first` on, may be traced. A batch is `jax.vmap`.
    """
    if selector not in ESTIMATES:
        raise ValueError(
            f"selector {selector!r} does not look at q and k; those that do are {list(ESTIMATES)}"
        )
    if q.ndim != 3 or k.ndim != 3 or q.shape[0] > k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q must be [T, N, H] and k [S, K, H] with T up to S and K dividing N, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    return ESTIMATES[selector](*jax.lax.stop_gradient((q, k)), block, first)


def pooled(q: Array, k: Array, block: int, first: Any = 0) -> Array:
    """Mean query against mean key: q̄_i · k̄_j / √H.

    [T, N, H] and [S, K, H] -> [N, R, n]. The mean of a short last block is over what it has.
    """
    return _by_group(_means(q, block, block), _means(k, block, block)) / math.sqrt(q.shape[-1])


def mean_query(q: Array, k: Array, block: int, first: Any = 0) -> Array:
    """Mean query against every key: score[i, j] = log Σ_{k of j} exp(q̄_i · k / √H).

    Exact but for the mean over a block's queries. The cost is that of q·kᵀ ÷ block. By kernels
    where `backends.scores.why_not` has no objection.
    """
    if kernels.why_not(q, k, block) is None:
        return kernels.mean_query(q, k, block)
    queries = _means(q, block, block) / math.sqrt(q.shape[-1])
    rest = -k.shape[0] % block
    keys = jnp.pad(k, ((0, rest), (0, 0), (0, 0)))
    past = jnp.pad(jnp.zeros(k.shape[0]), (0, rest), constant_values=-jnp.inf) if rest else None
    return _summed_by_block(queries.astype(k.dtype), keys, past, block)


def past_query(q: Array, k: Array, block: int, first: Any = 0) -> Array:
    """`mean_query` with the queries of the block before: nothing is decided by a later token.

        score[i, j] = mean_query[i - 1, j], j < i;  score[i, i] = mean_query[i - 1, i - 1]

    The others look at all queries of a block, so that what its first query may see depends on its
    last. The first row of a part of a text, without the queries before it, takes its own.
    """
    scores = mean_query(q, k, block, first)
    R, n = scores.shape[-2:]
    before = jnp.concatenate([scores[:, :1], scores[:, :-1]], axis=1)
    row = first + jnp.arange(R)
    diagonal = row[:, None] == jnp.arange(n)
    own = jnp.where(diagonal, scores, -jnp.inf).max(-1, keepdims=True)
    own = jnp.concatenate([own[:, :1], own[:, :-1]], axis=1)
    return jnp.where(diagonal, own, before)


def gaussian(q: Array, k: Array, block: int, first: Any = 0, part: int = 4) -> Array:
    """Mean query against the mean and variance of every `part` keys, summed over the block.

        score[i, j] = log Σ_{parts b of j} size_b · exp(s q̄_i · k̄_b + s²/2 Σ_d q̄_id² var_bd)

    with s = 1/√H: the exact sum over keys if those of a part were normal with independent
    dimensions. Means alone miss blocks in which a few keys stand out, and those carry the mass.
    The cost is that of q·kᵀ ÷ (block · part / 2).
    """
    part = math.gcd(part, block)
    S, scale = k.shape[0], 1 / math.sqrt(q.shape[-1])
    means = _means(k, part, block)
    spread = jnp.maximum(_means(k.astype(jnp.float32) ** 2, part, block) - means**2, 0)
    q = _means(q, block, block) * scale
    # one product of twice the depth instead of two, in the type that tensor cores were given
    queries = jnp.concatenate([q, q**2], -1).astype(k.dtype)
    keys = jnp.concatenate([means, spread / 2], -1).astype(k.dtype)
    size = jnp.log(_sizes(S, part, block).astype(jnp.float32))
    return _summed_by_block(queries, keys, size, block // part)


def _summed_by_block(q: Array, k: Array, shift: Array | None, per_block: int) -> Array:
    """log Σ exp(q · k + shift) over the keys of each block, float32 [N, R, n]; logits as k's type.

    q [R, N, H], k [n · per_block, K, H], shift [n · per_block]. Where q is of the whole text, rows
    are taken in strips, and of what causality forbids little is computed: the rest is -inf.
    """
    R, n = q.shape[0], k.shape[0] // per_block

    def strip(begin: int, end: int, blocks: int) -> Array:
        """Rows begin … end - 1 against the first `blocks` blocks."""
        seen = slice(blocks * per_block)
        logits = _by_group(q[begin:end], k[seen], k.dtype).astype(jnp.float32)
        logits = logits if shift is None else logits + shift[seen]
        found = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], blocks, per_block), axis=-1)
        return jnp.pad(found, ((0, 0), (0, 0), (0, n - blocks)), constant_values=-jnp.inf)

    if n != R:
        return strip(0, R, n)
    edges = sorted({n * i // STRIPS for i in range(STRIPS + 1)})
    return jnp.concatenate([strip(a, b, b) for a, b in itertools.pairwise(edges)], axis=1)


def antidiagonal(q: Array, k: Array, block: int, first: Any = 0, stride: int = 16) -> Array:
    """Strided sums: groups of `stride` tokens meet along their antidiagonal, as XAttention does.

        s[a, b] = Σ_r q[a·stride + stride-1-r] · k[b·stride + r] / (stride · √H)
        score[i, j] = log mean_{a of i} Σ_{b of j} softmax_b(s[a, b])

    Every query and every key is in one product of a group pair, at 1/stride of the cost of q·kᵀ.
    """
    stride = math.gcd(stride, block)
    parts = block // stride

    def grouped(x: Array, step: int) -> Array:
        """[T, N, H] -> [T / stride, N, stride · H], of whole blocks."""
        room = -len(x) % block
        x = jnp.pad(x, ((0, room), (0, 0), (0, 0))).reshape(-1, stride, *x.shape[1:])
        return x[:, ::step].transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    logits = _by_group(grouped(q, -1), grouped(k, 1)) / (stride * math.sqrt(q.shape[-1]))
    N, A, C = logits.shape
    group = jnp.arange(C)
    live = (group * stride < len(k)) & (group <= first * parts + jnp.arange(A)[:, None])
    p = jax.nn.softmax(jnp.where(live, logits, -jnp.inf), axis=-1)
    mass = p.reshape(N, A // parts, parts, C // parts, parts).sum(4).mean(2)
    return jnp.log(jnp.maximum(mass, 1e-30))


ESTIMATES = {
    "pooled": pooled,
    "antidiagonal": antidiagonal,
    "gaussian": gaussian,
    "mean_query": mean_query,
    "past_query": past_query,
}
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


def _by_group(q: Array, k: Array, dtype: Any = jnp.float32) -> Array:
    """q [A, N, H] · k [B, K, H] -> `dtype` [N, A, B], each query head with its own kv head."""
    A, N, H = q.shape
    B, K, _ = k.shape
    grouped = q.reshape(A, K, N // K, H)
    logits = jnp.einsum("akgh,bkh->kgab", grouped, k, preferred_element_type=dtype)
    return logits.reshape(N, A, B)


# --------------------------------------------------------------------------------------------- mask


def to_mask(blocks: Any, length: int, block: int) -> BlockMask:
    """The marked blocks [N, n, n] or [B, N, n, n] as a BlockMask, causal inside them.

    Its capacity is all that causality allows, so that no choice can overflow it.
    """
    return BlockMask.from_dense(blocks, masks.causal(), shape=(length, length), block=block)
