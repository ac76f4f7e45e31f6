"""Statistics of attention: how evenly a query attends, and which blocks it attends to.

    p [B, N, T, S] ─┬─ entropy over keys, over blocks       of every query
                    └─ mass of every block                  mean over the queries of a row block

The Hopper forward has them as by-products. Here they are computed in plain JAX, for every other
backend: the logits of one row block with all keys at a time.

A sink is one more key with value 0. It takes part of the softmax, so that the masses of a row block
add up to less than 1, by the mass of the sinks; all sinks of a head are one outcome of an entropy.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from xsake.backends import Call, accumulator
from xsake.masks.rule import Tokens

# What is observed: mass and entropy of "blocks", or also the entropy of "tokens", which costs one
# more multiply-add for every query and key.
Observed = Literal["blocks", "tokens"]


class Statistics(NamedTuple):
    """What attention looked at; float32, without gradients. A query that sees no key has zeros."""

    mass: Float[Array, "*B N row_blocks kv_blocks"]  # mean over a row block's queries; 0: dropped
    block_entropy: Float[Array, "*B N T"]  # -Σ p ln p over kv blocks and the sinks, in nats
    entropy: Float[Array, "*B N T"] | None = None  # the same over keys, if "tokens" are observed


def checked(what: Observed) -> Observed:
    """`what`, or an error that names the choices."""
    if what not in get_args(Observed):
        raise ValueError(f"what is {what!r}; choose one of {list(get_args(Observed))}")
    return what


def total(sinks: Float[Array, "N M"] | None) -> Float[Array, " N"] | None:
    """The logsumexp of each head's sinks; none at all is -inf."""
    if sinks is None:
        return None
    return jax.nn.logsumexp(lax.stop_gradient(sinks), axis=-1).astype(jnp.float32)


def joined(
    logsumexp: Float[Array, "B T N"], found: Statistics, sinks: Float[Array, " N"] | None
) -> Statistics:
    """The statistics, from entropies without sinks and mass with them; `sinks` as by `total`.

    With w the mass of the keys, an entropy becomes w · entropy - w ln w - (1 - w) ln (1 - w).
    """
    if sinks is not None:
        w = jnp.moveaxis(keys_share(logsumexp, sinks), 1, 2)
        more = jax.scipy.special.entr(w) + jax.scipy.special.entr(1 - w)
        entropies = jax.tree.map(lambda x: x * w + more, found[1:])
        found = Statistics(found.mass, *entropies)
    return lax.stop_gradient(found)


def keys_share(logsumexp: Float[Array, "B T N"], sinks: Float[Array, " N"]) -> Array:
    """The mass that the sinks leave to the keys: 0 for a query that sees none."""
    seen = logsumexp != -jnp.inf
    return jnp.where(seen, jax.nn.sigmoid(jnp.where(seen, logsumexp, 0) - sinks), 0)


def measured(call: Call, sinks: Float[Array, " N"] | None, what: Observed) -> Statistics:
    """The statistics of a call in plain JAX.

    It costs as much as dense attention, whatever the mask drops. Memory is linear in S.
    """
    B, T, S, N, K, H, _ = call.sizes
    mask, dtype, exact = call.mask, accumulator(call.q.dtype), lax.Precision.HIGHEST
    (bq, bk), (nq, nk) = mask.block, mask.grid.counts
    if 0 in (B, T, S):
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        rows, blocks = zeros((B, N, T)), zeros((B, N, min(T, nq), min(S, nk)))
        return Statistics(blocks, rows, rows if what == "tokens" else None)
    q, k, bias = lax.stop_gradient((call.q, call.k, call.bias))
    q = _padded(q, 1, nq * bq).reshape(B, nq * bq, K, N // K, H).astype(dtype)
    k = _padded(k, 1, nk * bk).astype(dtype)
    classes = mask.blocks()
    classes = jnp.repeat(classes, N // classes.shape[1], axis=1)
    if bias is not None:
        bias = bias.astype(dtype)
        bias = _padded(bias, 2, nq * bq if bias.shape[2] > 1 else 1)
        bias = _padded(bias, 3, nk * bk if bias.shape[3] > 1 else 1)

    def of_row_block(i: Array) -> Any:
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
        lse = jax.nn.logsumexp(jnp.where(allowed, logits, -jnp.inf), axis=-1)
        p = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
        p = jnp.where(allowed, p, 0)
        blocks = p.reshape(B, N, bq, nk, bk).sum(-1)
        entropies = [jax.scipy.special.entr(x).sum(-1) for x in (blocks, p)]
        lse = jnp.moveaxis(lse, 1, 2)
        if sinks is not None:
            blocks = blocks * jnp.moveaxis(keys_share(lse, sinks), 1, 2)[..., None]
        mass = blocks.sum(2) / jnp.minimum(T - i * bq, bq)
        return joined(lse, Statistics(mass, *entropies[: 1 + (what == "tokens")]), sinks)

    found = lax.map(of_row_block, jnp.arange(nq))  # [nq, B, N, nk], [nq, B, N, bq]
    mass, *entropies = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), found)
    entropies = jax.tree.map(lambda x: x.reshape(B, N, nq * bq)[..., :T], entropies)
    return jax.tree.map(functools.partial(_nan_if_cut, mask.overflow), Statistics(mass, *entropies))


def _nan_if_cut(overflow: Array | None, x: Array) -> Array:
    """float32; NaN if the mask lacks blocks that did not fit its lists, as the output then is."""
    x = x.astype(jnp.float32)
    return x if overflow is None else jnp.where(overflow, jnp.nan, x)


def _padded(x: Array, axis: int, length: int) -> Array:
    """x with zeros up to a length of one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return x if x.shape[axis] == length else jnp.pad(x, widths)
