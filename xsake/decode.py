"""One or a few new queries of every row against its cached keys: all of them, or chosen blocks.

    dense   out = softmax(scale · q kᵀ) v over the keys that a query may see
    sparse  the same over the blocks that its head chose, which are all that is read:

        mass [B, L, blocks] ─ choose ─ one flat list of (head, block), as long as all budgets:
        ┌ head 0 ┬── head 1 ──┬ head 2 ┐
        │ 0  5 7 │ 0 2 3 6 7  │ 0  7   │   each entry: one block of keys and values, gathered
        └────────┴────────────┴────────┘   softmax over a head's entries together

Key slot s of a row holds the token at position s. A query at position p sees slots s ≤ p, with a
window w only s > p - w. L is N where every query head chooses for itself, or K where the query
heads of a kv head choose together and read together. What is not seen may hold anything, NaN too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Chosen(NamedTuple):
    """Blocks to visit, flat: head after head, best first; entries that are not live are padding."""

    head: Array  # int32 [B, E]  which of the L lists
    block: Array  # int32 [B, E]
    live: Array  # bool [B, E]


def dense(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    layer: Any,
    span: int,
    window: int | None = None,
    scale: float | None = None,
) -> Array:
    """Attention to the first `span` slots of one layer's cache, as far as each query may see.

    Args:
      q: [B, T, N, H].
      k: [layers, B, K, S, H], the cache of all layers: a slice of it would be a copy.
      v: like k.
      positions: int [B, T] of the queries; all below span.
      layer: which layer; may be traced.
      span: slots to read, static.
      window: a query sees itself and window - 1 keys before it.
      scale: default 1/sqrt(H).

    Returns:
      [B, T, N, H] in q's dtype.
    """
    s, seen = _logits(q, k, positions, layer, span, window, scale)
    values = lax.dynamic_slice(v, (layer, 0, 0, 0, 0), (1, *v.shape[1:3], span, v.shape[4]))[0]
    p = jnp.where(seen, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    l = p.sum(-1, keepdims=True)
    values = jnp.where(seen.any((1, 2, 3))[:, None, :, None], values, 0)  # 0 · NaN is NaN
    out = jnp.einsum(
        "bkgts,bksh->bkgth", p.astype(v.dtype), values, preferred_element_type=jnp.float32
    )
    return _ungrouped(out / jnp.where(l == 0, 1, l), q)


def sparse(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    chosen: Chosen,
    *,
    layer: Any,
    lists: int,
    block: int,
    window: int | None = None,
    scale: float | None = None,
) -> Array:
    """Attention to the chosen blocks: E blocks of keys and values are read, and nothing else.

    Args:
      q: [B, T, N, H].
      k: [layers, B, K, S, H]; S is a multiple of block.
      v: like k.
      positions: int [B, T] of the queries.
      chosen: of `choose`.
      layer: which layer; may be traced.
      lists: L, N or K.
      block: tokens per block.
      window: as in `dense`.
      scale: default 1/sqrt(H).
    """
    B = q.shape[0]
    K, S, H = k.shape[2:]
    L = lists
    row = jnp.arange(B)[:, None]
    place = (layer, row, chosen.head * K // L, chosen.block)
    keys, values = (
        x.reshape(*x.shape[:3], S // block, block, H)[place] for x in (k, v)
    )  # [B, E, block, H]
    slots = chosen.block[..., None] * block + jnp.arange(block)  # [B, E, block]
    seen = sees(positions[:, None, None, :], slots[:, :, None, None, :], window)
    seen = seen & chosen.live[:, :, None, None, None]  # [B, E, 1, T, block]
    queries = _grouped(q, L, scale)[row, chosen.head]  # [B, E, G, T, H]
    s = jnp.einsum("begth,besh->begts", queries, keys, preferred_element_type=jnp.float32)
    s = jnp.where(seen, s, -jnp.inf)

    # a head's entries share one maximum, one sum and one output
    mine = (chosen.head[..., None] == jnp.arange(L)) & chosen.live[..., None]  # [B, E, L]
    m = jnp.where(mine[..., None, None], s.max(-1)[:, :, None], -jnp.inf).max(1)  # [B, L, G, T]
    p = jnp.where(seen, jnp.exp(s - m[row, chosen.head][..., None]), 0)
    values = jnp.where(seen.any((2, 3))[..., None], values, 0)
    out = jnp.einsum(
        "begts,besh->begth", p.astype(v.dtype), values, preferred_element_type=jnp.float32
    )
    share = mine.astype(jnp.float32)
    l = jnp.einsum("bel,begt->blgt", share, p.sum(-1))[..., None]
    out = jnp.einsum("bel,begth->blgth", share, out)
    return _ungrouped(out / jnp.where(l == 0, 1, l), q)


def choose(
    scores: Array,
    positions: Array,
    counts: Array,
    *,
    block: int,
    entries: int,
    reach: int = 1,
    window: int | None = None,
) -> Chosen:
    """The counts[b, l] best blocks of every list: the first and the queries' own come before all.

    A list has no more blocks than its queries can see, and no fewer than those that are forced.
    With `reach` the same lists serve the next reach - 1 tokens too: their blocks are forced.

    Args:
      scores: float [B, L, blocks]; larger is better.
      positions: int [B, T] of the queries.
      counts: int [B, L], blocks to visit.
      block: tokens per block.
      entries: E, static: at least Σ counts over the lists of a row, forced ones included.
      reach: tokens that the lists are for, from each row's last query on.
      window: as in `dense`; blocks outside it are not there to be chosen.
    """
    B, L, blocks = scores.shape
    j = jnp.arange(blocks)
    own, last = (x[:, None] // block for x in (positions.min(1), positions.max(1) + reach - 1))
    oldest = (
        0 if window is None else jnp.maximum(positions.min(1)[:, None] - window + 1, 0) // block
    )
    visible = (j >= oldest) & (j <= last)  # [B, blocks]
    forced = visible & ((j == 0) | (j >= own))
    ranked = jnp.where(visible[:, None], scores, -jnp.inf)
    ranked = jnp.where(forced[:, None], jnp.inf, ranked)
    order = jnp.argsort(-ranked, axis=-1, stable=True)
    counts = jnp.clip(counts, *(x.sum(-1, dtype=jnp.int32)[:, None] for x in (forced, visible)))
    ends = jnp.cumsum(counts, axis=-1)
    entry = jnp.arange(entries, dtype=jnp.int32)
    head = (entry[:, None] >= ends[:, None, :]).sum(-1, dtype=jnp.int32)  # [B, E]; L past the end
    live = head < L
    head = jnp.minimum(head, L - 1)
    row = jnp.arange(B)[:, None]
    rank = entry - (ends - counts)[row, head]
    return Chosen(head, order[row, head, jnp.minimum(rank, blocks - 1)], live)


def block_mass(
    q: Array,
    k: Array,
    positions: Array,
    *,
    layer: Any,
    span: int,
    lists: int,
    block: int,
    window: int | None = None,
    scale: float | None = None,
) -> Array:
    """The attention that each list's queries give to every block, float32 [B, L, blocks].

    Exact, from all keys of the span but none of the values; summed over the list's query heads and
    the T queries. Arguments as in `dense`; lists is L, N or K.
    """
    B, T, N, _ = q.shape
    s, seen = _logits(q, k, positions, layer, span, window, scale)
    p = jnp.where(seen, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    p = p / p.sum(-1, keepdims=True)
    by_block = p.reshape(*p.shape[:-1], span // block, block).sum((3, 5))  # [B, K, G, blocks]
    return by_block.reshape(B, lists, N // lists, -1).sum(2)


def _logits(
    q: Array, k: Array, positions: Array, layer: Any, span: int, window: Any, scale: Any
) -> tuple[Array, Array]:
    """(scale · q kᵀ [B, K, G, T, span], -inf where not seen; what is seen [B, 1, 1, T, span])."""
    B, K, H = q.shape[0], k.shape[2], k.shape[4]
    keys = lax.dynamic_slice(k, (layer, 0, 0, 0, 0), (1, B, K, span, H))[0]
    seen = sees(positions[:, None, None, :], jnp.arange(span), window)
    queries = _grouped(q, K, scale)
    s = jnp.einsum("bkgth,bksh->bkgts", queries, keys, preferred_element_type=jnp.float32)
    return jnp.where(seen, s, -jnp.inf), seen


def sees(position: Array, slot: Array, window: int | None) -> Array:
    """Whether a query sees a slot: position [B, 1, 1, T] against slots that broadcast behind it."""
    position = position[..., None]
    seen = slot <= position
    return seen if window is None else seen & (slot > position - window)


def _grouped(q: Array, groups: int, scale: float | None) -> Array:
    """[B, T, N, H] -> [B, groups, N / groups, T, H], scaled in float32."""
    B, T, N, H = q.shape
    q = (q.astype(jnp.float32) * (1 / math.sqrt(H) if scale is None else scale)).astype(q.dtype)
    return jnp.moveaxis(q.reshape(B, T, groups, N // groups, H), 1, 3)


def _ungrouped(out: Array, q: Array) -> Array:
    return jnp.moveaxis(out, 3, 1).reshape(*q.shape[:-1], out.shape[-1]).astype(q.dtype)
