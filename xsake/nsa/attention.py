"""Native Sparse Attention: three branches, each with a gate, whose outputs are added.

                    ┌─ compress.py ─ pooled k, v ─ attention ──── · g_cmp ─┐
                    │                    │ logsumexp                       │
    q, k, v ────────┼─ select.py ────────┴─ block_indices [B, T, K, C]     ├─ + ─ out
                    │                             │                        │
                    ├─ selected.py ── attention to those blocks ─ · g_slc ─┤
                    └─ window ─────── dot_product_attention ───── · g_swa ─┘

Queries of a kv head share their selection. Everything is causal, and sequences that are packed into
one batch row give what they would give alone, in all branches.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from xsake.arguments import Tensor
from xsake.attention import dot_product_attention
from xsake.backends import accumulator
from xsake.backends.choice import check_name
from xsake.backends.options import Options
from xsake.nsa import select, selected
from xsake.nsa.checks import (
    check_arrays,
    check_counts,
    check_gates,
    check_indexer,
    check_indices,
)
from xsake.nsa.compress import (
    Compression,
    Pooled,
    attend_compressed,
    check_compression,
    compress,
)
from xsake.nsa.settings import Score, Settings
from xsake.nsa.split import Text
from xsake.parallel import context_attention


def native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    *,
    g_cmp: Float[Tensor, ...] | None = None,
    g_slc: Float[Tensor, ...] | None = None,
    g_swa: Float[Tensor, ...] | None = None,
    block_indices: Int[Tensor, "B T K C"] | None = None,
    block_counts: int | Int[Tensor, "B T K"] | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    initial_blocks: int | None = None,
    local_blocks: int | None = None,
    window_size: int | None = None,
    score: Score = "nsa",
    compressed: bool | None = None,
    compression: Compression = "mean",
    compression_block: int = 32,
    compression_stride: int = 16,
    index_query: Float[Tensor, "B T K Hi"] | None = None,
    index_key: Float[Tensor, "B T J Hi"] | None = None,
    scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    axis: str | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Float[Array, "B T N Hv"]:
    """Native Sparse Attention: compressed, selected and window attention, gated and added.

    A branch is computed if its gate is given. If no gate is given, the output is the sum of the
    selected branch, the window branch if `window_size` is given, and the compressed branch if it
    also selects (score="nsa" without `block_indices`) or `compressed` is True.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H]; K divides N, and the N / K query heads of a kv head share their blocks.
      value: [B, T, K, Hv].
      g_cmp: gate of the compressed branch, [B, T, N] or [B, T, N, 1], or [B, T, N, Hv] for each
        element.
      g_slc: gate of the selected branch.
      g_swa: gate of the window branch.
      block_indices: int [B, T, K, C], blocks to select instead of computing them; -1, repeated,
        future and missing blocks are ignored.
      block_counts: how many of the block_indices count, the first ones; one number or [B, T, K].
      block_size: tokens of a selected block; blocks are counted from the start of a sequence.
      num_selected: blocks of each query, forced ones included; all blocks where there are fewer.
      initial_blocks: first blocks of the sequence that are always selected; default 1 for "nsa",
        else 0.
      local_blocks: last blocks that are always selected, the current one included; default 2 for
        "nsa", else 1.
      window_size: the window branch sees a query's own token and window_size - 1 before it; None:
        no such branch.
      score: what scores a block: "nsa", the compressed attention; "moba", the product of query and
        mean key; "msa", the largest score of an indexer. The last two have no compressed branch
        unless `compressed` is True.
      compressed: whether there is a compressed branch; needed to have one that does not select.
      compression: "mean"; a function [B, P, block, K, H] -> [B, P, K, H] that pools blocks of
        tokens, such as `nsa.weighted_pooling(…)` or `nsa.mlp_pooling(…)`; or a pair of them, for
        keys and for values.
      compression_block: tokens of a pooled block.
      compression_stride: tokens from one pooled block to the next; divides compression_block and
        block_size.
      index_query: [B, T, K, Hi], queries of the indexer, for score="msa".
      index_key: [B, T, K, Hi] or [B, T, 1, Hi].
      scale: of the logits of all branches; default 1/sqrt(H).
      segment_ids: int [B|1, T]; each run of equal ids is a sequence, negative ids are padding.
      cu_seqlens: int [sequences + 1], for B = 1: the same as 0 and the end of every sequence;
        tokens after the last end are padding.
      token_indices: int [T] positions, from 0 in every sequence, or [T, 2] (sequence, position),
        for B = 1: the same again. Of traced values that describe no sequences the output is NaN.
      axis: inside `jax.shard_map`, the mesh axis over whose devices the sequence is split, in order
        and evenly. Every device gives its part of all arrays, and gets its part of the output;
        cu_seqlens and token_indices describe the whole sequence.
      implementation: a backend by name, for all branches; blocks are chosen by kernels where there
        are some, else in plain JAX.
      options: settings of the backends.

    Returns:
      [B, T, N, Hv] in query's dtype.
    """
    q, k, v, scale = check_arrays(query, key, value, scale)
    settings = Settings(
        score=score,
        block_size=block_size,
        num_selected=num_selected,
        initial_blocks=initial_blocks,
        local_blocks=local_blocks,
        window_size=window_size,
        compression_block=compression_block,
        compression_stride=compression_stride,
    )
    gates = check_gates(q, v, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa)
    indices = check_indices(block_indices, q, k)
    counts = check_counts(block_counts, indices, q, k)
    branches = settings.branches(gates, compressed, indices is not None)
    packed = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, "token_indices": token_indices}
    text = Text.of(q.shape[0], q.shape[1], axis, **packed)
    selects = "g_slc" in branches and indices is None
    compresses = "g_cmp" in branches or (selects and score == "nsa")
    settings.check(selects=selects, compresses=compresses)
    check_compression(compression, is_read=compresses)
    (selected.check_name if "g_slc" in branches else check_name)(implementation)
    index = check_indexer(settings, index_query, index_key, (*q.shape[:2], k.shape[2]), selects)
    if 0 in q.shape[:2]:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    how: dict[str, Any] = {"scale": scale, "implementation": implementation, "options": options}
    q, k, v = text.sound.gradients(q, k, v)
    found: dict[str, Array] = {}

    pooled = logsumexp = None
    if compresses:
        pooled, (found["g_cmp"], logsumexp) = _compressed(
            q, k, v, text, compression, settings, **how
        )
    if "g_slc" in branches:
        if indices is None:
            indices = choose(
                *(settings, q, k, pooled, logsumexp, index, text, scale),
                implementation=implementation,
            )
        lists: dict[str, Any] = {"block": block_size, "counts": counts, "is_set": selects}
        lists |= {"sequences": text.queries, "split": text.split}
        forced = settings.forced if selects else (0, 0)
        found["g_slc"], _ = selected.attend_selected(
            q, k, v, indices, forced=forced, **lists, **how
        )
    if "g_swa" in branches:
        found["g_swa"] = _window(q, k, v, text, settings.window_size, **how)
    out = combine({name: found[name] for name in branches}, gates, q.dtype)
    return text.sound.result(out)


def apply_native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    block_indices: Int[Tensor, "B T K C"],
    block_counts: int | Int[Tensor, "B T K"] | None = None,
    block_size: int = 64,
    *,
    scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    axis: str | None = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> Float[Array, "B T N Hv"]:
    """The selected branch alone: every query attends to the blocks that block_indices list for it.

    Arguments are as in `native_sparse_attention`.

    >>> import jax, jax.numpy as jnp, xsake
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 100, 2, 8))
    >>> first_block = jnp.zeros((1, 100, 2, 1), jnp.int32)
    >>> xsake.apply_native_sparse_attention(q, k, v, first_block, block_size=16).shape
    (1, 100, 2, 8)
    """
    if block_indices is None:
        raise TypeError("block_indices must be an array, got NoneType")
    return native_sparse_attention(
        query,
        key,
        value,
        block_indices=block_indices,
        block_counts=block_counts,
        block_size=block_size,
        scale=scale,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        token_indices=token_indices,
        axis=axis,
        implementation=implementation,
        options=options,
    )


def select_blocks(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    *,
    block_size: int = 64,
    num_selected: int = 16,
    initial_blocks: int | None = None,
    local_blocks: int | None = None,
    score: Score = "nsa",
    compression: Compression = "mean",
    compression_block: int = 32,
    compression_stride: int = 16,
    index_query: Float[Tensor, "B T K Hi"] | None = None,
    index_key: Float[Tensor, "B T J Hi"] | None = None,
    scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    axis: str | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K c"]:
    """The blocks that `native_sparse_attention` would select, to look at or to pass to it.

    Arguments are as there. The result lists the blocks of each query and kv head in ascending
    order, -1 after the last; c is num_selected, or the number of blocks of T tokens if that is
    less.

    >>> import jax, xsake
    >>> q = k = jax.random.normal(jax.random.key(0), (1, 256, 2, 8))
    >>> xsake.nsa.select_blocks(q, k, num_selected=3)[0, [0, 100, 255], 0]
    Array([[ 0, -1, -1],
           [ 0,  1, -1],
           [ 0,  2,  3]], dtype=int32)
    """
    q, k, _, scale = check_arrays(query, key, key, scale)
    settings = Settings(
        score=score,
        block_size=block_size,
        num_selected=num_selected,
        initial_blocks=initial_blocks,
        local_blocks=local_blocks,
        compression_block=compression_block,
        compression_stride=compression_stride,
    )
    packed = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, "token_indices": token_indices}
    text = Text.of(q.shape[0], q.shape[1], axis, **packed)
    settings.check(selects=True, compresses=score == "nsa")
    check_compression(compression, is_read=score == "nsa")
    check_name(implementation)
    index = check_indexer(settings, index_query, index_key, (*q.shape[:2], k.shape[2]))
    if 0 in q.shape[:2]:
        count = -(-(text.length or q.shape[1]) // block_size)
        return jnp.zeros((*q.shape[:2], k.shape[2], min(num_selected, count)), jnp.int32)
    pooled = logsumexp = None
    if score == "nsa":
        pooled, (_, logsumexp) = _compressed(
            q, k, None, text, compression, settings, scale=scale, implementation=implementation
        )
    blocks = choose(
        *(settings, q, k, pooled, logsumexp, index, text, scale),
        implementation=implementation,
    )
    return text.sound.result(blocks)


def _compressed(
    q: Array,
    k: Array,
    v: Array | None,
    text: Text,
    compression: Compression,
    settings: Settings,
    **how: Any,
) -> tuple[Pooled, tuple[Array, Array]]:
    """The pooled blocks of the whole text, and this device's attention to them."""
    pooled = compress(
        k, v, text.keys, compression=compression, split=text.split, **settings.pooling
    )
    if v is None:
        pooled = pooled._replace(v=pooled.k)  # any values: only the logsumexp is needed
    is_split = text.split is not None
    return pooled, attend_compressed(q, pooled, text.queries, is_split=is_split, **how)


