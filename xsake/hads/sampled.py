"""Dense attention of a few sampled queries, whose keys are split over the batch.

    queries [B, G] ─ times pieces ─┐
    keys [B, S] ─ [B · pieces, S / pieces] ─ attend ─ out, L of each piece ─ merged by logsumexp

A few queries with all keys are few work tiles, each with a long list of blocks: most
multiprocessors of a GPU would wait. Pieces of the keys make shorter lists, and more of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from xsake import _jax
from xsake.backends.hopper.limits import NEEDS_JAX
from xsake.hads.correction import attend
from xsake.masks.carrying import Documents, at_positions, at_queries
from xsake.masks.positional import Window
from xsake.masks.rule import Rule, combine, conjuncts

EVERY = 64  # tokens of a group, from which one query is sampled
ROWS = 64  # queries of a work tile
TILES = 4  # work tiles for every multiprocessor: lists of a causal rule differ in length
LEAST = 512  # keys of a piece


def sample_queries(rng: Array, batch: int, length: int, every: int = EVERY) -> Int[Array, "B G"]:
    """One query of each group of `every`, uniformly and independently; the last may be short."""
    first = np.arange(0, length, every)
    sizes = np.minimum(length - first, every)
    within = jax.random.randint(rng, (batch, len(first)), 0, sizes[None])
    return jnp.asarray(first[None], jnp.int32) + within


def at_sample(
    x: Shaped[Array, "B T *rest"], sample: Int[Array, "B G"]
) -> Shaped[Array, "B G *rest"]:
    """What the sampled queries have of x."""
    return jnp.take_along_axis(x, sample.reshape(*sample.shape, *(1,) * (x.ndim - 2)), axis=1)


def attend_sampled(
    given: tuple[Array, Array, Array, Array | None],
    sample: Int[Array, "B G"],
    rule: Rule,
    soft_cap: float | None,
    pieces: int | None = None,
) -> tuple[Float[Array, "B G N Hv"], Float[Array, "B G N"]]:
    """(out, logsumexp) of the sampled queries over all keys that the rule allows, float32.

    Args:
      given: query, key, value, and sinks or None.
      sample: the queries, ascending.
      rule: of all queries.
      soft_cap: of the logits.
      pieces: of the keys; must divide S. Default: what keeps a Hopper GPU busy; 1 elsewhere,
        and for rules that are not windows or documents.
    """
    query, key, value, sinks = given
    queries = at_sample(query, sample)
    S = key.shape[1]
    if pieces is None:
        pieces = _pieces(queries.shape, S) if _splits(rule) else 1
    if pieces == 1:
        mask = at_queries(rule, sample)
        out, logsumexp = attend(queries, key, value, mask, logits_soft_cap=soft_cap, sinks=sinks)
        return out.astype(jnp.float32), logsumexp
    key, value = (x.reshape(-1, S // pieces, *x.shape[2:]) for x in (key, value))
    mask = _of_pieces(rule, sample, pieces, S)
    queries = jnp.repeat(queries, pieces, axis=0)
    out, logsumexp = attend(queries, key, value, mask, logits_soft_cap=soft_cap)
    return _joined(out, logsumexp, sinks, pieces)


def _pieces(shape: tuple[int, ...], S: int) -> int:
    """The power of two that gives every multiprocessor of a Hopper GPU some work tiles."""
    if _jax.why_no_hopper(NEEDS_JAX) is not None:
        return 1
    B, G, N, _ = shape
    tiles, pieces = B * N * -(-G // ROWS), 1
    while tiles * pieces < TILES * _jax.multiprocessors() and S % (2 * pieces * LEAST) == 0:
        pieces *= 2
    return pieces


def _splits(rule: Rule) -> bool:
    """Whether `_of_pieces` knows the rule."""
    return all(isinstance(x, Window | Documents) for x in conjuncts(rule))


def _of_pieces(rule: Rule, sample: Int[Array, "B G"], pieces: int, S: int) -> Rule:
    """The rule for the sampled queries, where batch row b · pieces + i has keys of piece i."""
    B = sample.shape[0]

    def one(rule: Rule) -> Rule:
        if isinstance(rule, Documents):
            q_ids = jnp.broadcast_to(rule.q_ids, (B, rule.q_ids.shape[1]))
            kv_ids = jnp.broadcast_to(rule.kv_ids, (B, S)).reshape(B * pieces, -1)
            return Documents(jnp.repeat(at_sample(q_ids, sample), pieces, axis=0), kv_ids)
        keys = jnp.tile(jnp.arange(S, dtype=jnp.int32).reshape(pieces, -1), (B, 1))
        return at_positions(rule, jnp.repeat(sample, pieces, axis=0), keys)

    return combine(map(one, conjuncts(rule)))


def _joined(
    out: Float[Array, "BP G N Hv"],
    logsumexp: Float[Array, "BP G N"],
    sinks: Float[Array, " N"] | None,
    pieces: int,
) -> tuple[Float[Array, "B G N Hv"], Float[Array, "B G N"]]:
    """(out, logsumexp of logits and sinks) of whole rows, from those of their pieces.

    As `backends.merged` does of two, but over an axis of pieces, and with sinks.
    """
    out = out.astype(jnp.float32).reshape(-1, pieces, *out.shape[1:])
    logs = logsumexp.reshape(-1, pieces, *logsumexp.shape[1:])
    if sinks is not None:  # one more piece, whose value is 0
        sink = jnp.broadcast_to(sinks.astype(jnp.float32), (logs.shape[0], 1, *logs.shape[2:]))
        logs = jnp.concatenate([logs, sink], 1)
        out = jnp.concatenate([out, jnp.zeros_like(out[:, :1])], 1)
    top = lax.stop_gradient(logs.max(1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    weight = jnp.exp(logs - top)
    total = weight.sum(1)
    seen = total > 0
    safe = jnp.where(seen, total, 1)
    whole = (weight[..., None] * out).sum(1) / safe[..., None]
    return whole, jnp.where(seen, top[:, 0] + jnp.log(safe), -jnp.inf)
