"""How much a row of blocks wants each block: scores of one input, which `selection` chooses by.

    q [T, N, H] ─┐ pooled | antidiagonal | gaussian | mean_query | past_query
    k [S, K, H] ─┴─ estimate ─ scores [N, R, n]

`mean_query` has a kernel on Hopper GPUs:

    q [B, T, N, H] ─ hopper/means.py ─ mean queries [B, R, N, H] ─┐
    k [B, S, K, H] ───────────────────────────────────────────────┴─ hopper/scores.py ─ [B, N, R, n]

All of it runs under jit with static sizes, n = S / block. For a part of a text, q holds R whole
blocks from row block `first` on, and k the whole text.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import _jax
from xsake.backends import unaliased

STRIPS = 4  # of rows, in which sums over keys are computed


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
    if why_not(q, k, block) is None:
        return mean_query_by_kernel(q, k, block)
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


def _sizes(T: int, part: int, block: int) -> Array:
    """Tokens in each part, up to the end of the last block: `part`, then less, then 0."""
    padded = -(-T // block) * block
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


# ------------------------------------------------------------------------------------------ kernel

HEAD_SIZES = (64, 128, 256)
BLOCKS = (64, 128)
NEEDS_JAX = (0, 11)


def why_not(q: Any, k: Any, block: int) -> str | None:
    """The first thing that keeps the kernels from scoring q [..., T, N, H], k [..., S, K, H]."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {k.dtype}"
    if q.dtype != k.dtype:
        return f"takes queries and keys of one type; these are {q.dtype} and {k.dtype}"
    if k.shape[-1] not in HEAD_SIZES:
        return f"takes heads of 64, 128 and 256; these are {k.shape[-1]}"
    if block not in BLOCKS:
        return f"takes blocks of 64 and 128; these are {block}"
    return None


def mean_query_by_kernel(q: Array, k: Array, block: int) -> Array:
    """log Σ exp(q̄_i · k / √H) over the keys of each block: float32 [N, R, n].

    Args:
      q: [T, N, H], of which q̄ are the means of every `block`.
      k: [S, K, H]. Where it has as many blocks as q, row i sees blocks 0 … i alone, the others are
        -inf.
      block: tokens of a block; the last one may have fewer.

    `jax.vmap` over it is one launch for the whole batch. It has no derivative.
    """
    return _batchable(block)(q[None], k[None])[0]


@functools.lru_cache(maxsize=8)
def _batchable(block: int) -> Callable[[Array, Array], Array]:
    """The kernels, whose batching rule makes a mapped axis a part of B."""

    @jax.custom_batching.custom_vmap
    def batched(q: Array, k: Array) -> Array:
        from xsake.backends.hopper import means as hopper_means
        from xsake.backends.hopper import scores as hopper_scores

        q, k = unaliased(q, k)  # not tried without, as the attention kernels were
        scale = math.log2(math.e) / math.sqrt(k.shape[-1])
        queries = hopper_means.means(q, block, scale=scale)
        causal = queries.shape[1] == -(-k.shape[1] // block)
        return hopper_scores.scores(queries, k, block, causal=causal)

    @batched.def_vmap
    def wider(size: int, is_mapped: Any, q: Array, k: Array) -> tuple[Array, bool]:
        folded = [
            (x if mapped else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[-3:])
            for x, mapped in zip((q, k), is_mapped, strict=True)
        ]
        found = batched(*folded)
        return found.reshape(size, -1, *found.shape[1:]), True

    return batched
