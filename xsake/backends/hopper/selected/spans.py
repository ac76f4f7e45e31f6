"""What the kernels over selected blocks share.

The launch, which tiles of the lists a CTA computes, the copies of K and V for them, products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import div_rem, slot_of


class Spans:
    """The tiles of one CTA: an even share of every segment (lists.py)."""

    def __init__(self, starts, first, segments, ctas, last_tile):
        self.starts, self.first, self.segments, self.ctas = starts, first, segments, ctas
        self.last_tile = last_tile
        self.begin = starts[first]  # the first tile of all CTAs

    def span(self, segment):
        """(first tile, tile after the last) of a segment that are this CTA's."""
        segment = self.first + jnp.minimum(segment, self.segments - 1)
        begin, end = self.starts[segment], self.starts[segment + 1]
        cta = lax.axis_index("cta")
        # tiles · CTAs fits in int32 up to 16 million tiles of a segment
        share = (lax.div((end - begin) * (cta + x), jnp.int32(self.ctas)) for x in (0, 1))
        return tuple(begin + x for x in share)

    def for_each_tile(self, record, visit, init):
        """carry = visit(tile, record(tile), tiles before, carry) for every tile: (tiles, carry).

        The record of the next tile is read before a tile is visited.
        """

        def read(tile):
            return record(jnp.minimum(tile, self.last_tile))

        def segment(number, carry):
            begin, end = self.span(number)
            after = self.span(number + 1)[0]  # unless that span is empty

            def step(tile, carry):
                done, guess, found, state = carry
                found = lax.cond(tile == guess, lambda: found, lambda: read(tile))
                guess = jnp.where(tile + 1 < end, tile + 1, after)
                following = read(guess)
                return done + 1, guess, following, visit(tile, found, done, state)

            return lax.fori_loop(begin, end, step, carry)

        guess = self.span(jnp.int32(0))[0]
        carry = (jnp.int32(0), guess, read(guess), init)
        done, _, _, state = lax.fori_loop(0, self.segments, segment, carry)
        return done, state


class KeyBlocks(NamedTuple):
    """K and V of the current block and, with two stages, of the next one, in shared memory."""

    k_smem: Any  # [stages, block, H]
    v_smem: Any  # [stages, block, Hv]
    ready: Any
    free: Any
    kv_blocks: int
    kv_heads: int

    @property
    def stages(self) -> int:
        """Blocks that shared memory holds."""
        return self.k_smem.shape[0]

    def place(self, at):
        """(batch row, keys, kv head) of a block number of lists.py."""
        head, j = div_rem(at, self.kv_blocks)
        b, head = div_rem(head, self.kv_heads)
        block = self.k_smem.shape[1]
        return b, pl.ds(j * block, block), head

    def load(self, k_gmem, v_gmem, number, at):
        """Copies block `at`, which is this CTA's block number `number`."""
        slot = slot_of(number, self.stages)
        pl.when(number >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        place = self.place(at)
        plgpu.copy_gmem_to_smem(k_gmem.at[place], self.k_smem.at[slot], self.ready.at[slot])
        plgpu.copy_gmem_to_smem(v_gmem.at[place], self.v_smem.at[slot], self.ready.at[slot])

    def turn_to(self, number):
        """A compute warpgroup has read block `number - 1` and waits for block `number`."""
        pl.when(number > 0)(lambda: self.release(number - 1))
        plgpu.barrier_wait(self.ready.at[slot_of(number, self.stages)])

    def release(self, number):
        """A compute warpgroup has read block `number`."""
        plgpu.barrier_arrive(self.free.at[slot_of(number, self.stages)])


def over_columns(x, tile):
    """One value per row, repeated over the columns of `tile`."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


def limits_of(limits, first, tokens, group, layout):
    """The limit of each of 64 rows, in a layout of one value per row or column.

    `first` is the slot of the first of `tokens` tokens, which have `group` rows each.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (tokens * group,), 0, layout=layout)
    limit = jnp.zeros_like(row)
    for i in range(tokens):
        limit = jnp.where(row >= i * group, limits[first + i], limit)
    return limit


def launch(kernel, name, warpgroups, operands, out_type, interpret=False):
    """The results of kernel.body, with its scratch, on kernel.ctas CTAs of so many warpgroups."""
    return plgpu.kernel(
        kernel.body,
        out_type=out_type,
        scratch_types=kernel.scratch(operands[0].dtype),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # rows are reduced inside a warp
            unsafe_no_auto_barriers=not interpret,  # the bodies have their own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(*operands)


def product(left, right):
    """left @ right; left is in shared memory or in registers."""

    def issue(ref):
        plgpu.wgmma(ref, left, right)
        return ref[...]

    return pl.run_scoped(issue, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def values(p, v, interpret):
    """p v, with p in registers; the interpreter has no such operand."""
    if interpret:
        return jnp.dot(p, v[...], preferred_element_type=jnp.float32)
    return product(p, v)
