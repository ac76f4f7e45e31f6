"""Decode: one or a few new queries of every sequence against its KV cache, whole or by blocks.

    CacheReader.read ─┬─ no budget: dense    softmax(scale · q kᵀ) v over the visible keys
                      └─ budget:    sparse   the same over the blocks that each head selected

    q, k ─ attention_by_block [B, L, blocks] ─ choose ─ one flat list of (head, block):
        ┌ head 0 ┬── head 1 ──┬ head 2 ┐
        │ 0  5 7 │ 0 2 3 6 7  │ 0  7   │   as long as the budgets of all heads together;
        └────────┴────────────┴────────┘   only these blocks of keys and values are gathered

Key slot s of a sequence holds the token at position s. A query at position p sees slots s ≤ p, with
a window w only s > p - w. L is N where every query head selects its own blocks, or K where the
query heads of a kv head share one selection. Slots that no query sees may hold anything, NaN too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.masks.rule import Leaf
from xsake.selection import FORCED_BLOCKS, is_forced

REFRESH = 2  # decode steps per selection of blocks


class Chosen(NamedTuple):
    """Selected blocks, flat: head after head, best first. Entries that are not live are padding.

    The arrays of all layers have a leading axis of layers.
    """

    head: Int[Array, "*layers B E"]  # which of the L heads
    block: Int[Array, "*layers B E"]
    live: Bool[Array, "*layers B E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CacheReader:
    """How new tokens read the cache: all of it, or a budget of blocks for every head.

    A pytree whose only array is the budget. `of` checks the budget; `over(span)` limits reads to
    the first `span` slots and to `queries` new tokens at a time, static sizes.
    """

    # [layers, L]: int32 blocks, or float32 fractions of the blocks so far; None: the whole cache
    budget: Leaf
    block: int = dataclasses.field(metadata={"static": True})  # tokens per block
    refresh: int = dataclasses.field(metadata={"static": True})  # decode steps per selection
    span: int = dataclasses.field(default=0, metadata={"static": True})  # slots that are read
    # E: selected blocks of one sequence, summed over heads; the maximum over layers
    entries: int = dataclasses.field(default=0, metadata={"static": True})
    # T: new tokens of a read at most, whose own blocks the entries have capacity for
    queries: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def of(
        cls,
        budget: Any,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        block: int,
        refresh: int = REFRESH,
    ) -> CacheReader:
        """A reader with a checked budget.

        Args:
          budget: how much of the cache each head reads per token; None reads all of it. Integers
            are blocks, fractions a share of the blocks so far, rounded up. Shape [], [heads] or
            [layers, heads]. heads may be N or K; with K, the query heads of a kv head share one
            selection. The first block and the current one are always read.
          layers: of the model.
          heads: N.
          kv_heads: K.
          block: tokens per block of the cache.
          refresh: blocks are reselected every `refresh` tokens.
        """
        if budget is not None:
            budget = _checked_budget(budget, layers, heads, kv_heads)
        return cls(budget, block, refresh)

    def over(self, span: int, queries: int = 1) -> CacheReader:
        """This reader for the first `span` slots of the cache; called outside jit.

        Each head's list has space for the blocks of `queries` consecutive new tokens, which are
        always read, even if they are more than its budget.
        """
        if self.budget is None:
            return dataclasses.replace(self, span=span, queries=queries)
        blocks = span // self.block
        # A selection is reused for `refresh` tokens, so it also contains the blocks that those
        # tokens will be written to.
        forced = FORCED_BLOCKS + -(-(queries - 1 + self.refresh - 1) // self.block)
        wanted = self.budget
        if np.issubdtype(wanted.dtype, np.floating):
            wanted = np.ceil(wanted * blocks)
        entries = int(np.clip(wanted, forced, max(forced, blocks)).sum(1).max())
        return dataclasses.replace(self, span=span, entries=entries, queries=queries)

    def nothing_chosen(self, batch: int) -> Chosen | None:
        """Empty selections of all layers, before the first step; None without a budget."""
        if self.budget is None:
            return None
        size = (len(self.budget), batch, self.entries)
        number = jnp.zeros(size, jnp.int32)
        return Chosen(number, number, jnp.zeros(size, bool))

    def read(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "layers B K S H"],
        v: Float[Array, "layers B K S H"],
        positions: Int[Array, "B T"],
        chosen: Chosen | None,
        *,
        layer: Any,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        reselect: bool = True,
    ) -> tuple[Float[Array, "B T N H"], Chosen | None]:
        """Attention of the new queries to one layer's cache, and the selection that it used.

        Args:
          q: the new queries, whose keys and values are in the cache already; with a budget, T is
            at most `queries`.
          k: the cache of all layers.
          v: like k.
          positions: of the queries, consecutive; all below span.
          chosen: the selections of all layers; None without a budget.
          layer: which layer; may be traced.
          window: a query sees itself and window - 1 keys before it.
          soft_cap: of the logits: cap · tanh(logits / cap).
          sinks: a logit for each query head that joins the softmax's denominator.
          reselect: select blocks by these queries' attention; else read those in `chosen`.
        """
        how: Any = {"layer": layer, "window": window, "soft_cap": soft_cap}
        if chosen is None:
            return dense(q, k, v, positions, span=self.span, sinks=sinks, **how), None
        if q.shape[1] > self.queries:
            raise ValueError(
                f"q has {q.shape[1]} queries, but the lists of selected blocks have space for "
                f"{self.queries}; write reader.over(span, queries={q.shape[1]})"
            )
        if reselect:
            here = self._choose(q, k, positions, **how)
            chosen = jax.tree.map(lambda every, new: every.at[layer].set(new), chosen, here)
        else:
            here = jax.tree.map(lambda every: every[layer], chosen)
        out = sparse(
            q,
            k,
            v,
            positions,
            here,
            lists=self.budget.shape[1],
            block=self.block,
            sinks=sinks,
            **how,
        )
        return out, chosen

    def _choose(
        self,
        q: Array,
        k: Array,
        positions: Array,
        layer: Any,
        window: int | None,
        soft_cap: float | None,
    ) -> Chosen:
        scores = attention_by_block(
            q,
            k,
            positions,
            layer=layer,
            span=self.span,
            lists=self.budget.shape[1],
            block=self.block,
            window=window,
            soft_cap=soft_cap,
        )
        wanted = jnp.asarray(self.budget)[layer][None]
        if jnp.issubdtype(wanted.dtype, jnp.floating):
            wanted = jnp.ceil(wanted * (positions.max(1)[:, None] // self.block + 1))
        return choose(
            scores,
            positions,
            jnp.broadcast_to(wanted, scores.shape[:2]).astype(jnp.int32),
            block=self.block,
            entries=self.entries,
            reach=self.refresh,
            window=window,
        )


def _checked_budget(budget: Any, layers: int, heads: int, kv_heads: int) -> np.ndarray:
    """The budget as [layers, L], L = heads or kv_heads."""
    given = np.asarray(budget)
    if given.dtype == bool or not np.issubdtype(given.dtype, np.number):
        raise TypeError(f"budget must be numbers, got {given.dtype}")
    wide = given if given.ndim else np.full(heads, given)
    wide = np.broadcast_to(wide, (layers, wide.shape[-1])) if wide.ndim == 1 else wide
    if wide.shape not in ((layers, heads), (layers, kv_heads)):
        raise ValueError(
            f"budget must be one number, [heads] or [layers, heads] with layers = {layers} "
            f"and heads = {heads} or {kv_heads}, got shape {list(given.shape)}"
        )
    if np.issubdtype(wide.dtype, np.floating):
        if not ((wide > 0) & (wide <= 1)).all():
            raise ValueError(
                "a budget of fractions must be above 0 and at most 1, "
                f"got {wide.min()} to {wide.max()}; whole numbers count blocks"
            )
        return wide.astype(np.float32)
    if wide.min() < FORCED_BLOCKS:
        raise ValueError(
            f"a budget of {wide.min()} blocks is below {FORCED_BLOCKS}: "
            "the first and the current block are always read"
        )
    return wide.astype(np.int32)


def dense(
    q: Float[Array, "B T N H"],
    k: Float[Array, "layers B K S H"],
    v: Float[Array, "layers B K S H"],
    positions: Int[Array, "B T"],
    *,
    layer: Any,
    span: int,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention to the visible keys among the first `span` slots of one layer's cache.

    Args:
      q: [B, T, N, H].
      k: [layers, B, K, S, H], the cache of all layers, because a slice of it would be a copy.
      v: like k.
      positions: int [B, T] of the queries; all below span.
      layer: which layer; may be traced.
      span: slots to read, static.
      window: a query sees itself and window - 1 keys before it.
      scale: default 1/sqrt(H).
      soft_cap: cap · tanh(logits / cap).
      sinks: logits of the query heads that join the softmax's denominator.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    s, seen = _logits(q, k, positions, layer, span, window, scale, soft_cap)
    values = lax.dynamic_slice(v, (layer, 0, 0, 0, 0), (1, *v.shape[1:3], span, v.shape[4]))[0]
    m = s.max(-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(k.shape[2], -1, 1, 1)  # [K, G, 1, 1]
        m = jnp.maximum(m, sinks)
    p = jnp.where(seen, jnp.exp(s - m), 0)
    l = p.sum(-1, keepdims=True)
    l = l if sinks is None else l + jnp.exp(sinks - m)
    values = jnp.where(seen.any((1, 2, 3))[:, None, :, None], values, 0)  # 0 · NaN is NaN
    out = jnp.einsum(
        "bkgts,bksh->bkgth", p.astype(v.dtype), values, preferred_element_type=jnp.float32
    )
    return _ungrouped(out / jnp.where(l == 0, 1, l), q)


def sparse(
    q: Float[Array, "B T N H"],
    k: Float[Array, "layers B K S H"],
    v: Float[Array, "layers B K S H"],
    positions: Int[Array, "B T"],
    chosen: Chosen,
    *,
    layer: Any,
    lists: int,
    block: int,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention to the chosen blocks: E blocks of keys and values are read, and nothing else.

    Args:
      q: [B, T, N, H].
      k: [layers, B, K, S, H]; S is a multiple of block.
      v: like k.
      positions: int [B, T] of the queries.
      chosen: this layer's selection, from `choose`.
      layer: which layer; may be traced.
      lists: L, the number of selections per sequence: N or K.
      block: tokens per block.
      window: as in `dense`.
      scale: default 1/sqrt(H).
      soft_cap: as in `dense`.
      sinks: as in `dense`.
    """
    B = q.shape[0]
    K, S, H = k.shape[2:]
    L = lists
    row = jnp.arange(B)[:, None]
    index = (layer, row, chosen.head * K // L, chosen.block)
    keys, values = (
        x.reshape(*x.shape[:3], S // block, block, H)[index] for x in (k, v)
    )  # [B, E, block, H]
    slots = chosen.block[..., None] * block + jnp.arange(block)  # [B, E, block]
    seen = sees(positions[:, None, None, :], slots[:, :, None, None, :], window)
    seen = seen & chosen.live[:, :, None, None, None]  # [B, E, 1, T, block]
    queries = _grouped(q, L, scale)[row, chosen.head]  # [B, E, G, T, H]
    s = jnp.einsum("begth,besh->begts", queries, keys, preferred_element_type=jnp.float32)
    s = jnp.where(seen, _capped(s, soft_cap), -jnp.inf)

    # a head's entries share one maximum, one sum and one output
    mine = (chosen.head[..., None] == jnp.arange(L)) & chosen.live[..., None]  # [B, E, L]
    m = jnp.where(mine[..., None, None], s.max(-1)[:, :, None], -jnp.inf).max(1)  # [B, L, G, T]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(L, -1, 1)  # [L, G, 1]
        m = jnp.maximum(m, sinks)
    p = jnp.where(seen, jnp.exp(s - m[row, chosen.head][..., None]), 0)
    values = jnp.where(seen.any((2, 3))[..., None], values, 0)
    out = jnp.einsum(
        "begts,besh->begth", p.astype(v.dtype), values, preferred_element_type=jnp.float32
    )
    share = mine.astype(jnp.float32)
    l = jnp.einsum("bel,begt->blgt", share, p.sum(-1))[..., None]
    l = l if sinks is None else l + jnp.exp(sinks - m)[..., None]
    out = jnp.einsum("bel,begth->blgth", share, out)
    return _ungrouped(out / jnp.where(l == 0, 1, l), q)


def choose(
    scores: Float[Array, "B L blocks"],
    positions: Int[Array, "B T"],
    counts: Int[Array, "B L"],
    *,
    block: int,
    entries: int,
    reach: int = 1,
    window: int | None = None,
) -> Chosen:
    """The counts[b, l] best blocks for each of the L selections, forced ones included.

    The first block and the blocks of the queries are forced, and so are the blocks of the next
    reach - 1 tokens, which reuse the selection. No selection contains a block that none of these
    tokens can see.

    Args:
      scores: float [B, L, blocks]; larger is better.
      positions: int [B, T] of the queries.
      counts: int [B, L], blocks to select.
      block: tokens per block.
      entries: E, static: at least Σ counts over a sequence's selections, forced ones included.
      reach: number of decode steps that use this selection, this one included.
      window: as in `dense`; blocks outside it are not selected.
    """
    B, L, blocks = scores.shape
    j = jnp.arange(blocks)
    own, last = (x[:, None] // block for x in (positions.min(1), positions.max(1) + reach - 1))
    oldest = (
        0 if window is None else jnp.maximum(positions.min(1)[:, None] - window + 1, 0) // block
    )
    visible = (j >= oldest) & (j <= last)  # [B, blocks]
    forced = visible & (is_forced(own, j) | (j > own))
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


def attention_by_block(
    q: Float[Array, "B T N H"],
    k: Float[Array, "layers B K S H"],
    positions: Int[Array, "B T"],
    *,
    layer: Any,
    span: int,
    lists: int,
    block: int,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B L blocks"]:
    """Attention mass of every block, for each of the L selections, float32 [B, L, blocks].

    It is exact: it reads all keys of the span but no values. It is summed over the T queries and
    over the query heads that share a selection. Arguments are as in `dense` and `sparse`.
    """
    B, T, N, _ = q.shape
    s, seen = _logits(q, k, positions, layer, span, window, scale, soft_cap)
    p = jnp.where(seen, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    p = p / p.sum(-1, keepdims=True)
    by_block = p.reshape(*p.shape[:-1], span // block, block).sum((3, 5))  # [B, K, G, blocks]
    return by_block.reshape(B, lists, N // lists, -1).sum(2)


def _logits(
    q: Array, k: Array, positions: Array, layer: Any, span: int, window: Any, scale: Any, cap: Any
) -> tuple[Array, Array]:
    """(logits, -inf where not visible, [B, K, G, T, span]; is_visible [B, 1, 1, T, span])."""
    B, K, H = q.shape[0], k.shape[2], k.shape[4]
    keys = lax.dynamic_slice(k, (layer, 0, 0, 0, 0), (1, B, K, span, H))[0]
    seen = sees(positions[:, None, None, :], jnp.arange(span), window)
    queries = _grouped(q, K, scale)
    s = jnp.einsum("bkgth,bksh->bkgts", queries, keys, preferred_element_type=jnp.float32)
    return jnp.where(seen, _capped(s, cap), -jnp.inf), seen


def _capped(s: Array, cap: float | None) -> Array:
    return s if cap is None else cap * jnp.tanh(s / cap)


def sees(position: Array, slot: Array, window: int | None) -> Array:
    """Whether a query sees a slot; position gets a trailing axis that broadcasts against slot."""
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
