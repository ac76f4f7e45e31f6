"""One flat list of visits for all heads: the grid of a kernel has exactly as many steps.

    lists of two heads                     work tile   0   1   1   2   3   3   3
    head 0  ◪          head 1  .           kv block    0   0   1   –   0   1   2
            ■ ◪                ■ ■ ◪       kind        ◪   ■   ◪   –   ■   ■   ◪

A work tile is a row block of one query head, or, by the transposed lists, a kv block of one kv
head, which visits the row blocks of all its query heads. Heads with short lists take few steps: no
list is padded. A work tile without visits has one step, which writes its empty result.

The list lies in scalar memory, so that the index maps of the pipeline can read it ahead. A visit is
one int32: list number, the listed block, `last`, `first`, and two bits of its kind. Calls with more
visits than fit there run as several launches, each with some of the kv heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, list_index
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import rows_of_entries, starts_of

EMPTY, PARTIAL, FULL = range(3)
# Visits of one launch: 512 KiB, half of the scalar memory of a TPU core.
MOST_VISITS = 1 << 17
FIRST, LAST, BLOCK_AT = 2, 3, 4  # bits


class Visit(NamedTuple):
    """One step of a kernel: scalars."""

    x: Any  # kv head, over all batch rows
    local: Any  # the same among the kv heads of this launch
    g: Any  # query head among those of the kv head
    i: Any  # row block
    j: Any  # kv block
    kind: Any
    is_first: Any  # of its work tile
    is_last: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the visits of a call are numbered. `by_column`: work tiles are kv blocks."""

    sizes: Sizes
    row_blocks: int
    kv_blocks: int
    capacity: int  # M of the lists
    by_column: bool

    @classmethod
    def of(cls, mask: BlockMask, sizes: Sizes, by_column: bool) -> Layout:
        """The layout for a mask, given by rows also where `by_column`."""
        return cls(sizes, *mask.grid.counts, mask.kv_index.shape[-1], by_column)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.sizes.N // self.sizes.K

    @property
    def _own(self) -> int:
        return self.kv_blocks if self.by_column else self.row_blocks

    @property
    def _block_bits(self) -> int:
        listed = self.row_blocks if self.by_column else self.kv_blocks
        return (listed - 1).bit_length()

    @property
    def per_head(self) -> int:
        """The most visits of one kv head: all that its lists hold, and one for each empty tile."""
        return self.group * (self.capacity + self._own)

    @property
    def heads(self) -> int:
        """Kv heads of one launch, over all batch rows."""
        total = self.sizes.B * self.sizes.K
        fit = [n for n in range(1, total + 1) if total % n == 0 and self.holds(n)]
        return max(fit)

    def holds(self, heads: int) -> bool:
        """Whether one launch has space for the visits of so many kv heads."""
        lists = heads * self.group * self._own
        bits = (lists - 1).bit_length() + self._block_bits + BLOCK_AT
        return heads * self.per_head <= MOST_VISITS and bits <= 31

    def at(self, table: Any, base: Any, t: Any) -> Visit:
        """Visit t of a launch whose first kv head is base[0]."""
        word = table[t]
        block = (word >> BLOCK_AT) & ((1 << self._block_bits) - 1)
        number = word >> (BLOCK_AT + self._block_bits)
        if self.by_column:  # lists lie as [heads, kv blocks, group]
            rest, g = divided(number, self.group)
            (local, j), i = divided(rest, self.kv_blocks), block
        else:  # [heads, group, row blocks]
            rest, i = divided(number, self.row_blocks)
            (local, g), j = divided(rest, self.group), block
        flags = (word >> FIRST) & 1 == 1, (word >> LAST) & 1 == 1
        return Visit(base[0] + local, local, g, i, j, word & 3, *flags)


def divided(number: Any, by: int) -> tuple[Any, Any]:
    """(quotient, remainder) of numbers that are not negative: plain instructions of a kernel."""
    if by == 1:
        return number, jnp.zeros_like(number)
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


class Visits(NamedTuple):
    """The visits of every launch."""

    table: Array  # int32 [launches, heads · per_head]; the tail is never read
    total: Array  # int32 [launches]
    base: Array  # int32 [launches, 1]: the first kv head


def visits_of(mask: BlockMask, layout: Layout, has_partial: bool) -> Visits:
    """The flat list of a mask with packed lists, transposed where `by_column`.

    has_partial: whether partial blocks differ from full ones at all.
    """
    sizes, group = layout.sizes, layout.group
    x = jnp.arange(sizes.B * sizes.K, dtype=jnp.int32)[:, None]
    n = x % sizes.K * group + jnp.arange(group, dtype=jnp.int32)[None]
    which = list_index(mask, sizes, x // sizes.K, n)  # [B · K, group]
    own = mask.kv_count.shape[-1]

    def of_lists(values: Array) -> Array:
        """[Bm, Nm, own] as [launches, lists of a launch]."""
        found = values.reshape(-1, own)[which]
        found = found.swapaxes(1, 2) if layout.by_column else found
        return found.reshape(len(x) // layout.heads, -1)

    count, full = of_lists(mask.kv_count), of_lists(mask.full_count)
    offsets = jnp.arange(mask.kv_count.size // own, dtype=jnp.int32) * layout.capacity
    begin = of_lists(mask.kv_start.reshape(-1, own) + offsets[:, None])
    # The first list of a work tile without visits has a step.
    lists_of_tile = group if layout.by_column else 1
    steps = count.reshape(len(count), -1, lists_of_tile)
    steps = steps.at[..., 0].add(steps.sum(-1) == 0).reshape(count.shape)
    start = starts_of(steps)
    total = start[:, -1] + steps[:, -1]
    t = jnp.arange(layout.heads * layout.per_head, dtype=jnp.int32)

    def one(steps: Array, start: Array, count: Array, full: Array, begin: Array) -> Array:
        number = rows_of_entries(start, len(t))
        rank = t - start[number]
        block = mask.kv_index.reshape(-1).at[begin[number] + rank].get(mode="clip")
        is_full = (rank < full[number]) | (not has_partial)
        is_live = rank < count[number]
        kind = jnp.where(is_live, jnp.where(is_full, FULL, PARTIAL), EMPTY)
        tile = number // lists_of_tile
        is_first = jnp.concatenate([jnp.ones(1, bool), tile[1:] != tile[:-1]])
        end = start[-1] + steps[-1] - 1
        is_last = jnp.concatenate([tile[1:] != tile[:-1], jnp.ones(1, bool)]) | (t == end)
        number = number << layout._block_bits | jnp.where(is_live, block, 0)
        return number << BLOCK_AT | is_last << LAST | is_first << FIRST | kind

    tables = [one(*launch) for launch in zip(steps, start, count, full, begin, strict=True)]
    base = jnp.arange(len(tables), dtype=jnp.int32)[:, None] * layout.heads
    return Visits(jnp.stack(tables).astype(jnp.int32), total.astype(jnp.int32), base)
