"""The loss of MSA's indexer: how far its distribution is from that of the attention itself.

    teacher  p_n[s] = softmax of scale · q_n · k[s]             over the keys that query head n sees
    student  u[s]   = softmax of index_scale · iq · ik[s]       one for the heads of a kv head
    loss     mean over queries and query heads of KL(p_n ‖ u)

    KL(p ‖ u) = Σ p log p - Σ p log u = (Σ p s - lse_s) - (Σ p z - lse_z)

with the logits s and z. Σ p s = scale · q · Σ p k and Σ p z = index_scale · iq · Σ p ik: both are
attention outputs, with keys in the place of values. So the loss runs on the kernels of attention,
in memory linear in T. It differs from the KL of the heads' mean distribution by a constant, and has
the same gradient.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from xsake.arguments import Tensor, number
from xsake.attention import dot_product_attention
from xsake.backends import accumulator
from xsake.nsa.checks import check_arrays, check_indexer, check_indices
from xsake.nsa.selected import attend_selected
from xsake.nsa.settings import Settings
from xsake.nsa.split import Text
from xsake.parallel import context_attention


def indexer_loss(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B T K H"],
    index_query: Float[Tensor, "B T K Hi"],
    index_key: Float[Tensor, "B T J Hi"],
    block_indices: Int[Tensor, "B T K C"] | None = None,
    *,
    block_size: int = 64,
    scale: float | None = None,
    index_scale: float | None = None,
    segment_ids: Int[Tensor, ...] | None = None,
    cu_seqlens: Int[Tensor, " sequences_and_one"] | None = None,
    token_indices: Int[Tensor, ...] | None = None,
    axis: str | None = None,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """KL(attention ‖ indexer) of their distributions over keys; the caller adds it to its loss.

    Gradients reach index_query and index_key only: the teacher is constant.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H].
      index_query: [B, T, K, Hi].
      index_key: [B, T, K, Hi] or [B, T, 1, Hi].
      block_indices: both distributions are over the keys of these blocks; None: over all keys up
        to the query's own, for a warm-up in which attention is dense.
      block_size: tokens of a block, as for `select_blocks`, which returned the block_indices.
      scale: of the teacher's logits; default 1/sqrt(H).
      index_scale: of the student's; default 1/sqrt(Hi).
      segment_ids: as in `native_sparse_attention`, like the next two.
      cu_seqlens: likewise.
      token_indices: likewise.
      axis: likewise; the mean is over the queries of all its devices.
      implementation: a backend by name.

    Returns:
      The mean over queries that see a key, float32; 0 if none does.
    """
    q, k, _, scale = check_arrays(query, key, key, scale)
    B, T, N, H = q.shape
    K = k.shape[2]
    settings = Settings(score="msa", block_size=block_size)
    index = check_indexer(settings, index_query, index_key, (B, T, K))
    assert index is not None
    iq, ik = (x.astype(q.dtype) for x in index)
    ik = jnp.broadcast_to(ik, (B, T, K, iq.shape[3]))
    z_scale = 1 / math.sqrt(iq.shape[3])
    z_scale = z_scale if index_scale is None else number("index_scale", index_scale)
    packed = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens, "token_indices": token_indices}
    text = Text.of(B, T, axis, **packed)
    indices = check_indices(block_indices, q, k)
    if 0 in (B, T):
        return jnp.zeros((), accumulator(q.dtype))

    def attend(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
        how: dict[str, Any] = {"scale": scale, "implementation": implementation}
        if indices is not None:
            how |= {"block": block_size, "sequences": text.queries, "split": text.split}
            return attend_selected(q, k, v, indices, **how)
        how |= {"is_causal": True, "q_segment_ids": text.queries.number, "return_residual": True}
        if axis is not None:
            return context_attention(q, k, v, axis=axis, **how)
        return dot_product_attention(q, k, v, **how)

    q, k = lax.stop_gradient((q, k))
    mean_keys, lse_s = attend(q, k, jnp.concatenate([k, ik], axis=-1), scale)
    _, lse_z = attend(iq, ik, lax.stop_gradient(ik), z_scale)  # any values
    dtype = accumulator(q.dtype)
    mean_keys, q, iq = (x.astype(dtype) for x in (mean_keys, q, iq))
    mean_s = scale * (q * lax.stop_gradient(mean_keys[..., :H])).sum(-1)
    by_group = mean_keys[..., H:].reshape(B, T, K, N // K, -1)
    mean_z = z_scale * (iq[:, :, :, None] * by_group).sum(-1)
    lse_z = jnp.where(lse_z == -jnp.inf, 0, lse_z)[..., None]
    seen = lse_s != -jnp.inf
    teacher = mean_s - jnp.where(seen, lax.stop_gradient(lse_s), 0)
    divergence = teacher.reshape(mean_z.shape) - (mean_z - lse_z)
    counted = seen.reshape(mean_z.shape)
    total, count = jnp.where(counted, divergence, 0).sum(), counted.sum()
    if axis is not None:
        total, count = lax.psum((total, count), axis)
    return text.sound.result(total / jnp.maximum(count, 1))
