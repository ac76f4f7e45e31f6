"""Block scores: the estimated attention mass of every (row block, kv block), for `selection`.

    q [T, N, H] ─┐ pooled | antidiagonal | gaussian | mean_query | past_query
    k [S, K, H] ─┤   | part_queries | outlier_queries | every_query
                 └─ estimate ─ scores [N, R, n],   R = ceil(T / block), n = ceil(S / block)

    q, k of whole texts, counts ─ select ─ BlockMask of the best blocks

A score is the logarithm of an estimated attention mass. `mean_query` and the last three have
kernels for Hopper GPUs (by_kernel.py).

Everything here runs under jit. For a chunk of a text, q holds its R row blocks, the first of which
has number `first`, and k holds the whole text.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from xsake import masks, selection
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import Lists
from xsake.block_scores import by_kernel
from xsake.block_scores.by_kernel import Index, why_not
from xsake.block_scores.queries import Represent, means, outliers, sizes_of

__all__ = ["BY_KERNEL", "ESTIMATES", "estimate", "filled", "select", "why_not"]

PARTS = 16  # queries of a row block that `part_queries` and `outlier_queries` score
# Keys whose largest logit stands for each of them in those selectors' sums, by the size of a block;
# 1 for others. In blocks of 64 a few more answers are lost with 4.
KEYS_PER_PEAK = {128: 4}
QUERIES_AT_ONCE = 256  # of `every_query`: so many · S logits of each head are in memory
STRIPS = 4  # strips of row blocks; a strip skips the kv blocks after its last row block


@functools.partial(jax.jit, static_argnames=("selector", "block"))
def estimate(
    selector: str,
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    block: int,
    first: Index = 0,
) -> Float[Array, "N R n"]:
    """Scores of one sequence's blocks by a selector of `ESTIMATES`, float32; no gradient.

    Scores are logarithms of estimated mass, up to a constant for each row block. Use `jax.vmap` for
    a batch.
    """
    if selector not in ESTIMATES:
        raise ValueError(
            f"no scores are computed from q and k for selector {selector!r}; "
            f"use one of {list(ESTIMATES)}"
        )
    if q.ndim != 3 or k.ndim != 3 or q.shape[0] > k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q must be [T, N, H] and k [S, K, H] with T up to S and K dividing N, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    return ESTIMATES[selector](*jax.lax.stop_gradient((q, k)), block, first)


def select(
    selector: str,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    counts: Int[Array, "N n"],
    block: int,
    band: int = 0,
) -> BlockMask:
    """The mask of the counts[n, i] best blocks of every row block, causal inside blocks.

    These are the blocks that `selection.keep_top` selects by `estimate`. Where the kernels score
    them, one more makes the lists, for selectors whose scores need nothing else. It rounds the same
    scores differently, so that of nearly equal blocks, and of those whose estimated mass is nearly
    0, it may select another.
    """
    if q.ndim != 4 or q.shape[:2] != k.shape[:2]:
        raise ValueError(
            "q must be [B, T, N, H] and k [B, T, K, H], the whole text of both, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    (_, T, N, _), n = q.shape, -(-q.shape[1] // block)
    if counts.shape != (N, n):
        raise ValueError(
            f"counts must be [{N}, {n}], heads and row blocks, got {list(counts.shape)}"
        )
    if selector in BY_KERNEL and n <= by_kernel.MAX_RANKED and why_not(q, k, block) is None:
        arrays = _lists_by_kernel(selector, q, k, counts, block, band)
        lists = Lists._make([*arrays, None])
        return BlockMask.from_lists(lists, masks.causal(), (T, T), (block, block))
    scores = jax.vmap(lambda q, k: estimate(selector, q, k, block))(q, k)
    return selection.to_mask(selection.keep_top(scores, counts, band), T, block)


@functools.partial(jax.jit, static_argnames=("selector", "block", "band"))
def _lists_by_kernel(
    selector: str, q: Array, k: Array, counts: Array, block: int, band: int
) -> tuple[Array, ...]:
    q, k = jax.lax.stop_gradient((q, k))
    parts, represent = BY_KERNEL[selector]
    keys_per_peak = 1 if parts == 1 else KEYS_PER_PEAK.get(block, 1)
    make = by_kernel.listing(block, parts, represent, keys_per_peak, band)
    return make(q, k, counts[None].astype(jnp.int32))


def filled(q: Float[Array, "T N H"], count: Index, block: int) -> Float[Array, "T N H"]:
    """q, of which `count` tokens are the text, with its queries in place of the padding.

    The last row block of the text is repeated as often as it fits into `block` tokens; the rest is
    its mean. So the mean of every row block is that of the text's own queries, and selectors that
    look at single queries find the text's own. Row blocks after it hold the mean, too.
    """
    at = jnp.arange(q.shape[0])
    count = jnp.maximum(count, 1)
    last = (count - 1) // block * block
    size, offset = count - last, at - last
    own = ((at >= last) & (at < count))[:, None, None]
    mean = jnp.where(own, q, 0).astype(jnp.float32).sum(0) / size
    source = jnp.where(at < count, at, last + offset % size)
    is_copy = (at < count) | (offset < block // size * size)
    return jnp.where(is_copy[:, None, None], q[source], mean[None].astype(q.dtype))


def pooled(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index = 0
) -> Float[Array, "N R n"]:
    """Mean query against mean key: q̄_i · k̄_j / √H.

    The mean of a short last block is over the tokens that it has.
    """
    return _by_group(means(q, block, block), means(k, block, block)) / math.sqrt(q.shape[-1])


def mean_query(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index = 0
) -> Float[Array, "N R n"]:
    """Mean query against every key: score[i, j] = log Σ_{k of j} exp(q̄_i · k / √H).

    The mean over a block's queries is the only approximation. The cost is 1/block of that of q·kᵀ.
    The kernels compute it where `why_not` returns None.
    """
    if why_not(q, k, block) is None:
        return by_kernel.batchable(block, 1, means)(q[None], k[None])[0]
    return _sums_of_keys(means(q, block, block), k, block)


def part_queries(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    block: int,
    first: Index = 0,
    parts: int = PARTS,
    keys_per_peak: int | None = None,
) -> Float[Array, "N R n"]:
    """Mean queries of `parts` parts of a row block, each against every key.

        score[i, j] = log sqrt(mean_{parts a of i} p_a[j]²)
        p_a[j] = share of block j in Σ_k exp(q̄_a · k / √H), over the blocks that i may visit;
                 of every `keys_per_peak` keys only the one with the largest logit is in the sum

    A block that a few queries want stays visible, which the mean of all of them
    hides. Masses are squared because the error of the output grows with the square of the mass that
    is dropped. The cost is parts/block of that of q·kᵀ. The kernels compute the sums over keys
    where `why_not` returns None.

    With keys_per_peak=m, which divides the block, the largest of m logits stands for all m, those
    of keys that are block/m apart: the sum has an m-th of the exponentials. A block whose keys are
    all alike then counts for up to m times less than one with a few peaks.
    The kernels need block/m to be a multiple of 8. Default: 4 in blocks of 128, 1 in others.
    """
    return _of_parts(q, k, block, first, math.gcd(parts, block), means, keys_per_peak)


def outlier_queries(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    block: int,
    first: Index = 0,
    parts: int = PARTS,
    keys_per_peak: int | None = None,
) -> Float[Array, "N R n"]:
    """`part_queries` with one query of each part instead of the part's mean.

    The query is the one furthest from the mean of the row block. A mean of four queries wants what
    none of them wants: the logit of a key that one query asks for is divided by four. The query
    that differs most from the others is the one whose blocks the others would not select.
    """
    return _of_parts(q, k, block, first, math.gcd(parts, block), outliers, keys_per_peak)


def _of_parts(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    block: int,
    first: Index,
    parts: int,
    represent: Represent,
    keys_per_peak: int | None,
) -> Float[Array, "N R n"]:
    """As by `part_queries`, of the queries that `represent` makes of each row block's parts."""
    if keys_per_peak is None:
        keys_per_peak = KEYS_PER_PEAK.get(block, 1)
    if keys_per_peak < 1 or block % keys_per_peak:
        raise ValueError(f"keys_per_peak is {keys_per_peak}; it must divide the block, {block}")
    size = block // parts
    if why_not(q, k, block) is None:
        make = by_kernel.batchable(block, parts, represent, keys_per_peak)
        scores = make(q[None], k[None])[0]
    else:
        scores = _sums_of_keys(represent(q, size, block), k, block, parts, keys_per_peak)
    N, A, n = scores.shape
    row, column = first + jnp.arange(A)[:, None] // parts, jnp.arange(n)[None]
    logs = jax.nn.log_softmax(jnp.where((column <= row)[None], scores, -jnp.inf), axis=-1)
    real = (sizes_of(q.shape[0], size, block) > 0)[None, :, None]
    logs = jnp.where(real, 2 * logs, -jnp.inf).reshape(N, -1, parts, n)
    return (jax.nn.logsumexp(logs, axis=2) - math.log(parts)) / 2


