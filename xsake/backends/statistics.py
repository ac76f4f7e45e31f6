"""Statistics of attention: how evenly a query attends, and which blocks it attends to.

    p [B, N, T, S] ─┬─ entropy over keys, over blocks       of every query
                    └─ mass of every block                  mean over the queries of a row block

The Hopper forward has them as by-products. Here they are computed in plain JAX, for every other
backend: the logits of one row block with all keys at a time.

A sink is one more key with value 0. It takes part of the softmax, so that the masses of a row block
add up to less than 1, by the mass of the sinks; all sinks of a head are one outcome of an entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from xsake.backends import Call, accumulator
from xsake.masks.rule import Tokens


class Statistics(NamedTuple):
    """What attention looked at; float32, without gradients. A query that sees no key has zeros."""

    entropy: Float[Array, "*B N T"]  # -Σ p ln p over keys and the sinks, in nats
    block_entropy: Float[Array, "*B N T"]  # the same over kv blocks and the sinks
    mass: Float[Array, "*B N row_blocks kv_blocks"]  # mean over a row block's queries; 0: dropped


def total(sinks: Float[Array, "N M"] | None) -> Float[Array, " N"] | None:
    """The logsumexp of each head's sinks; none at all is -inf."""
    if sinks is None:
        return None
    return jax.nn.logsumexp(lax.stop_gradient(sinks), axis=-1).astype(jnp.float32)


def joined(
    logsumexp: Float[Array, "B T N"],
    entropies: tuple[Float[Array, "B N T"], Float[Array, "B N T"]],
    mass: Float[Array, "B N row_blocks kv_blocks"],
    sinks: Float[Array, " N"] | None,
) -> Statistics:
    """The statistics, from entropies without sinks and mass with them; `sinks` as by `total`.

    With w the mass of the keys, an entropy becomes w · entropy - w ln w - (1 - w) ln (1 - w).
    """
    if sinks is not None:
        w = jnp.moveaxis(keys_share(logsumexp, sinks), 1, 2)
        more = jax.scipy.special.entr(w) + jax.scipy.special.entr(1 - w)
        entropies = entropies[0] * w + more, entropies[1] * w + more
    return Statistics(*lax.stop_gradient((*entropies, mass)))


def keys_share(logsumexp: Float[Array, "B T N"], sinks: Float[Array, " N"]) -> Array:
    """The mass that the sinks leave to the keys: 0 for a query that sees none."""
    seen = logsumexp != -jnp.inf
    return jnp.where(seen, jax.nn.sigmoid(jnp.where(seen, logsumexp, 0) - sinks), 0)


def measured(
    call: Call, logsumexp: Float[Array, "B T N"], sinks: Float[Array, " N"] | None
) -> Statistics:
    """The statistics of a call whose logsumexp is known, in plain JAX.

    It costs as much as dense attention, whatever the mask drops. Memory is linear in S.
    """
    B, T, S, N, K, H, _ = call.sizes
    mask, dtype, exact = call.mask, accumulator(call.q.dtype), lax.Precision.HIGHEST
    (bq, bk), (nq, nk) = mask.block, mask.grid.counts
    if 0 in (B, T, S):
        rows, blocks = jnp.zeros((B, N, T), dtype), jnp.zeros((B, N, min(T, nq), min(S, nk)), dtype)
        return Statistics(rows, rows, blocks)
    q, k, bias, logsumexp = lax.stop_gradient((call.q, call.k, call.bias, logsumexp))
    q = _padded(q, 1, nq * bq).reshape(B, nq * bq, K, N // K, H).astype(dtype)
    k = _padded(k, 1, nk * bk).astype(dtype)
    classes = mask.blocks()
    classes = jnp.repeat(classes, N // classes.shape[1], axis=1)
    weights = jnp.ones_like(logsumexp) if sinks is None else keys_share(logsumexp, sinks)
    by_row = jnp.moveaxis(_padded(jnp.stack([logsumexp, weights]), 2, nq * bq), 3, 2)
    if bias is not None:
        bias = bias.astype(dtype)
        bias = _padded(bias, 2, nq * bq if bias.shape[2] > 1 else 1)
        bias = _padded(bias, 3, nk * bk if bias.shape[3] > 1 else 1)

    def of_row_block(i: Array) -> tuple[Array, Array, Array]:
        logits = call.scale * jnp.einsum(
            "btkgh,bskh->bkgts", lax.dynamic_slice_in_dim(q, i * bq, bq, 1), k, precision=exact
        ).reshape(B, N, bq, nk * bk)
        if call.soft_cap is not None:
            logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
        if bias is not None:
            own = bias if bias.shape[2] == 1 else lax.dynamic_slice_in_dim(bias, i * bq, bq, 2)
            logits = logits + own
        row, key = (i * bq + jnp.arange(bq))[:, None], jnp.arange(nk * bk)
        kind = jnp.repeat(classes[:, :, i], bk, axis=-1)[:, :, None]
        allowed = kind > 0
        if mask.rule is not None:
            b, n = jnp.arange(B)[:, None, None, None], jnp.arange(N)[:, None, None]
            allowed &= (kind == 2) | mask.rule.allows(Tokens.at(b, n, row, key))
        allowed &= (row < T) & (key < S)
        found, w = lax.dynamic_slice_in_dim(by_row, i * bq, bq, 3)[..., None]
        found = jnp.where(found == -jnp.inf, 0, found)
        p = jnp.where(allowed, jnp.exp(logits - found), 0)
        blocks = p.reshape(B, N, bq, nk, bk).sum(-1)
        mass = (blocks * w).sum(2) / jnp.minimum(T - i * bq, bq)
        entropies = (jax.scipy.special.entr(x).sum(-1) for x in (p, blocks))
        return *entropies, mass

    entropy, block_entropy, mass = lax.map(of_row_block, jnp.arange(nq))  # [nq, B, N, bq], …

    def in_order(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(B, N, nq * bq)[..., :T]

    entropies = in_order(entropy), in_order(block_entropy)
    return joined(logsumexp, entropies, jnp.moveaxis(mass, 0, 2), sinks)


def _padded(x: Array, axis: int, length: int) -> Array:
    """x with zeros up to a length of one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return x if x.shape[axis] == length else jnp.pad(x, widths)
