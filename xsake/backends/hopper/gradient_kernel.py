"""What both backward kernels share: their steps, the probabilities, products and result stores."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.handover import Handover
from xsake.backends.hopper.kernel import BlockKernel
from xsake.backends.hopper.layouts import COMPUTE_WGS, LOG2E, PANEL, ROWS, TILE, tiles
from xsake.backends.hopper.ptx import opaque

OUT_COLUMNS = 128  # columns of a result that are staged at a time


class GradientKernel(BlockKernel):
    """A backward kernel over work tiles."""

    @property
    def reuse_operand_smem(self) -> bool:
        """Whether shared memory has no space for results: they are staged in an operand's buffer.

        That buffer must not be filled again, so a CTA has one work tile. The ring of d_out or v,
        whose slots are released early in a step, has one stage then.
        """
        return self.shape.sizes.H + self.shape.sizes.Hv > 384 and not self.alternate

    def stages_of(self, stages):
        """Stages of (the q or k ring, held for a whole step; the d_out or v ring, freed early)."""
        large = self.shape.largest_head > 128
        stages = stages or (4 if self.alternate and self.step == 64 and not large else 2)
        self.check_stages(stages)
        return stages, 1 if self.reuse_operand_smem else stages

    def run_steps(self, wg, work_tile, done, decides, ds_of, add, steps=None, last_is_short=None):
        """add(t, ds_of(t, masked)) for every step t of a work tile that is this warpgroup's.

        Full steps come first, then partial ones, where `masked` is the rule. decides: as
        RuleTile.decides returns it. steps: as in `own_steps`. last_is_short: whether the last one
        is ds_of(t, masked, width=ROWS), of 64 queries; None: never.
        """
        first_step, full, count = self.own_steps(wg, work_tile, done, steps)

        def step(t, masked, **width):
            t = first_step + t * self.stride if self.alternate else t
            add(t, ds_of(t, masked, **width))

        pl.loop(0, full)(lambda t: step(t, None))
        for rule, first, end in self.rule.partial_steps(full, count, decides):
            may_be_short = last_is_short is not None and rule is self.rule
            whole = end - last_is_short.astype(jnp.int32) if may_be_short else end
            pl.loop(first, whole)(functools.partial(step, masked=rule))
            if may_be_short:
                pl.when(last_is_short)(functools.partial(step, whole, masked=rule, width=ROWS))

    def probabilities(self, s, lse, masked, keep, bias=None):
        """p, and p times the slope of the soft cap; both zero where the rule forbids.

        masked: the rule of a partial step, or None. keep(p, rule): p, and 0 where it forbids. bias:
        as BiasTile.load returns it.
        """

        def mask(p):
            return p if masked is None else keep(p, masked)

        if self.soft_cap is None:
            if self.bias.exists:
                p = mask(jnp.exp2(self.bias.add(s * self.scale, bias) * LOG2E - lse))
            else:
                p = mask(jnp.exp2(s * (self.scale * LOG2E) - lse))
            return p, p
        # tanh x = 1 - 2 / (1 + e^2x), as in the forward.
        growth = jnp.exp2(s * (2 * LOG2E * self.scale / self.soft_cap))
        capped = 1.0 - 2.0 / (1.0 + growth)
        if self.bias.exists:
            p = mask(jnp.exp2(self.bias.add(capped * self.soft_cap, bias) * LOG2E - lse))
        else:
            p = mask(jnp.exp2(capped * (self.soft_cap * LOG2E) - lse))
        return p, p * (1.0 - capped * capped)

    # Products

    def opaque(self, wg):
        """wg, which the compiler cannot hoist out of a loop.

        Otherwise it keeps a descriptor of every product of k and v in registers, and spills.
        """
        return wg if self.interpret else opaque(wg)

    def own_rows(self, wg, ref):
        """This warpgroup's rows of an operand that stays for the whole work tile."""
        first = jnp.int32(0) if self.alternate else wg
        return ref.at[pl.ds(self.opaque(first) * ROWS, ROWS)]

    def add_product(self, acc_ref, left, right, left_smem=None):
        """acc += left right, with `left` in registers.

        The interpreter reads it from shared memory.
        """
        if self.interpret:
            left_smem[...] = left
            plgpu.commit_smem()
            left = left_smem
        plgpu.wgmma(acc_ref, left, right)

    def issue(self, left, right):
        """Issues left @ right, both in shared memory; the result may be read after settle()."""

        def product(ref):
            plgpu.wgmma(ref, left, right)
            if self.interpret:
                return ref[...]
            return plgpu.wgmma_accumulator_load(ref, wait_n=None)

        return pl.run_scoped(product, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def settle(self, tile, wait_n):
        """An issued tile, once no more than `wait_n` later products are in flight."""
        if self.interpret:
            return tile
        plgpu.wgmma_wait(wait_n)
        return lax.optimization_barrier(tile)

    def accumulate_unless_empty(self, accumulate, work_tile, sizes):
        """accumulate(*accumulators) -> tiles; zeros for a work tile without visits."""

        def run():
            return pl.run_scoped(accumulate, *(plgpu.ACC(x, jnp.float32) for x in sizes))

        def zeros():
            return tuple(plgpu.layout_cast(jnp.zeros(x, jnp.float32), TILE) for x in sizes)

        return lax.cond(work_tile.count > 0, run, zeros)

    # Results

    def staging_scratch(self, sizes, dtype) -> dict[str, Any]:
        """One staging buffer per warpgroup for results with these numbers of columns.

        Empty if an operand's buffer is reused.
        """
        if self.reuse_operand_smem:
            return {}
        if self.alternate:
            panel = tiles(ROWS, PANEL, dtype=jnp.float32)
            out = tiles(1, ROWS, PANEL, dtype=dtype)
            return {"out_smem": out, "piece_smem": panel, **Handover.barriers()}
        panels = min(*sizes, OUT_COLUMNS) // PANEL
        return {"out_smem": tiles(COMPUTE_WGS, panels, ROWS, PANEL, dtype=dtype)}

    def store(self, wg, tile, scale, staging, gmem, handover):
        """scale * tile to global memory; rows past the last token are dropped.

        With alternating steps, the tiles of both warpgroups are summed.
        """
        if not self.alternate:
            copy_out(tile * scale, staging, gmem)
            return

        @pl.when(wg == 1)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dq was staged in the same buffer
            handover.give(tile)

        @pl.when(wg == 0)
        def _():
            for column in range(0, tile.shape[-1], PANEL):
                panel, _ = handover.take()
                panel = (tile[:, column : column + PANEL] + panel) * scale
                copy_out(panel, staging, gmem.at[:, pl.ds(column, PANEL)])


def copy_out(tile, staging, gmem):
    """A tile to global memory through shared memory, as many columns as fit there at a time.

    staging is [64, columns], or a ring [buffers, 64, 64]. A buffer is written again only when all
    but the latest (buffers - 1) copies have finished reading shared memory.
    """
    tile = tile.astype(staging.dtype)
    buffers = [staging]
    if len(staging.shape) == 3:
        buffers = [staging.at[i] for i in range(staging.shape[0])]
    width = staging.shape[-1]
    for turn, column in enumerate(range(0, tile.shape[-1], width)):
        buffer = buffers[turn % len(buffers)]
        plgpu.wait_smem_to_gmem(len(buffers) - 1, wait_read_only=True)
        buffer[...] = tile[:, column : column + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, gmem.at[:, pl.ds(column, width)])