def choose(
    settings: Settings,
    q: Array,
    k: Array,
    pooled: Pooled | None,
    logsumexp: Array | None,
    index: tuple[Array, Array] | None,
    text: Text,
    scale: float,
    means: Pooled | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K c"]:
    """The blocks of every query and kv head, by the settings' score.

    means: of whole blocks, for "moba", where they are known already.
    """
    block, choice, keys = settings.block_size, settings.choice, text.length or k.shape[1]
    q, k, pooled, logsumexp, index = lax.stop_gradient((q, k, pooled, logsumexp, index))
    if settings.score == "msa":
        assert index is not None
        iq, ik = index
        ik = ik if text.split is None else text.split.gathered(ik)
        return select.by_indexer(iq, ik, text.queries, text.keys, block=block, **choice)
    if settings.score == "moba":
        if means is None:
            means = compress(k, None, text.keys, block=block, stride=block, split=text.split)
        return select.by_block_means(q, means, text.queries, keys=keys, block=block, **choice)
    assert pooled is not None
    assert logsumexp is not None
    return select.by_compressed_attention(
        q,
        pooled,
        logsumexp,
        text.queries,
        keys=keys,
        block=block,
        pooled_block=settings.compression_block,
        stride=settings.compression_stride,
        scale=scale,
        implementation=implementation,
        **choice,
    )


def _window(q: Array, k: Array, v: Array, text: Text, size: int | None, **how: Any) -> Array:
    assert size is not None
    how |= {"local_window_size": (size - 1, 0), "q_segment_ids": text.queries.number}
    if text.split is not None:
        return context_attention(q, k, v, axis=text.split.axis, **how)
    return dot_product_attention(q, k, v, **how)


def combine(found: dict[str, Array], gates: dict[str, Array | None], dtype: Any) -> Array:
    """The sum of the branches, each times its gate, rounded once."""
    total = None
    for name, out in found.items():
        gate, out = gates[name], out.astype(accumulator(dtype))
        if gate is not None:
            wide = gate if gate.ndim == 4 else gate[..., None]
            out = out * wide.astype(out.dtype)
        total = out if total is None else total + out
    assert total is not None
    return total.astype(dtype)
