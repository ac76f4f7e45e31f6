"""One flat list of visits for all heads: the grid of a kernel has exactly as many steps.

    lists of two heads                     work tile   0   1   1   2   3   3   3
    head 0  ◪          head 1  .           kv block    0   0   1   –   0   1   2
            ■ ◪                ■ ■ ◪       kind        ◪   ■   ◪   –   ■   ■   ◪

A work tile is a row block of one query head, or, by the transposed lists, a kv block of one kv
head, which visits the row blocks of all its query heads. Heads with short lists take few steps: no
list is padded. A work tile without visits has one step, which writes its empty result.

The list lies in scalar memory, so that the index maps of the pipeline can read it ahead. A visit is
one int32: list number, the listed block, `last`, `first`, and two bits of its kind. If these are
more than 31 bits, the list number has an int32 of its own. Calls with more visits than fit run as
several launches of whole work tiles:

    steps     0 …            stride …          2 · stride …           a work tile belongs to the
    launch    └──── 0 ────┘└──── 1 ────┘└──── 2 ────┘                 launch of its first step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, list_index
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import starts_of

# A partial block is decided by an interval of keys for each query where the mask has intervals;
# BY_RULE is one of a batch row whose ids or positions are out of order.
EMPTY, PARTIAL, FULL, BY_RULE = range(4)
# Int32 of one launch: 512 KiB, half of the scalar memory of a TPU core.
MOST_WORDS = 1 << 17
FIRST, LAST, BLOCK_AT = 2, 3, 4  # bits


class Visit(NamedTuple):
    """One step of a kernel: scalars."""

    x: Any  # kv head, over all batch rows
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
    def heads(self) -> int:
        """Kv heads, over all batch rows."""
        return self.sizes.B * self.sizes.K

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.sizes.N // self.sizes.K

    @property
    def lists_of_tile(self) -> int:
        """Lists that one work tile visits."""
        return self.group if self.by_column else 1

    @property
    def _own(self) -> int:
        return self.kv_blocks if self.by_column else self.row_blocks

    @property
    def _listed(self) -> int:
        return self.row_blocks if self.by_column else self.kv_blocks

    @property
    def most_steps(self) -> int:
        """All that the lists hold, and one for each empty tile."""
        return self.heads * self.group * (self.capacity + self._own)

    @property
    def _block_bits(self) -> int:
        return (self._listed - 1).bit_length()

    @property
    def words(self) -> int:
        """Int32 of a visit."""
        lists = self.heads * self.group * self._own
        bits = (lists - 1).bit_length() + self._block_bits + BLOCK_AT
        return 1 if bits <= 31 else 2

    @property
    def steps(self) -> int:
        """Steps that one launch has space for."""
        return min(self.most_steps, MOST_WORDS // self.words)

    @property
    def stride(self) -> int:
        """First steps of work tiles that belong to one launch; the last tile may reach beyond."""
        return self.steps - self.lists_of_tile * self._listed

    @property
    def is_split(self) -> bool:
        """Whether there may be more than one launch."""
        return self.most_steps > self.steps

    def why_not(self) -> str | None:
        """Why the visits cannot be split into launches; None where they can."""
        if self.most_steps >= 1 << 31:
            return (
                f"takes fewer than 2³¹ visits; this mask has space for {self.most_steps}; build it "
                "with a smaller capacity or larger blocks"
            )
        most = self.steps // 2
        if self.is_split and self.stride < most:
            what = "kv" if self.by_column else "row"
            longest = self.lists_of_tile * self._listed
            return (
                f"takes {what} blocks of up to {most} visits; these may have {longest}; "
                "use larger blocks"
            )
        return None

    def at(self, table: Any, t: Any) -> Visit:
        """Visit t of a launch."""
        word = table[t * self.words]
        block = (word >> BLOCK_AT) & ((1 << self._block_bits) - 1)
        own = word >> (BLOCK_AT + self._block_bits)
        number = own if self.words == 1 else table[t * 2 + 1]
        if self.by_column:  # lists lie as [heads, kv blocks, group]
            rest, g = divided(number, self.group)
            (x, j), i = divided(rest, self.kv_blocks), block
        else:  # [heads, group, row blocks]
            rest, i = divided(number, self.row_blocks)
            (x, g), j = divided(rest, self.group), block
        flags = (word >> FIRST) & 1 == 1, (word >> LAST) & 1 == 1
        return Visit(x, g, i, j, word & 3, *flags)


def divided(number: Any, by: int) -> tuple[Any, Any]:
    """(quotient, remainder) of numbers that are not negative: plain instructions of a kernel."""
    if by == 1:
        return number, jnp.zeros_like(number)
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


class Visits(NamedTuple):
    """The visits of all launches."""

    launches: Array | int  # those that have visits
    # launch number -> int32 [steps · words], whose tail is never read, and how many steps it has
    of_launch: Callable[[Any], tuple[Array, Array]]


def visits_of(
    mask: BlockMask, layout: Layout, has_partial: bool, in_order: Array | None = None
) -> Visits:
    """The flat list of a mask with packed lists, transposed where `by_column`.

    Args:
      mask: of lists by row, or by column.
      layout: for it.
      has_partial: whether partial blocks differ from full ones at all.
      in_order: bool [B|1]; partial blocks of other batch rows are BY_RULE. None: of none.
    """
    sizes, group = layout.sizes, layout.group
    x = jnp.arange(layout.heads, dtype=jnp.int32)[:, None]
    n = x % sizes.K * group + jnp.arange(group, dtype=jnp.int32)[None]
    which = list_index(mask, sizes, x // sizes.K, n)  # [heads, group]
    own = mask.kv_count.shape[-1]

    def of_lists(values: Array) -> Array:
        """[Bm, Nm, own] as [lists]."""
        found = values.reshape(-1, own)[which]
        return (found.swapaxes(1, 2) if layout.by_column else found).reshape(-1)

    count, full = of_lists(mask.kv_count), of_lists(mask.full_count)
    offsets = jnp.arange(mask.kv_count.size // own, dtype=jnp.int32) * layout.capacity
    begin = of_lists(mask.kv_start.reshape(-1, own) + offsets[:, None])
    # The first list of a work tile without visits has a step.
    steps = count.reshape(-1, layout.lists_of_tile)
    steps = steps.at[:, 0].add(steps.sum(-1) == 0).reshape(-1)
    start = starts_of(steps)
    total = start[-1] + steps[-1]
    first_of_tile = start[:: layout.lists_of_tile]
    partial = jnp.int32(PARTIAL)
    if in_order is not None:
        partial = jnp.where(jnp.broadcast_to(in_order, sizes.B), PARTIAL, BY_RULE)
        partial = jnp.repeat(partial, len(count) // sizes.B, total_repeat_length=len(count))

    def of_launch(launch: Any) -> tuple[Array, Array]:
        edges = jnp.stack([jnp.int32(0), total])
        if layout.is_split:
            wanted = (launch + jnp.arange(2, dtype=jnp.int32)) * layout.stride
            edges = jnp.append(first_of_tile, total)[jnp.searchsorted(first_of_tile, wanted)]
        t = edges[0] + jnp.arange(layout.steps, dtype=jnp.int32)
        number = jnp.searchsorted(start, t, side="right").astype(jnp.int32) - 1
        rank = t - start[number]
        block = mask.kv_index.reshape(-1).at[begin[number] + rank].get(mode="clip")
        is_full = (rank < full[number]) | (not has_partial)
        is_live = rank < count[number]
        own_partial = partial if in_order is None else partial[number]
        kind = jnp.where(is_live, jnp.where(is_full, FULL, own_partial), EMPTY)
        tile = number // layout.lists_of_tile
        changes = tile[1:] != tile[:-1]
        is_first = jnp.concatenate([jnp.ones(1, bool), changes])
        is_last = jnp.concatenate([changes, jnp.ones(1, bool)]) | (t == edges[1] - 1)
        word = jnp.where(is_live, block, 0)
        if layout.words == 1:
            word |= number << layout._block_bits
        word = word << BLOCK_AT | is_last << LAST | is_first << FIRST | kind
        table = word if layout.words == 1 else jnp.stack([word, number], -1).reshape(-1)
        return table.astype(jnp.int32), edges[1] - edges[0]

    return Visits(first_of_tile[-1] // layout.stride + 1 if layout.is_split else 1, of_launch)
