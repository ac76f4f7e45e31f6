"""Block scores by the kernels for Hopper GPUs.

    q [B, T, N, H] ─ hopper/means.py or outliers.py ─ queries [B, R · parts, N, H] ─┐
    k [B, S, K, H] ─────────────────────────────────────────────────────────────────┴─ scores.py ─┐
                                                   counts [N, R] ─ best_blocks.py ─ lists ────────┘

`jax.vmap` of these functions is one launch for the whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake import _jax
from xsake.backends import unaliased
from xsake.backends.hopper.limits import BLOCKS, HEAD_SIZES, NEEDS_JAX
from xsake.block_scores.queries import Represent, means, outliers

Index = int | Int[Array, ""]  # of a row block; may be traced
MAX_RANKED = 256  # kv blocks; a row block compares all of them with each other


def why_not(
    q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, block: int
) -> str | None:
    """The first reason why the kernels cannot score q [..., T, N, H] and k [..., S, K, H]."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"supports bfloat16 and float16; this is {k.dtype}"
    if q.dtype != k.dtype:
        return f"supports queries and keys of one type; these are {q.dtype} and {k.dtype}"
    if k.shape[-1] not in HEAD_SIZES:
        return f"supports heads of {_joined(HEAD_SIZES)}; these are {k.shape[-1]}"
    if block not in BLOCKS:
        return f"supports blocks of {_joined(BLOCKS)}; these are {block}"
    return None


def _joined(sizes: Sequence[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def queries_of(q: Array, k: Array, block: int, parts: int, represent: Represent) -> Array:
    """The queries of every row block, [B, R · parts, N, H] in k's dtype, in base 2 and scaled."""
    from xsake.backends.hopper import means as hopper_means
    from xsake.backends.hopper import outliers as hopper_outliers

    scale = math.log2(math.e) / math.sqrt(k.shape[-1])
    if parts == 1:
        return hopper_means.means(q, block, scale=scale)
    if represent is outliers:
        return hopper_outliers.outliers(q, block, parts, scale=scale)
    # parts are too small for the kernel that averages
    queries = jax.vmap(lambda q: represent(q, block // parts, block))(q)
    return (queries * scale).astype(k.dtype)


@functools.lru_cache(maxsize=8)
def batchable(
    block: int, parts: int, represent: Represent, keys_per_peak: int = 1
) -> Callable[[Array, Array], Array]:
    """The kernels on [B, ...]; their batching rule folds a mapped axis into B.

    Scores are of the queries that `represent` makes of `parts` parts of a row block,
    [B, N, R · parts, n]. Sums have the largest of every `keys_per_peak` logits.
    """

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def batched(q: Array, k: Array) -> Array:
        from xsake.backends.hopper import scores as hopper_scores

        q, k = unaliased(q, k)  # the attention kernels need it; untested for these
        queries = queries_of(q, k, block, parts, represent)
        causal = queries.shape[1] == parts * -(-k.shape[1] // block)
        found = hopper_scores.scores(
            queries, k, block, causal=causal, parts=parts, keys_per_peak=keys_per_peak
        )
        return _jax.vary(found, _jax.varying_axes(q, k))

    @batched.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Array, bool]:
        scores = batched(*_jax.folded(_jax.mapped(size, is_mapped, given)))
        return _jax.unfolded(size, scores), True

    return batched


@functools.lru_cache(maxsize=8)
def listing(
    block: int, parts: int, represent: Represent, keys_per_peak: int, band: int
) -> Callable[..., tuple[Array, ...]]:
    """(q, k, counts [1|B, N, n]) -> the lists of `select`; batching folds a mapped axis into B."""

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def listed(q: Array, k: Array, counts: Array) -> tuple[Array, ...]:
        from xsake.backends.hopper import best_blocks
        from xsake.backends.hopper import scores as hopper_scores

        q, k, counts = unaliased(q, k, counts)
        queries = queries_of(q, k, block, parts, represent)
        sums = hopper_scores.sums(
            queries, k, block, causal=True, parts=parts, keys_per_peak=keys_per_peak
        )
        how = {"length": q.shape[1], "block": block, "parts": parts, "band": band}
        found = best_blocks.best_blocks(sums, counts, **how)[:4]
        return _jax.vary(found, _jax.varying_axes(q, k, counts))

    @listed.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Any, Any]:
        q, k, counts = _jax.mapped(size, is_mapped, given)
        counts = _jax.by_batch_row(counts, q.shape[:2], is_mapped[2])
        found = listed(*_jax.folded((q, k, counts)))
        return tuple(_jax.unfolded(size, x) for x in found), (True,) * len(found)

    return listed


def every_query(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], block: int, first: Index
) -> Float[Array, "N queries n"]:
    """log p of every query, padded to whole row blocks.

    The kernel adds up whole blocks of keys, the diagonal one with keys after the query. The sums
    of that block are computed here.
    """
    sums = batchable(block, block, means)(q[None], k[None])[0]
    N, A, n = sums.shape
    K, H = k.shape[1:]
    # A chunk may reach past the last key; a slice past the end would begin earlier.
    own = jnp.pad(k, ((0, n * block - k.shape[0] + A), (0, 0), (0, 0)))
    own = jax.lax.dynamic_slice_in_dim(own, first * block, A).reshape(-1, block, K, H)
    queries = jnp.pad(q, ((0, A - q.shape[0]), (0, 0), (0, 0))).reshape(-1, block, K, N // K, H)
    logits = jnp.einsum("rtkgh,rskh->kgrts", queries, own, preferred_element_type=jnp.float32)
    key = (first * block + jnp.arange(A)).reshape(-1, 1, block)
    seen = jnp.tri(block, dtype=bool)[None] & (key < k.shape[0])  # [rows, t, s]
    logits = jnp.where(seen[None, None], logits / math.sqrt(H), -jnp.inf)
    diagonal = jax.nn.logsumexp(logits, axis=-1).reshape(N, A, 1)
    row, column = first + jnp.arange(A)[:, None] // block, jnp.arange(n)[None]
    past = jnp.where((column < row)[None], sums, -jnp.inf)
    sums = jnp.where((column == row)[None], diagonal, past)
    return jax.nn.log_softmax(sums, axis=-1)
