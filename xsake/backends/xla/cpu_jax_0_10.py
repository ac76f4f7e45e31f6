"""The forward on CPUs with JAX before 0.11: chains of single visits instead of chunks.

XLA then runs a batch of small products on one core. It runs independent operations of a loop body
on several cores when more than eight of them are ready and no two share memory. So the visits of
all row blocks lie in one list, row block after row block, cut into runs of equal length, one for
each chain:

    visits    row 0 | row 1 | row 1 | row 1 ┊ row 2 | row 2 | row 3 | row 4 ┊ row 4 | row 5 | …
              └──────── chain 0 ────────────┘└──────── chain 1 ────────────┘└─── chain 2 ── …

In step t every chain makes visit t of its run, with products of its own. A run is never shorter
than the longest row block's list, so no two chains visit for the same row block at once. Visits
that need the rule come first, in a list of their own, then those of full blocks. The softmax states
of all row blocks lie in arrays that a step gathers from and scatters to. Everything else that a
chain reads or computes is carried from step to step, so that XLA gives it memory of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import Sizes, accumulator, kv_head, list_index, quotient, remainder
from xsake.backends.products import logits, operand, scaled
from xsake.backends.xla.chunks import Visit
from xsake.backends.xla.output import Inputs, Online, masked, update
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import entries_of

# The fewest row blocks per chain. A guess: with fewer, compiling costs more than chains gain.
MIN_ROW_BLOCKS = 16
# The most visits. Chains, unlike chunks, need a list of the visits of every head: 40 bytes each.
MAX_VISITS = 1 << 22


def row_blocks(mask: BlockMask, sizes: Sizes) -> int:
    """How many row blocks all heads have together."""
    return sizes.B * sizes.N * mask.kv_count.shape[2]


def fits(mask: BlockMask, sizes: Sizes, chains: int) -> bool:
    """Whether a call has enough row blocks for so many chains, and not too many visits."""
    visits = sizes.B * sizes.N * mask.kv_index.shape[2]
    enough = row_blocks(mask, sizes) >= chains * MIN_ROW_BLOCKS
    return chains > 0 and enough and visits <= MAX_VISITS


def visit_chains(inputs: Inputs) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N]) by chains of single visits."""
    settings, sizes, q, k, v, biases, mask = inputs
    B, T, _, N, K, _, Hv = sizes
    (bq, bk), dtype, chains = mask.block, accumulator(q.dtype), settings.steps.chains
    q, scale = scaled(_pad_blocks(operand(q), bq), settings.scale, dtype)
    k, v = (_pad_blocks(operand(x), bk) for x in (k, v))

    def step(at: Step, rows: Online) -> tuple[Online, Any]:
        before = Online(*(x[at.row] for x in rows))
        states, all_made = [], []
        for c in range(chains):
            b, n, i, j = (x[c] for x in (at.b, at.n, at.i, at.j))
            q_rows = _block(q, b, i, n, bq)
            k_rows, v_rows = (_block(x, b, j, kv_head(n, sizes), bk) for x in (k, v))
            s = logits(q_rows, k_rows, scale, settings.soft_cap, dtype)
            s_masked = masked(s[None], at.of_chain(c), mask, biases)[0]
            after, made = update(Online(*(x[c] for x in before)), s_masked, v_rows)
            states.append(after)
            more = (s_masked,) if at.needs_rule or biases is not None else ()  # otherwise it is s
            all_made.append((q_rows, k_rows, v_rows, s, *more, *made))
        after = Online(*map(jnp.stack, zip(*states, strict=True)))
        rows = Online(*(x.at[at.row].set(y) for x, y in zip(rows, after, strict=True)))
        return rows, all_made

    count = row_blocks(mask, sizes) + 1  # the last one is written by chains without a visit
    nothing = Online(
        jnp.full((count, bq), -jnp.inf, dtype),
        jnp.zeros((count, bq), dtype),
        jnp.zeros((count, bq, Hv), dtype),
    )
    nothing = _jax.vary(nothing, _jax.varying_axes(q))
    rows, made = _loop(mask, sizes, chains, step, nothing)
    out, lse = rows._replace(l=_keep_alive(rows.l, made)).result()
    blocks = mask.kv_count.shape[2]

    def by_token(x: Array) -> Array:
        x = x[:-1].reshape(B, N, blocks, bq, -1).transpose(0, 2, 3, 1, 4)
        return x.reshape(B, blocks * bq, N, -1)[:, :T]

    return by_token(out), by_token(lse)[..., 0]


