"""Dropped blocks as one key and one value each: their centroids, weighted by their size.

    visited blocks ─ dot_product_attention ─ out, L ─┐
    dropped blocks ─ mean key, mean value,           ├─ merged by logsumexp ─ out
                     logit + ln(tokens) ── out', L' ─┘

The softmax runs over the visited tokens and one centroid for every dropped block before the
diagonal. This adds T · n products of q and k, n = T / block. Gradients flow through both parts.
A sink is a key whose value is 0: merging needs a logsumexp that includes it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from xsake.attention import dot_product_attention
from xsake.backends import merged
from xsake.block_mask import BlockMask
from xsake.hads.chunks import PLAIN, Softmax


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: Any,
    *,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """(out, logsumexp of logits and sinks) of `dot_product_attention`."""
    out, logsumexp = dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_residual=True,
        implementation=implementation,
    )
    if sinks is not None:
        logsumexp = jnp.logaddexp(logsumexp, sinks.astype(jnp.float32))
    return out, logsumexp


def corrected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    mask: BlockMask,
    *,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N Hv"]:
    """Block-sparse causal attention that approximates dropped blocks by their centroids.

    Args:
      query: as for `dot_product_attention`.
      key: likewise.
      value: likewise.
      mask: causal, with square blocks. Dropped blocks before the diagonal are represented by their
        centroids if its rule allows all of the block; others stay dropped.
      logits_soft_cap: as for `dot_product_attention`; of the centroids' logits, too.
      sinks: [N], as for `dot_product_attention`.
      implementation: of `dot_product_attention`.
    """
    check_mask(mask)
    block = mask.block[1]
    if mask.block[0] != block or mask.shape[0] != mask.shape[1]:
        raise ValueError(
            f"a corrected mask needs square blocks and T = S, got {mask.block} and {mask.shape}"
        )
    how: Any = {"logits_soft_cap": logits_soft_cap, "sinks": sinks}
    out, logsumexp = attend(query, key, value, mask, implementation=implementation, **how)
    dropped = dropped_blocks(mask)
    softmax = Softmax(logits_soft_cap)
    more = attend_centroids(query, key, value, dropped, block, softmax)
    return merged((out, logsumexp), more)[0].astype(out.dtype)


def check_mask(mask: Any) -> None:
    """Raises unless the mask is a BlockMask."""
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask must be a BlockMask, got {type(mask).__name__}; only blocks that a BlockMask "
            "leaves out are dropped; that of a plan is plan.mask(layer, q, k)"
        )


def dropped_blocks(mask: BlockMask) -> Bool[Array, "#B heads n n"]:
    """Blocks before the diagonal that the mask does not visit; heads is N, K or 1.

    Only those that the rule allows as a whole: a centroid would show what it hides of the others.
    """
    classes = mask.blocks()
    n = classes.shape[-1]
    dropped = (classes == 0) & jnp.tri(n, k=-1, dtype=bool)
    return dropped if mask.rule is None else dropped & mask.rule.classify(mask.grid)[1]


def attend_centroids(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K Hv"],
    dropped: Bool[Array, "#B heads n n"],
    block: int,
    softmax: Softmax = PLAIN,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """(out, logsumexp) of attention over the centroids of dropped blocks, float32.

    A query without dropped blocks has out 0 and logsumexp -inf.
    """
    B, T, N, H = query.shape
    K, Hv = value.shape[2:]
    n = dropped.shape[-1]
    padding = ((0, 0), (0, n * block - T), (0, 0), (0, 0))
    # A dropped block is never padded: only the last block can be, and it is visible only on the
    # diagonal, which `dropped_blocks` leaves out.
    keys, values = (
        jnp.pad(x.astype(jnp.float32), padding).reshape(B, n, block, K, -1).mean(2)
        for x in (key, value)
    )
    q = jnp.pad(query.astype(jnp.float32), padding).reshape(B, n, block, K, N // K, H)
    logits = jnp.einsum("bitkgh,bjkh->bkgitj", q, keys) / math.sqrt(H)
    logits = softmax.capped(logits) + math.log(block)
    heads = dropped.shape[1]
    wide = jnp.repeat(dropped, N // heads if heads > 1 else N, axis=1)
    live = wide.reshape(-1, K, N // K, n, 1, n)
    logits = jnp.where(live, logits, -jnp.inf)
    top = jnp.max(logits, -1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weight = jnp.exp(logits - top)
    total = weight.sum(-1)
    seen = total != 0  # NaN is not nothing
    out = jnp.einsum("bkgitj,bjkh->bitkgh", weight, values)
    safe = jnp.where(seen, total, 1)
    out = out / jnp.moveaxis(safe, (1, 2), (3, 4))[..., None]
    logsumexp = jnp.where(seen, top[..., 0] + jnp.log(safe), -jnp.inf)
    logsumexp = jnp.moveaxis(logsumexp, (1, 2), (3, 4)).reshape(B, n * block, N)
    return out.reshape(B, n * block, N, Hv)[:, :T], logsumexp[:, :T]
