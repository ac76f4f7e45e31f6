"""Which blocks each query of a kv head selects: a score for every block, then the best n.

    what scores a block j of a query's sequence, for the G query heads of a kv head:

    nsa    Σ_g Σ_i overlap(i, j) · p_g[i]         p: attention weights of the compressed branch
    moba   Σ_g q_g · mean of the keys of block j
    msa    max over the keys s ≤ t of block j of index_query · index_key[s]

    forced: the current block, those before it up to `local`, and the first `initial`.
    They count among the n. A query with fewer than n blocks behind it selects all of them.

Scores are computed for a chunk of queries at a time: neither T × P nor T × blocks is ever stored.
Callers stop gradients before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from xsake import _jax
from xsake.backends import accumulator
from xsake.backends.hopper.selected import choose as hopper
from xsake.backends.products import operand, product
from xsake.nsa.compress import Pooled
from xsake.nsa.sequences import Sequences
from xsake.selection import top_indices

# Scores of one chunk of queries: a CPU's stay in cache, a GPU's amortize the launches.
CHUNK_SCORES = 1 << 21
GPU_CHUNK_SCORES = 1 << 26
LEAST_QUERIES = 16  # of a chunk, however long the sequence

# (arrays of a chunk of queries) -> scores [B, c, K, n] in float32
Score = Callable[[dict[str, Array]], Array]

STATIC = "keys block pooled_block stride scale num_selected initial local implementation".split()


@functools.partial(jax.jit, static_argnames=STATIC)
def by_compressed_attention(
    query: Float[Array, "B T N H"],
    pooled: Pooled,
    logsumexp: Float[Array, "B T N"],
    sequences: Sequences,
    *,
    keys: int,
    block: int,
    pooled_block: int,
    stride: int,
    scale: float,
    implementation: str | None = None,
    **choice: int,
) -> Int[Array, "B T K c"]:
    """NSA's choice: how much of the compressed attention falls on a block, by the shared strides.

        score[j] = Σ_i overlap(i, j) / stride · Σ_g exp(scale · q_g · k̄_i - logsumexp_g)

    overlap(i, j) is the number of tokens that pooled block i shares with block j; `keys` is S.
    Hopper GPUs have kernels for blocks of the paper's sizes.
    """
    sizes = {"block": block, "pooled_block": pooled_block, "stride": stride}
    why_not = hopper.why_not(query, pooled.k, num_selected=choice["num_selected"], **sizes)
    is_plain = sequences.number is None and sequences.last is None
    if why_not is None and is_plain and implementation in (None, "hopper"):
        q, k, lse = lax.stop_gradient((query, pooled.k, logsumexp))
        return hopper.choose(q, k, lse, scale=scale, **choice)[..., : -(-keys // block)]
    N, count = query.shape[2], -(-keys // block)
    grouped = _grouped(query, pooled.k.shape[2])
    lse = logsumexp.reshape(*grouped.shape[:-1])

    def score(at: dict[str, Array]) -> Array:
        s = _products(at["q"], pooled.k) * scale
        level = jnp.where(at["lse"] == -jnp.inf, jnp.inf, at["lse"])  # nothing seen: p is 0
        p = jnp.where(_visible(pooled, at), jnp.exp(s - level[..., None]), 0).sum(3)
        return _overlaps(_from_own_first(p, at), count, block, pooled_block, stride)

    arrays = {"q": grouped, "lse": lse}
    return _select(
        score, arrays, sequences, pooled, query, N * pooled.k.shape[1], block=block, **choice
    )


@functools.partial(jax.jit, static_argnames=STATIC)
def by_block_means(
    query: Float[Array, "B T N H"],
    pooled: Pooled,
    sequences: Sequences,
    *,
    keys: int,
    block: int,
    **choice: int,
) -> Int[Array, "B T K c"]:
    """MoBA's choice: query times mean key, summed over the query heads of a kv head.

    `pooled` has the means of whole blocks: its block and stride are `block`.
    """
    count = -(-keys // block)
    # the sum over heads of a product with one mean is the product with the sum of the queries
    queries = _grouped(query, pooled.k.shape[2]).astype(accumulator(query.dtype)).sum(3)

    def score(at: dict[str, Array]) -> Array:
        s = _products(at["q"][:, :, :, None], pooled.k)[:, :, :, 0]
        own = _from_own_first(jnp.where(_visible(pooled, at)[:, :, :, 0], s, 0), at)
        return _overlaps(own, count, block, block, block)

    size = pooled.k.shape[1] * pooled.k.shape[2]
    return _select(score, {"q": queries}, sequences, pooled, query, size, block=block, **choice)


@functools.partial(jax.jit, static_argnames=STATIC)
def by_indexer(
    index_query: Float[Array, "B T K Hi"],
    index_key: Float[Array, "B S J Hi"],
    sequences: Sequences,
    key_sequences: Sequences,
    *,
    block: int,
    **choice: int,
) -> Int[Array, "B T K c"]:
    """MSA's choice: the largest score of a learned indexer among a block's visible keys.

    index_key has K heads, or one that all share. `sequences` are those of the queries.
    """
    K, S = index_query.shape[2], index_key.shape[1]
    count = -(-S // block)
    keys = jnp.broadcast_to(index_key, (*index_key.shape[:2], K, index_key.shape[3]))
    end = jnp.arange(S, dtype=jnp.int32)[None]  # every key is a pooled block of one token
    slots = Pooled(keys, None, end, key_sequences.number, sequences.first)

    def score(at: dict[str, Array]) -> Array:
        s = _products(at["q"][:, :, :, None], slots.k)[:, :, :, 0]
        own = _from_own_first(
            jnp.where(_visible(slots, at)[:, :, :, 0], s, -jnp.inf), at, fill=-jnp.inf
        )
        padding = [(0, 0)] * 3 + [(0, count * block - S)]
        own = jnp.pad(own, padding, constant_values=-jnp.inf)
        return own.reshape(*own.shape[:3], count, block).max(-1)

    return _select(
        score, {"q": index_query}, sequences, slots, index_query, K * S, block=block, **choice
    )


# ------------------------------------------------------------------------------- what they share


def _select(
    score: Score,
    arrays: dict[str, Array],
    sequences: Sequences,
    pooled: Pooled,
    like: Array,
    scores_per_query: int,
    *,
    block: int,
    num_selected: int,
    initial: int,
    local: int,
) -> Int[Array, "B T K c"]:
    """The blocks with the best scores, a chunk of queries at a time."""
    B, T = like.shape[:2]
    index = jnp.arange(T, dtype=jnp.int32)[None]
    arrays = dict(arrays, last=index if sequences.last is None else sequences.last)
    arrays["position"] = sequences.positions(T)
    if sequences.number is not None and pooled.before is not None:
        arrays |= {"number": sequences.number, "before": pooled.before}
    arrays = {name: jnp.broadcast_to(x, (B, *x.shape[1:])) for name, x in arrays.items()}

    def best(at: dict[str, Array]) -> Array:
        position = at["position"][:, :, None, None]
        scores = score(at)
        blocks = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]
        current = position // block  # negative for padding, which selects nothing
        forced = (blocks < initial) | (blocks > current - local)
        return top_indices(scores, num_selected, forced, blocks <= current)

    limit = CHUNK_SCORES if _jax.platform() == "cpu" else GPU_CHUNK_SCORES
    chunk = min(T, max(LEAST_QUERIES, limit // max(1, B * scores_per_query)))
    return _map_chunks(best, arrays, T, chunk)


def _map_chunks(fn: Callable[[Any], Array], arrays: Any, length: int, chunk: int) -> Array:
    """fn of every `chunk` queries, one chunk after another; arrays are [B, T, …]."""
    chunks = -(-length // chunk)
    if chunks <= 1:
        return fn(arrays)
    chunk = -(-length // chunks)  # of nearly equal size

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(len(x), chunks, chunk, *x.shape[2:]), 1, 0)

    found = jnp.moveaxis(lax.map(fn, jax.tree.map(cut, arrays)), 0, 1)
    return found.reshape(len(found), chunks * chunk, *found.shape[3:])[:, :length]


def _grouped(query: Array, K: int) -> Array:
    """[B, T, N, H] -> [B, T, K, G, H]."""
    B, T, N, H = query.shape
    return query.reshape(B, T, K, N // K, H)


def _products(q: Float[Array, "B c K G H"], k: Float[Array, "B P K H"]) -> Array:
    """q · k in float32, [B, c, K, G, P]."""
    return product("bckgh,bpkh->bckgp", operand(q), operand(k), accumulator(q.dtype))


def _visible(pooled: Pooled, at: dict[str, Array]) -> Array:
    """Which slots each query sees, [B, c, 1, 1, P]."""
    seen = pooled.end[:, None] <= at["last"][:, :, None]
    if pooled.number is not None and "number" in at:
        seen = seen & (pooled.number[:, None] == at["number"][:, :, None])
    return seen[:, :, None, None]


def _from_own_first(x: Array, at: dict[str, Array], fill: float = 0.0) -> Array:
    """x [B, c, K, P], shifted so that slot 0 is the first one of the query's own sequence."""
    P = x.shape[-1]
    if "before" not in at or P == 0:
        return x
    slot = at["before"][:, :, None, None] + jnp.arange(P, dtype=jnp.int32)[None, None, None]
    shifted = jnp.take_along_axis(x, jnp.minimum(slot, P - 1), axis=-1)
    return jnp.where(slot < P, shifted, fill)


def _overlaps(p: Array, count: int, block: int, pooled_block: int, stride: int) -> Array:
    """p [B, c, K, P] of pooled blocks -> scores [B, c, K, count] of blocks, by shared strides.

    >>> _overlaps(jnp.ones((1, 1, 1, 7)), 2, 64, 32, 16)  # 0 + 2 + 2 + 2 + 1
    Array([[[[7., 7.]]]], dtype=float32)
    """
    parts, span = block // stride, pooled_block // stride
    length = span - 1 + count * parts
    padding = [(0, 0)] * 3 + [(span - 1, max(0, count * parts - p.shape[-1]))]
    padded = jnp.pad(p, padding)[..., :length]
    total = jnp.zeros((*p.shape[:3], count), p.dtype)
    for offset in range(1 - span, parts):  # pooled block j · parts + offset
        shared = min(offset + span, parts) - max(offset, 0)
        at = offset + span - 1
        total = total + shared * padded[..., at : at + (count - 1) * parts + 1 : parts]
    return total
