"""Dense attention of a few sampled queries, whose keys are split over the batch.

    queries [B, G] ─ times pieces ─┐
    keys [B, S] ─ [B · pieces, S / pieces] ─ attend ─ out, L of each piece ─ merged by logsumexp

A few queries with all keys are few work tiles, each with a long list of blocks: most
multiprocessors of a GPU would wait. Pieces of the keys make shorter lists, and more of them.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from xsake import _jax
from xsake.arguments import block_for
from xsake.backends.hopper.limits import NEEDS_JAX
from xsake.block_mask import BLOCK, MAX_CONSTANT, BlockMask
from xsake.hads.correction import attend
from xsake.masks.carrying import Between, Documents, at_queries
from xsake.masks.positional import Window
from xsake.masks.rule import Grid, Rule, Spans, combine, conjuncts

EVERY = 64  # tokens of a group, from which one query is sampled
MIN_PIECE_KEYS = 256
MAX_PIECES = 16  # each adds an output that is written and read again
MAX_TILES_PER_SM = 8  # with more work tiles than these, pieces are not divided
# Blocks of 128 keys that a work tile could visit while it begins (its record, its queries, the
# first keys) and ends (its output). Assumed, not measured.
TILE_OVERHEAD_BLOCKS = 2.0


def sample_queries(rng: Array, batch: int, length: int, every: int = EVERY) -> Int[Array, "B G"]:
    """One query of each group of `every`, uniformly and independently; the last may be short."""
    first = np.arange(0, length, every)
    sizes = np.minimum(length - first, every)
    # randint samples twice, which is two more launches, for less than one part in 2¹⁷ here
    within = jax.random.uniform(rng, (batch, len(first)), jnp.float32) * sizes[None]
    return jnp.asarray(first[None], jnp.int32) + within.astype(jnp.int32)


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
    every: int | None = None,
) -> tuple[Float[Array, "B G N Hv"], Float[Array, "B G N"]]:
    """(out, logsumexp) of the sampled queries over all keys that the rule allows, float32.

    Args:
      given: query, key, value, and sinks or None.
      sample: the queries, ascending.
      rule: of all queries.
      soft_cap: of the logits.
      pieces: of the keys; must divide S. Default: `number_of_pieces` on a Hopper GPU; 1 elsewhere,
        and for rules that are not windows or documents.
      every: the sample has one query of each group of so many, as by `sample_queries`. Then the
        blocks of windows are known before the sample is.
    """
    query, key, value, sinks = given
    queries = at_sample(query, sample)
    S = key.shape[1]
    rows = _rows(rule, (query.shape[1], S), sample, every)
    if pieces is None:
        pieces = 1
        if _splits(rule):
            pieces = number_of_pieces(rows, query.shape[0] * query.shape[2])
    if pieces == 1:
        mask = at_queries(rule, sample)
        out, logsumexp = attend(queries, key, value, mask, logits_soft_cap=soft_cap, sinks=sinks)
        return out.astype(jnp.float32), logsumexp
    key, value = (x.reshape(-1, S // pieces, *x.shape[2:]) for x in (key, value))
    limits: Any = _of_pieces(rule, sample, pieces, S)
    if every is not None:
        limits = _with_known_blocks(limits, rows, sample.shape[0], pieces)
    queries = jnp.repeat(queries, pieces, axis=0)
    out, logsumexp = attend(queries, key, value, limits, logits_soft_cap=soft_cap)
    return _joined(out, logsumexp, sinks, pieces)


class SampledRows(NamedTuple):
    """Rows of attention that are sampled queries: row i is that of query i // group."""

    rule: Rule  # of all queries
    shape: tuple[int, int]  # (T, S): all queries and all keys
    sampled: int  # queries
    every: int | None  # one query is sampled of each group of so many; None: any queries are
    block: int  # rows of a row block
    group: int = 1  # rows of one query, which see the same keys: one for each head of a group

    @property
    def row_blocks(self) -> int:
        """How many there are, the last possibly cut short."""
        return -(-self.sampled * self.group // self.block)

    def spans(self, keys: int) -> Spans | None:
        """Of the row blocks over kv blocks of `keys` keys; None if they depend on arrays.

        Each query has the spans of all `every` that it is sampled from.
        """
        if self.every is None:
            return None
        spans = self.rule.spans(Grid(self.shape, (self.every, keys)))
        if spans is None:
            return None
        begin = np.arange(0, self.sampled * self.group, self.block)
        first, last = begin // self.group, (begin + self.block - 1) // self.group

        def over_rows(reduce: np.ufunc, each: np.ndarray) -> np.ndarray:
            of_block = zip(first, last + 1, strict=True)
            return np.array([reduce.reduce(each[i:end]) for i, end in of_block])

        how = np.minimum, np.maximum, np.maximum, np.minimum
        return Spans(*map(over_rows, how, spans))


def number_of_pieces(rows: SampledRows, heads: int) -> int:
    """The power of two that is estimated to finish soonest on a Hopper GPU.

    A work tile, a row block and a piece, takes the time of the blocks that it visits and of
    TILE_OVERHEAD_BLOCKS; the longest begin first, each on the first multiprocessor that is free.

    Args:
      rows: of every head.
      heads: of all batch rows.
    """
    if _jax.why_no_hopper(NEEDS_JAX) is not None:
        return 1
    S = rows.shape[1]
    parts = -(-S // MIN_PIECE_KEYS)
    spans = rows.spans(MIN_PIECE_KEYS)
    lo, hi = (np.zeros(rows.row_blocks), np.full(rows.row_blocks, parts))
    if spans is not None:
        lo, hi = spans.live(parts)

    def finish_time(pieces: int) -> float:
        begin = np.arange(pieces)[:, None] * (parts / pieces)
        seen = np.minimum(hi, begin + parts / pieces) - np.maximum(lo, begin)
        blocks = seen[seen > 0] * (MIN_PIECE_KEYS / BLOCK)
        lengths = np.sort(blocks + TILE_OVERHEAD_BLOCKS)[::-1]
        free = [0.0] * _jax.multiprocessors()
        for length in np.repeat(lengths, heads):
            heapq.heapreplace(free, free[0] + length)
        return max(free)

    choices, tiles = [1], heads * rows.row_blocks
    while (
        (pieces := 2 * choices[-1]) <= MAX_PIECES
        and S % (pieces * MIN_PIECE_KEYS) == 0
        and tiles * choices[-1] < MAX_TILES_PER_SM * _jax.multiprocessors()
    ):
        choices.append(pieces)
    return min(choices, key=finish_time) if len(choices) > 1 else 1


def _splits(rule: Rule) -> bool:
    """Whether `_of_pieces` knows the rule."""
    return all(isinstance(x, Window | Documents) for x in conjuncts(rule))


def _of_pieces(rule: Rule, sample: Int[Array, "B G"], pieces: int, S: int) -> Rule:
    """The rule for the sampled queries, where batch row b · pieces + i has keys of piece i."""
    (B, G), size = sample.shape, S // pieces
    begin = jnp.arange(0, S, size, dtype=jnp.int32)[:, None]  # the first key of each piece

    def in_pieces(key: Array) -> Array:
        """Keys [B, G] as indices into each piece, [B · pieces, G]; those outside at its ends."""
        return jnp.clip(key.astype(jnp.int32)[:, None] - begin, 0, size).reshape(-1, G)

    def one(rule: Rule) -> Rule:
        if isinstance(rule, Documents):
            q_ids = jnp.broadcast_to(rule.q_ids, (B, rule.q_ids.shape[1]))
            kv_ids = jnp.broadcast_to(rule.kv_ids, (B, S)).reshape(B * pieces, -1)
            return Documents(jnp.repeat(at_sample(q_ids, sample), pieces, axis=0), kv_ids)
        assert isinstance(rule, Window)
        lo, hi = jnp.zeros_like(sample), jnp.full_like(sample, S)
        if rule.left is not None:
            lo = jnp.maximum(sample - rule.left, 0)
        if rule.right is not None:
            hi = sample + min(rule.right, S) + 1
        return Between(in_pieces(lo), in_pieces(hi))

    return combine(map(one, conjuncts(rule)))


def _rows(
    rule: Rule, shape: tuple[int, int], sample: Int[Array, "B G"], every: int | None
) -> SampledRows:
    """The rows of `attend_sampled`, one for each query."""
    G = sample.shape[1]
    return SampledRows(rule, shape, G, every, block_for(G))


def _with_known_blocks(
    piece_rule: Rule, rows: SampledRows, batch: int, pieces: int
) -> BlockMask | Rule:
    """The pieces' rule as a BlockMask whose lists are constants; the rule if they cannot be."""
    size = rows.shape[1] // pieces
    block = rows.block, block_for(size)
    classes = block_classes(rows, block[1], pieces)
    if classes is None or batch * pieces * classes[0].size > MAX_CONSTANT:
        return piece_rule
    shape = rows.sampled, size
    if len(classes) < pieces:  # as with one row block: lists that all of them share
        return BlockMask.from_classes(classes, piece_rule, shape, block)
    return BlockMask.from_classes(np.tile(classes, (batch, 1, 1, 1)), piece_rule, shape, block)


def block_classes(rows: SampledRows, keys: int, pieces: int) -> np.ndarray | None:
    """The classes of a sample's blocks of `keys` keys, [pieces, 1, row blocks, blocks of a piece].

    [1, …] if all pieces have the same; None if they depend on arrays.
    """
    S = rows.shape[1]
    spans = rows.spans(keys)
    if spans is None or (pieces > 1 and S % (pieces * keys)):
        return None
    live_lo, live_hi, full_lo, full_hi = (x[:, None] for x in spans)
    column = np.arange(-(-S // keys))
    live = (live_lo <= column) & (column < live_hi)
    classes = live.astype(np.int8) + (live & (full_lo <= column) & (column < full_hi))
    by_piece = np.swapaxes(classes.reshape(len(classes), pieces, -1), 0, 1)[:, None]
    return by_piece[:1] if (by_piece == by_piece[0]).all() else by_piece


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
    is_blind = total <= 0  # not if it is NaN
    safe = jnp.where(is_blind, 1, total)
    whole = (weight[..., None] * out).sum(1) / safe[..., None]
    return whole, jnp.where(is_blind, -jnp.inf, top[:, 0] + jnp.log(safe))
