"""ejkernel's Native Sparse Attention: its names, arguments and shapes, computed by `xsake.nsa`.

    block_indices   [B, T, K, S] for every token, or [B, K, Tb, S] for every block of queries
    block_counts    a number, [B, T, K], or [B, K, Tb]               Tb = ceil(T / block_size)
    g_cmp, g_slc    [B, T, N], or [B, T, N·H] for every element

ejkernel's signature names the first forms and its documentation and examples the second ones; both
are taken. Where it would ignore an argument, it is refused here. docs/migrate-ejkernel.md lists
what differs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake import nsa
from xsake.arguments import Tensor
from xsake.masks.integers import integers, size_of
from xsake.nsa.checks import check_arrays

__all__ = ["apply_native_sparse_attention", "native_sparse_attention"]


def apply_native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    block_indices: Int[Tensor, ...],
    block_counts: Int[Tensor, ...] | int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Causal attention of every query to the blocks that block_indices list for it.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H]; K divides N.
      value: [B, T, K, Hv].
      block_indices: [B, T, K, S] for every token, or [B, K, Tb, S] for every block of queries. -1,
        repeated, future and missing blocks are ignored.
      block_counts: how many of the indices count, the first ones: a number, [B, T, K] or
        [B, K, Tb].
      block_size: tokens of a block of queries and of keys.
      softmax_scale: of the logits; default 1/sqrt(H).
      cu_seqlens: [sequences + 1], for B = 1: ends of sequences packed into one row. Blocks are then
        counted in each sequence, and indices and counts are for every token.
      token_indices: positions [T], or (sequence, position) pairs [T, 2], for B = 1: the same.

    Returns:
      [B, T, N, Hv].

    >>> import jax.numpy as jnp
    >>> from xsake.integrations.ejkernel import apply_native_sparse_attention
    >>> batch, seq_len, num_heads, head_dim, block_size = 2, 96, 2, 8, 16
    >>> query = key = value = jnp.ones((batch, seq_len, num_heads, head_dim))
    >>> num_blocks = seq_len // block_size
    >>> block_indices = jnp.tile(
    ...     jnp.arange(4)[None, None, None, :], (batch, num_heads, num_blocks, 1)
    ... )
    >>> apply_native_sparse_attention(query, key, value, block_indices, 4, block_size).shape
    (2, 96, 2, 8)
    """
    if block_indices is None:
        raise TypeError("block_indices must be an array, got NoneType")
    is_packed = cu_seqlens is not None or token_indices is not None
    q, k, v, scale = check_arrays(query, key, value, softmax_scale)
    return nsa.apply_native_sparse_attention(
        q,
        k,
        v,
        by_token("block_indices", block_indices, q, k, block_size, is_packed),
        _counts(block_counts, q, k, block_size, is_packed),
        block_size,
        scale=scale,
        cu_seqlens=cu_seqlens,
        token_indices=token_indices,
    )


def native_sparse_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    value: Float[Tensor, "B T K Hv"],
    g_cmp: Float[Tensor, ...] | None = None,
    g_slc: Float[Tensor, ...] | None = None,
    block_indices: Int[Tensor, ...] | None = None,
    block_counts: Int[Tensor, ...] | int = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    *,
    compressed: bool = False,
) -> Float[Array, "B T N Hv"]:
    """g_slc · selected attention, plus g_cmp · compressed attention if g_cmp is given.

    The compressed branch attends to means of completed blocks of block_size tokens. With g_cmp its
    weights select block_counts blocks for every query, the current one always among them; without
    it block_indices are needed.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H]; K divides N.
      value: [B, T, K, Hv].
      g_cmp: gate of the compressed branch, [B, T, N] or [B, T, N·Hv]; None: no such branch.
      g_slc: gate of the selected branch; None: its output as it is.
      block_indices: as in `apply_native_sparse_attention`; not together with g_cmp, unless
        `compressed` is True.
      block_counts: how many blocks to select, a number; with block_indices how many of them count,
        as in `apply_native_sparse_attention`.
      block_size: tokens of a block.
      softmax_scale: of the logits; default 1/sqrt(H).
      cu_seqlens: [sequences + 1], for B = 1: ends of sequences packed into one row.
      compressed: add the compressed branch, gated by g_cmp, to attention to the given
        block_indices. ejkernel does not have it: there g_cmp makes it ignore block_indices.

    Returns:
      [B, T, N, Hv].

    >>> import jax, jax.numpy as jnp
    >>> from xsake.integrations.ejkernel import native_sparse_attention
    >>> query = key = value = jax.random.normal(jax.random.key(0), (1, 96, 2, 8))
    >>> g_cmp = jnp.ones((1, 96, 2 * 8))
    >>> native_sparse_attention(
    ...     query, key, value, g_cmp=g_cmp, block_counts=4, block_size=16
    ... ).shape
    (1, 96, 2, 8)
    """
    q, k, v, scale = check_arrays(query, key, value, softmax_scale)
    _check_selection(g_cmp, block_indices, compressed)
    how: dict[str, Any] = {
        "g_cmp": None if g_cmp is None else _gate("g_cmp", g_cmp, q, v),
        "g_slc": jnp.ones(q.shape[:3], q.dtype) if g_slc is None else _gate("g_slc", g_slc, q, v),
        "block_size": block_size,
        "scale": scale,
        "cu_seqlens": cu_seqlens,
    }
    if g_cmp is not None:
        how |= {"compression_block": block_size, "compression_stride": block_size}
    if block_indices is not None:
        is_packed = cu_seqlens is not None
        how["block_indices"] = by_token("block_indices", block_indices, q, k, block_size, is_packed)
        how["block_counts"] = _counts(block_counts, q, k, block_size, is_packed)
        how["compressed"] = compressed or None
    else:
        how |= {"initial_blocks": 0, "local_blocks": 1, "num_selected": _selected(block_counts)}
    return nsa.native_sparse_attention(q, k, v, **how)


