"""Chains: visits that the `xla` backend works on side by side, for a CPU whose JAX is below 0.11.

There XLA runs a batch of small products on one core. It does run pieces of a program side by side,
when more than eight of them are ready and no two share memory. So the visits of all rows of blocks
stand in a list, row after row, cut into as many runs of equal length as there are chains:

    visits    row 0 | row 1 | row 1 | row 1 ┊ row 2 | row 2 | row 3 | row 4 ┊ row 4 | row 5 | …
              └──────── chain 0 ────────────┘└──────── chain 1 ────────────┘└─── chain 2 ── …

In step t every chain makes visit t of its run, with products of its own. A run is never shorter
than the longest row, so no two chains have the same row at once. There is a list of visits that
need the rule and, after it, one of full blocks. What rows have so far (maximum, sum, output) lies
in arrays that a step reads from and writes to; what a chain reads and makes beside that is carried
from step to step, so that it has its own place in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, mask_place
from xsake.backends.xla.chunks import Visit
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import entries_of

# At least. A guess: with fewer rows of blocks, what chains save is not worth compiling them.
ROWS_OF_A_CHAIN = 16
# For visits, about 40 bytes each: chains list them for every head, which chunks need not.
MOST_PLACES = 1 << 22


def row_blocks(mask: BlockMask, sizes: Sizes) -> int:
    """How many rows of blocks all heads have together."""
    return sizes.B * sizes.N * mask.kv_count.shape[2]


def fit(mask: BlockMask, sizes: Sizes, chains: int) -> bool:
    """Whether there is enough for so many chains, and not too much."""
    places = sizes.B * sizes.N * mask.kv_index.shape[2]
    enough = row_blocks(mask, sizes) >= chains * ROWS_OF_A_CHAIN
    return chains > 0 and enough and places <= MOST_PLACES


class Turn(NamedTuple):
    """One step: a visit for each of C chains."""

    row: Array  # int32 [C], among all heads' rows of blocks; one past the last: no visit
    b: Array
    n: Array
    i: Array  # its row block
    j: Array  # its kv block
    needs_rule: bool

    def of_chain(self, c: int) -> Visit:
        """What chain c meets, as a chunk of one row; live even if it is nobody's."""
        b, n, i, j = (x[c : c + 1] for x in (self.b, self.n, self.i, self.j))
        yes = jnp.ones((1, 1), bool) if self.needs_rule else None
        return Visit(b, n, i[:, None], j[:, None], yes, yes)


class Visits(NamedTuple):
    """Those of one kind, row after row."""

    row: Array  # int32 [places], among all heads' rows of blocks; behind the last visit: none
    column: Array
    total: Array
    longest: Array  # visits of one row


def visits_of(mask: BlockMask, sizes: Sizes) -> tuple[Visits, Visits]:
    """Those that need the rule, and the full ones, of every head; places are found by counting."""
    blocks = mask.kv_count.shape[2]
    b, n = jnp.arange(sizes.B)[:, None], jnp.arange(sizes.N)[None]
    place = mask_place(mask, sizes, b, n)

    def of_heads(x: Array) -> Array:  # [B, N, …]
        return x.reshape(-1, x.shape[-1])[place]

    row, column, full, listed = map(of_heads, entries_of(mask.lists))
    row = ((b * sizes.N + n) * blocks)[..., None] + row

    def in_places(which: Array, count: Array) -> Visits:
        at = jnp.where(which, jnp.cumsum(which).reshape(which.shape) - 1, which.size)  # dropped
        rows = jnp.full(which.size, row_blocks(mask, sizes), jnp.int32)
        rows = rows.at[at].set(row.astype(jnp.int32), mode="drop")
        columns = jnp.zeros(which.size, jnp.int32).at[at].set(column, mode="drop")
        return Visits(rows, columns, which.sum(dtype=jnp.int32), count.max())

    partial = in_places(listed & ~full, mask.kv_count - mask.full_count)
    return partial, in_places(listed & full, mask.full_count)


def loop(
    mask: BlockMask,
    sizes: Sizes,
    chains: int,
    step: Callable[[Turn, Any], tuple[Any, Any]],
    state: Any,
) -> tuple[Any, Any]:
    """Runs (state, made) = step(turn, state) until every visit is made.

    Those that need the rule come first. What the steps made is carried, and returned: it has to be
    read, or XLA will find that nobody does.
    """
    none, blocks = row_blocks(mask, sizes), mask.kv_count.shape[2]
    all_made = []

    def take_turn(t: Array, carry: Any, visits: Visits, begins: Array, needs_rule: bool) -> Any:
        # filled, not clipped, which was slower: see docs/kernels.md
        row = visits.row.at[begins + t].get(mode="fill", fill_value=none)
        j = visits.column.at[begins + t].get(mode="fill", fill_value=0)
        head, i = jnp.divmod(jnp.minimum(row, none - 1), blocks)
        turn = Turn(row, head // sizes.N, head % sizes.N, i, j, needs_rule)
        return step(turn, carry[0])

    for visits, needs_rule in zip(visits_of(mask, sizes), (True, False), strict=True):
        length = jnp.maximum(-(-visits.total // chains), visits.longest)
        begins = jnp.arange(chains, dtype=jnp.int32) * length
        body = functools.partial(take_turn, visits=visits, begins=begins, needs_rule=needs_rule)
        _, made = jax.eval_shape(body, length, (state, None))
        made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        state, made = lax.fori_loop(0, length, body, (state, made))
        all_made.append(made)
    return state, all_made


def whole_blocks(x: Array, block: int) -> Array:
    """x [B, T, N, D] filled up to whole blocks of tokens."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))


def block_at(x: Array, b: Array, i: Array, n: Array, block: int) -> Array:
    """Block i of a head of x [B, whole blocks, N, D], as [block, D]."""
    at = b, i * block, n, jnp.zeros_like(i)
    return lax.dynamic_slice(x, at, (1, block, 1, x.shape[-1])).reshape(block, -1)


def still_read(x: Array, made: Any) -> Array:
    """x, which is not negative. XLA cannot know that, and so cannot do without what was made."""
    return jnp.where(x < 0, sum(y.reshape(-1)[0] for y in jax.tree.leaves(made)), x)