class Step(NamedTuple):
    """One step: a visit for each of C chains."""

    row: Array  # int32 [C], flat row-block index over all heads; one past the last: no visit
    b: Array
    n: Array
    i: Array  # row block
    j: Array  # kv block
    needs_rule: bool

    def of_chain(self, c: int) -> Visit:
        """Chain c's visit, as a chunk of one row block; marked live even if it is padding."""
        b, n, i, j = (x[c : c + 1] for x in (self.b, self.n, self.i, self.j))
        yes = jnp.ones((1, 1), bool) if self.needs_rule else None
        return Visit(b, n, i[:, None], j[:, None], yes, yes)


class Visits(NamedTuple):
    """All visits of one kind, row block after row block."""

    # int32 [capacity], flat row-block index over all heads; past `total`, one past the last index
    row: Array
    column: Array
    total: Array
    longest: Array  # visits of one row block, at most


def _visits(mask: BlockMask, sizes: Sizes) -> tuple[Visits, Visits]:
    """The visits that need the rule, and those of full blocks, of every head."""
    blocks = mask.kv_count.shape[2]
    b, n = jnp.arange(sizes.B)[:, None], jnp.arange(sizes.N)[None]
    which = jnp.broadcast_to(list_index(mask, sizes, b, n), (sizes.B, sizes.N))

    def of_heads(x: Array) -> Array:  # [B, N, …]
        return x.reshape(-1, x.shape[-1])[which]

    row, column, full, listed = map(of_heads, entries_of(mask.lists))
    row = ((b * sizes.N + n) * blocks)[..., None] + row

    def packed(kind: Array, count: Array) -> Visits:
        at = jnp.where(kind, jnp.cumsum(kind).reshape(kind.shape) - 1, kind.size)  # dropped
        rows = jnp.full(kind.size, row_blocks(mask, sizes), jnp.int32)
        rows = rows.at[at].set(row.astype(jnp.int32), mode="drop")
        columns = jnp.zeros(kind.size, jnp.int32).at[at].set(column, mode="drop")
        return Visits(rows, columns, kind.sum(dtype=jnp.int32), count.max())

    partial = packed(listed & ~full, mask.kv_count - mask.full_count)
    return partial, packed(listed & full, mask.full_count)


def _loop(
    mask: BlockMask,
    sizes: Sizes,
    chains: int,
    step: Callable[[Step, Any], tuple[Any, Any]],
    state: Any,
) -> tuple[Any, Any]:
    """Runs (state, made) = step(at, state) until every visit is made.

    The last step's `made` is returned too: if it were unused, XLA would remove it from the loop.
    """
    none, blocks = row_blocks(mask, sizes), mask.kv_count.shape[2]
    all_made = []

    def take_step(t: Array, carry: Any, visits: Visits, begins: Array, needs_rule: bool) -> Any:
        # `fill` was measured faster than `clip`
        row = visits.row.at[begins + t].get(mode="fill", fill_value=none)
        j = visits.column.at[begins + t].get(mode="fill", fill_value=0)
        real = jnp.minimum(row, none - 1)
        head, i = quotient(real, blocks), remainder(real, blocks)
        b, n = quotient(head, sizes.N), remainder(head, sizes.N)
        at = Step(row, b, n, i, j, needs_rule)
        return step(at, carry[0])

    for visits, needs_rule in zip(_visits(mask, sizes), (True, False), strict=True):
        length = jnp.maximum(quotient(visits.total + (chains - 1), chains), visits.longest)
        begins = jnp.arange(chains, dtype=jnp.int32) * length
        body = functools.partial(take_step, visits=visits, begins=begins, needs_rule=needs_rule)
        _, made = jax.eval_shape(body, length, (state, None))
        made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        made = _jax.vary(made, _jax.varying_axes(*jax.tree.leaves(state)))
        state, made = lax.fori_loop(0, length, body, (state, made))
        all_made.append(made)
    return state, all_made


def _pad_blocks(x: Array, block: int) -> Array:
    """x [B, T, N, D] padded to whole blocks of tokens."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))


def _block(x: Array, b: Array, i: Array, n: Array, block: int) -> Array:
    """Block i of a head of x [B, whole blocks, N, D], as [block, D]."""
    at = b, i * block, n, jnp.zeros_like(i)
    return lax.dynamic_slice(x, at, (1, block, 1, x.shape[-1])).reshape(block, -1)


def _keep_alive(x: Array, made: Any) -> Array:
    """Returns x ≥ 0. Reads `made` where x < 0, which never is, so that XLA does not remove it."""
    return jnp.where(x < 0, sum(y.reshape(-1)[0] for y in jax.tree.leaves(made)), x)
