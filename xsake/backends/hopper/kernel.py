"""What the forward and both backward kernels share: the launch, the roles and the steps.

A CTA has two or three compute warpgroups, another one that copies (pipeline.py), and sometimes one
that casts dq (dq_cast.py). A visit of a block takes one or more steps; a step processes the
tokens of one product:

    tiles of 128 tokens   warpgroup 0 has rows 0-63, warpgroup 1 has rows 64-127; both compute
                          every step
    tiles of 192 tokens   the same with three compute warpgroups, forward only
    tiles of 64 tokens    both have the same rows and compute alternating steps (`alternate`); at
                          the end warpgroup 1 hands its sums to warpgroup 0 (handover.py)
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.bias_tile import BiasTile
from xsake.backends.hopper.layouts import COMPUTE_WGS, ROWS
from xsake.backends.hopper.limits import TALL
from xsake.backends.hopper.rule_tile import RuleTile
from xsake.backends.hopper.scheduler import Scheduler

REGISTERS = 512  # an SM's registers / 128: the most per thread, summed over warpgroups


class BlockKernel:
    """A kernel over work tiles; `self` holds what is static.

    axis: what a work tile is, a row block (0) or a kv block (1); it visits blocks of the other
    axis. step: tokens of one product on that other axis.
    """

    warpgroups = COMPUTE_WGS + 1
    compute_wgs = COMPUTE_WGS
    descending = False  # whether full blocks are visited from the last to the first
    record_slots = 2  # for the records of the current and of the next work tile

    def __init__(
        self,
        shape,
        rule,
        tiling,
        *,
        axis,
        step,
        scale,
        soft_cap,
        bias,
        interpret,
        bias_in_shared=False,
    ):
        self.shape = shape
        self.tiling = tiling
        self.scale, self.soft_cap = scale, soft_cap
        self.interpret = bool(interpret)
        self.rule = RuleTile(rule, shape, axis, self.interpret)
        self.bias = BiasTile(bias, axis, self.interpret, in_shared=bias_in_shared)
        self.tile_block, self.visit_block = shape.block[axis], shape.block[1 - axis]
        if self.visit_block % step:
            raise ValueError(
                f"a step of {step} tokens does not divide a block of {self.visit_block}"
            )
        self.step = step
        self.splits = self.visit_block // step  # steps per visit
        self.alternate = self.tile_block == ROWS
        self.stride = COMPUTE_WGS if self.alternate else 1  # from a warpgroup's step to its next
        if self.tile_block == TALL:
            self.compute_wgs = TALL // ROWS
            self.warpgroups = self.compute_wgs + 1
        self.consumers = 1 if self.alternate else self.compute_wgs  # that compute a step
        blocks = (shape.row_blocks, shape.kv_blocks)[axis]
        self.scheduler = Scheduler(
            shape.sizes.B * shape.sizes.N * blocks,
            persistent=tiling.persistent and not self.reuse_operand_smem,
            schedule=tiling.schedule,
            record_slots=self.record_slots,
            warpgroups=self.warpgroups,
            interpret=self.interpret,
        )

    @property
    def reuse_operand_smem(self) -> bool:
        """Whether results are staged in an operand's buffer; a CTA then has only one work tile."""
        return False

    def check_stages(self, stages: int) -> None:
        """Raises where alternating warpgroups would not keep to their own slots of a ring."""
        if stages % self.stride:
            raise ValueError(f"blocks of {ROWS} need an even number of stages, not {stages}")

    def launch(self, name, body, operands, out_type, scratch, interpret):
        """The results of body(*operands, *results, **scratch), run by every CTA.

        Scratch is allocated in the order of its sorted names.
        """
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch | self.scheduler.scratch(),
            grid=(self.scheduler.ctas,),
            grid_names=("cta",),
            num_threads=self.warpgroups,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                reduction_scratch_bytes=0,  # rows are reduced inside a warp
                unsafe_no_auto_barriers=not interpret,  # the body has its own barriers
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            **({"interpret": interpret} if interpret else {}),
        )(*operands)

    def run_roles(self, compute, memory, cast=None):
        """compute(wg) on the first warpgroups, memory() on the next, cast() on one more.

        The compute warpgroups get only the registers that the others leave.
        """
        tiling = self.tiling
        wg = lax.axis_index("wg")
        registers, memory_registers = tiling.compute_registers, tiling.memory_registers
        if self.compute_wgs > COMPUTE_WGS:
            memory_registers = min(memory_registers, 32)
        rest = REGISTERS - memory_registers - (0 if cast is None else tiling.cast_registers)
        registers = min(registers, rest // self.compute_wgs // 8 * 8)

        @pl.when(wg < self.compute_wgs)
        def _():
            plgpu.set_max_registers(registers, action="increase")
            compute(wg)

        @pl.when(wg == self.compute_wgs)
        def _():
            plgpu.set_max_registers(memory_registers, action="decrease")
            memory()

        if cast is not None:

            @pl.when(wg > self.compute_wgs)
            def _():
                plgpu.set_max_registers(tiling.cast_registers, action="decrease")
                cast()

    # Tokens and heads of a work tile

    def first_row(self, work_tile, wg):
        """The token index of this warpgroup's first row of a work tile."""
        first = work_tile.i * self.tile_block
        return first if self.alternate else first + wg * ROWS

    def tokens_of(self, work_tile, gmem, head):
        """A work tile's own tokens of one head of gmem [B, tokens, heads, size]."""
        tokens = pl.ds(work_tile.i * self.tile_block, self.tile_block)
        return gmem.at[work_tile.b, tokens, head]

    def kv_head(self, work_tile):
        """The kv head of a work tile's query head."""
        return lax.div(work_tile.n, jnp.int32(self.shape.group))

    # Steps

    def first_token(self, index, work_tile, t):
        """The token index where step t of a work tile begins, on the axis that it visits."""
        if self.splits == 1:
            return self.visited(index, work_tile, t) * self.visit_block
        visit, part = lax.div(t, jnp.int32(self.splits)), lax.rem(t, jnp.int32(self.splits))
        return self.visited(index, work_tile, visit) * self.visit_block + part * self.step

    def visited(self, index, work_tile, visit):
        """The block of a visit; full blocks in the list's order, or the last one first."""
        if self.descending:
            full = work_tile.full if self.rule.has_partial else work_tile.count
            visit = jnp.where(visit < full, full - 1 - visit, visit)
        return index[work_tile.start + visit]

    def own_steps(self, wg, work_tile, done, steps=None):
        """This warpgroup's (first step of a work tile, number of full steps, number of steps).

        steps: of the work tile; None: all steps of its visits.
        Warpgroups alternate by the number of steps since the kernel began (`done` before this work
        tile). A slot of a ring with an even number of stages then always has the same reader.
        """
        full, count = work_tile.full * self.splits, work_tile.count * self.splits
        if not self.rule.has_partial:
            full = count
        if steps is not None:
            count = steps
        if not self.alternate:
            return 0, full, count
        first = lax.rem(done + wg, jnp.int32(COMPUTE_WGS))
        return first, *(lax.div(x - first + 1, jnp.int32(COMPUTE_WGS)) for x in (full, count))