def by_token(name: str, x: Any, q: Array, k: Array, block_size: int, is_packed: bool) -> Array:
    """[B, T, K, …] of an integer array of that shape or of [B, K, Tb, …]."""
    x = integers(name, x)
    size_of("block_size", block_size, 1)
    (B, T, N), K = q.shape[:3], k.shape[2]
    Tb, rest = -(-T // block_size), x.shape[3:]
    tokens, blocks = (B, T, K, *rest), (B, K, Tb, *rest)
    wanted = 4 if name == "block_indices" else 3
    if x.ndim == wanted and x.shape == tokens == blocks and T > 1:
        raise ValueError(
            f"{name} {list(x.shape)} may be for tokens or for blocks of one token; use "
            "xsake.native_sparse_attention, whose indices and counts are for tokens"
        )
    if x.ndim == wanted and x.shape == tokens:
        return x
    if x.ndim == wanted and x.shape == blocks and not is_packed:
        return jnp.repeat(jnp.swapaxes(x, 1, 2), block_size, axis=1)[:, :T]
    last = ", S" if wanted == 4 else ""
    text = (
        f"{name} must be [B, T, K{last}] with [B, T, K] = {[B, T, K]} for tokens, or "
        f"[B, K, Tb{last}] with [B, K, Tb] = {[B, K, Tb]} for blocks of queries, "
        f"got shape {list(x.shape)}"
    )
    if x.ndim == wanted and x.shape == blocks:
        text = (
            f"{name} for blocks of queries, {list(x.shape)}, cannot be combined with packed "
            f"sequences, whose blocks do not begin at multiples of block_size; give [B, T, K{last}]"
        )
    elif N != K and N in x.shape[1:3]:
        text += f"; the {N // K} query heads of a kv head share their blocks"
    raise ValueError(text)


def _counts(counts: Any, q: Array, k: Array, block_size: int, is_packed: bool) -> Any:
    """A number as it is, else [B, T, K]."""
    if isinstance(counts, int | np.integer) or not np.ndim(counts):
        return counts
    return by_token("block_counts", counts, q, k, block_size, is_packed)


def _selected(counts: Any) -> int:
    """How many blocks to select: a number, because it is a size of compiled arrays."""
    if not isinstance(counts, int | np.integer):
        raise ValueError(
            "block_counts must be a number where g_cmp selects the blocks, got an array of shape "
            f"{list(np.shape(counts))}; counts for tokens or blocks need block_indices"
        )
    return size_of("block_counts", counts, 1)


def _check_selection(g_cmp: Any, block_indices: Any, compressed: bool) -> None:
    """Raises unless it is clear what selects the blocks."""
    if g_cmp is None and block_indices is None:
        raise ValueError(
            "g_cmp and block_indices are both None, so nothing selects the blocks; give one"
        )
    if compressed and (g_cmp is None or block_indices is None):
        raise ValueError(
            "compressed=True adds the compressed branch to given block_indices, so it needs both "
            "g_cmp and block_indices; leave it out"
        )
    if g_cmp is not None and block_indices is not None and not compressed:
        raise ValueError(
            "g_cmp selects blocks, and block_indices are given too; leave one out, or pass "
            "compressed=True for attention to block_indices plus the compressed branch"
        )


def _gate(name: str, gate: Any, q: Array, v: Array) -> Array:
    """[B, T, N], or [B, T, N, Hv] of one for every element."""
    gate = jnp.asarray(gate)
    (B, T, N), Hv = q.shape[:3], v.shape[3]
    if gate.shape == (B, T, N):
        return gate
    if gate.shape in ((B, T, N * Hv), (B, T, N, Hv)):
        return gate.reshape(B, T, N, Hv)
    raise ValueError(
        f"{name} must be [B, T, N] = {[B, T, N]} or [B, T, N·Hv] = {[B, T, N * Hv]}, "
        f"got shape {list(gate.shape)}"
    )