def every_query(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index = 0
) -> Float[Array, "N R n"]:
    """The exact attention masses of all queries of a row block.

        score[i, j] = log sqrt(mean_{queries t of i} p_t[j]²)
        p_t[j] = Σ_{k of j} softmax_k(q_t · k / √H), over the keys that t sees

    Nothing is approximated but the error of the output, by the square of the mass that is dropped:
    the values do not enter. The cost is that of q·kᵀ, about half of dense attention, so this is for
    texts that are short or must not lose anything. The kernels compute the sums over keys where
    `why_not` returns None.
    """
    if why_not(q, k, block) is None:
        logs = by_kernel.every_query(q, k, block, first)
        return _root_mean_square(logs, q.shape[0], block)
    padding = -q.shape[0] % block
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(-1, block, *q.shape[1:])
    keys = jnp.pad(k, ((0, -k.shape[0] % block), (0, 0), (0, 0)))

    def scored(given: tuple[Array, Array]) -> Float[Array, "N n"]:
        """The scores of one row block: its number, and its queries."""
        number, some = given
        logits = _by_group(some, keys) / math.sqrt(q.shape[-1])
        position = (first + number) * block + jnp.arange(block)
        key = jnp.arange(len(keys))
        visible = (key[None] <= position[:, None]) & (key < len(k))[None]
        logits = jnp.where(visible[None], logits, -jnp.inf)
        sums = jax.nn.logsumexp(logits.reshape(*logits.shape[:2], -1, block), axis=-1)
        real = q.shape[0] - number * block
        return _root_mean_square(jax.nn.log_softmax(sums, axis=-1), real, block)[:, 0]

    at_once = max(1, QUERIES_AT_ONCE // block)
    found = jax.lax.map(scored, (jnp.arange(len(queries)), queries), batch_size=at_once)
    return jnp.moveaxis(found, 0, 1)


def _root_mean_square(
    logs: Float[Array, "N queries n"], T: int | Array, block: int
) -> Float[Array, "N R n"]:
    """log sqrt(mean p²) over each row block's queries, of log p; those from T on are padding."""
    N, A, n = logs.shape
    logs = jnp.where((jnp.arange(A) < T)[None, :, None], 2 * logs, -jnp.inf)
    sums = jax.nn.logsumexp(logs.reshape(N, -1, block, n), axis=2)
    sizes = jnp.clip(T - jnp.arange(0, A, block), 1, block)
    return (sums - jnp.log(sizes)[None, :, None]) / 2


def past_query(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index = 0
) -> Float[Array, "N R n"]:
    """`mean_query` with the queries of the row block before: no score depends on a later token.

        score[i, j] = mean_query[i - 1, j], j < i;  score[i, i] = mean_query[i - 1, i - 1]

    The other selectors look at all queries of a row block, so that what its first query may see
    depends on its last. The first row block of a chunk uses its own queries, because those before
    it are not given.
    """
    scores = mean_query(q, k, block, first)
    R, n = scores.shape[-2:]
    before = jnp.concatenate([scores[:, :1], scores[:, :-1]], axis=1)
    row = first + jnp.arange(R)
    diagonal = (row[:, None] == jnp.arange(n)[None])[None]
    own = jnp.where(diagonal, scores, -jnp.inf).max(-1, keepdims=True)
    own = jnp.concatenate([own[:, :1], own[:, :-1]], axis=1)
    return jnp.where(diagonal, own, before)


def gaussian(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index = 0, part: int = 4
) -> Float[Array, "N R n"]:
    """Mean query against the mean and variance of every `part` keys, summed over the block.

        score[i, j] = log Σ_{parts b of j} size_b · exp(s q̄_i · k̄_b + s²/2 Σ_d q̄_id² var_bd)

    with s = 1/√H. This is the exact sum over keys if the keys of a part are normally distributed
    with independent dimensions. Means alone miss blocks in which a few keys stand out and carry the
    mass. The cost is 2/(block · part) of that of q·kᵀ.
    """
    part = math.gcd(part, block)
    S, scale = k.shape[0], 1 / math.sqrt(q.shape[-1])
    mean = means(k, part, block)
    variance = jnp.maximum(means(k.astype(jnp.float32) ** 2, part, block) - mean**2, 0)
    q = means(q, block, block) * scale
    # one product of depth 2H instead of two of depth H, in k's type, for tensor cores
    queries = jnp.concatenate([q, q**2], -1).astype(k.dtype)
    keys = jnp.concatenate([mean, variance / 2], -1).astype(k.dtype)
    log_size = jnp.log(sizes_of(S, part, block).astype(jnp.float32))
    return _summed_by_block(queries, keys, log_size, block // part)


def antidiagonal(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    block: int,
    first: Index = 0,
    stride: int = 16,
) -> Float[Array, "N R n"]:
    """Strided sums along the antidiagonals of groups of `stride` tokens, as in XAttention.

        s[a, b] = Σ_r q[a·stride + stride-1-r] · k[b·stride + r] / (stride · √H)
        score[i, j] = log mean_{a of i} Σ_{b of j} softmax_b(s[a, b])

    For each pair of groups, every query and every key is used in exactly one product. The cost is
    1/stride of that of q·kᵀ.
    """
    stride = math.gcd(stride, block)
    parts = block // stride

    def grouped(x: Array, step: int) -> Array:
        """[T, N, H] -> [A, N, stride · H], padded to whole blocks."""
        padding = -len(x) % block
        x = jnp.pad(x, ((0, padding), (0, 0), (0, 0))).reshape(-1, stride, *x.shape[1:])
        return x[:, ::step].transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    logits = _by_group(grouped(q, -1), grouped(k, 1)) / (stride * math.sqrt(q.shape[-1]))
    N, A, C = logits.shape
    group = jnp.arange(C)[None]
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
    "part_queries": part_queries,
    "outlier_queries": outlier_queries,
    "every_query": every_query,
}
# selector: (queries of a row block, what makes them), where the kernels' sums are all it needs
BY_KERNEL: dict[str, tuple[int, Represent]] = {
    "mean_query": (1, means),
    "part_queries": (PARTS, means),
    "outlier_queries": (PARTS, outliers),
}


# ------------------------------------------------------------------------- what selectors share


def _by_group(
    q: Float[Array, "A N H"], k: Float[Array, "C K H"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "N A C"]:
    """q · k in `dtype`, each query head with its own kv head."""
    A, N, H = q.shape
    C, K, _ = k.shape
    grouped = q.reshape(A, K, N // K, H)
    logits = jnp.einsum("akgh,bkh->kgab", grouped, k, preferred_element_type=dtype)
    return logits.reshape(N, A, C)


def _sums_of_keys(
    queries: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    block: int,
    parts: int = 1,
    keys_per_peak: int = 1,
) -> Float[Array, "N R n"]:
    """log Σ exp(q · k / √H) over the keys of each block, of which the last may be short.

    Only the largest of every `keys_per_peak` logits is summed.
    """
    queries = (queries / math.sqrt(queries.shape[-1])).astype(k.dtype)
    padding = -k.shape[0] % block
    keys = jnp.pad(k, ((0, padding), (0, 0), (0, 0)))
    shift = None
    if padding:
        shift = jnp.pad(jnp.zeros(k.shape[0]), (0, padding), constant_values=-jnp.inf)
    return _summed_by_block(queries, keys, shift, block, parts, keys_per_peak)


def _summed_by_block(
    q: Float[Array, "R N H"],
    k: Float[Array, "keys K H"],
    shift: Float[Array, " keys"] | None,
    per_block: int,
    parts: int = 1,
    keys_per_peak: int = 1,
) -> Float[Array, "N R n"]:
    """log Σ exp(q · k + shift) over the `per_block` keys of each block; logits are of k's type.

    Only the largest of every `keys_per_peak` logits is summed, those of keys that are
    per_block / keys_per_peak apart. A row block has `parts` queries. If q is of the whole text, row
    blocks are computed in strips, which skip most of what causality forbids; the scores of skipped
    blocks are -inf.
    """
    R, n = q.shape[0], k.shape[0] // per_block

    def strip(begin: int, end: int, blocks: int) -> Array:
        """Row blocks begin … end - 1 against the first `blocks` kv blocks."""
        seen = slice(blocks * per_block)
        logits = _by_group(q[begin:end], k[seen], k.dtype).astype(jnp.float32)
        logits = logits if shift is None else logits + shift[None, None, seen]
        groups = blocks, keys_per_peak, per_block // keys_per_peak
        peaks = logits.reshape(*logits.shape[:2], *groups).max(-2)
        sums = jax.nn.logsumexp(peaks, axis=-1)
        return jnp.pad(sums, ((0, 0), (0, 0), (0, n - blocks)), constant_values=-jnp.inf)

    if n * parts != R:
        return strip(0, R, n)
    edges = sorted({n * i // STRIPS for i in range(STRIPS + 1)})
    each = [strip(a * parts, b * parts, b) for a, b in itertools.pairwise(edges)]
    return jnp.concatenate(each, axis=1)
