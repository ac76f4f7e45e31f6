"""dq of a row block over the kv blocks that it sees: the second kernel of the unfused backward.

It also stores the gradient of a bias [B|1, N|1, T, S], which is ds before the soft cap's slope.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.bias_tile import store_tile
from xsake.backends.hopper.gradient_kernel import GradientKernel
from xsake.backends.hopper.handover import Handover
from xsake.backends.hopper.layouts import COLUMN, COMPUTE_WGS, ROW, ROWS, slot_of, tiles
from xsake.backends.hopper.pipeline import Resident, Ring, stream


class _Scratch(NamedTuple):
    """Shared memory and mbarriers of a CTA."""

    q_smem: Any  # [block, H]
    d_out_smem: Any  # [block, Hv]
    k_smem: Any  # [stages, step, H]
    v_smem: Any  # [v_stages, step, Hv]
    q_ready: Any
    d_out_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any  # d_out too
    k_free: Any
    v_free: Any
    out_smem: Any = None  # staging of results, unless Q's buffer is reused
    left_smem: Any = None  # staging of left operands, interpreter only
    # With row blocks of 64: warpgroup 1's sums on their way to warpgroup 0.
    piece_smem: Any = None
    piece_ready: Any = None
    piece_taken: Any = None


class _Inputs(NamedTuple):
    """What the compute role reads in global memory, and the gradient of the bias, if wanted."""

    lse: Any
    delta: Any
    index: Any  # flat index of the lists
    rule_refs: Any
    bias_ref: Any
    d_bias: Any = None


class RowsKernel(GradientKernel):
    """A work tile is a row block.

    adds: several heads or batch rows share the bias, and their gradients are added in float32, in
    any order.
    """

    def __init__(self, shape, rule, tiling, adds=False, **static):
        step = tiling.key_step or min(shape.block[1], 64 if shape.largest_head > 128 else 128)
        super().__init__(shape, rule, tiling, axis=0, step=step, **static)
        self.adds = adds
        self.stages, self.v_stages = self.stages_of(tiling.key_stages)

    def __call__(self, operands, d_bias, interpret):
        """(dq, the gradient of the bias); d_bias: zeros where it is written, or None."""
        q = operands[0]
        out_type = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
        scratch = self.scratch(q.dtype)
        if d_bias is None:
            name = "xsake_backward_dq"
            (dq,) = self.launch(name, self.body, operands, out_type, scratch, interpret)
            return dq, None
        written = jax.new_ref(d_bias)
        operands, name = (*operands, written), "xsake_backward_dq_dbias"
        (dq,) = self.launch(name, self.body, operands, out_type, scratch, interpret)
        return dq, jax.freeze(written)

    def scratch(self, dtype) -> dict[str, Any]:
        """The types of `_Scratch`."""
        (bq, _), step, sizes = self.shape.block, self.step, self.shape.sizes
        stages, v_stages = self.stages, self.v_stages
        free = dict(num_arrivals=self.consumers)
        scratch = dict(
            q_smem=tiles(bq, sizes.H, dtype=dtype),
            d_out_smem=tiles(bq, sizes.Hv, dtype=dtype),
            k_smem=tiles(stages, step, sizes.H, dtype=dtype),
            v_smem=tiles(v_stages, step, sizes.Hv, dtype=dtype),
            **self.staging_scratch([sizes.H], dtype),
            q_ready=plgpu.Barrier(),
            d_out_ready=plgpu.Barrier(),
            k_ready=plgpu.Barrier(num_barriers=stages),
            v_ready=plgpu.Barrier(num_barriers=v_stages),
            q_free=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
            k_free=plgpu.Barrier(num_barriers=stages, **free),
            v_free=plgpu.Barrier(num_barriers=v_stages, **free),
        )
        if self.interpret:
            scratch["left_smem"] = tiles(COMPUTE_WGS, ROWS, step, dtype=dtype)
        return scratch

    def body(self, q, k, v, d_out, lse, delta, table, index, *refs, **buffers):
        """One CTA: what its warpgroups do."""
        rule_refs, refs = self.rule.split(refs)
        bias_ref, (*d_bias, dq) = self.bias.split(refs)
        work, others = self.scheduler.work_of(table, buffers)
        scratch = _Scratch(**others)
        inputs = _Inputs(lse, delta, index, rule_refs, bias_ref, *d_bias)
        self.run_roles(
            lambda wg: self.compute(wg, work, inputs, dq, scratch),
            lambda: self.memory(q, k, v, d_out, work, index, scratch),
        )

    def memory(self, q_gmem, k_gmem, v_gmem, d_out_gmem, work, index, scratch):
        """Copies Q, d_out once per work tile and K, V once per step, as soon as slots are free."""
        copy = plgpu.copy_gmem_to_smem

        def load_k(tile, keys, slot):
            gmem = k_gmem.at[tile.b, keys, self.kv_head(tile)]
            copy(gmem, scratch.k_smem.at[slot], scratch.k_ready.at[slot])

        def load_v(tile, keys, slot):
            gmem = v_gmem.at[tile.b, keys, self.kv_head(tile)]
            copy(gmem, scratch.v_smem.at[slot], scratch.v_ready.at[slot])

        def rows_of(gmem):
            return lambda tile: self.tokens_of(tile, gmem, tile.n)

        residents = [
            Resident(rows_of(q_gmem), scratch.q_smem, scratch.q_ready, scratch.q_free),
            Resident(rows_of(d_out_gmem), scratch.d_out_smem, scratch.d_out_ready, None),
        ]
        k_ring = Ring(self.stages, lambda x: plgpu.barrier_wait(scratch.k_free.at[x]), load_k)
        v_ring = Ring(self.v_stages, lambda x: plgpu.barrier_wait(scratch.v_free.at[x]), load_v)
        stream(self, work, index, k_ring, v_ring, residents)

    def compute(self, wg, work, inputs, dq_gmem, scratch):
        """64 queries of every work tile: dq over its steps, then one store."""
        handover = Handover(scratch.piece_smem, scratch.piece_ready, scratch.piece_taken)

        def compute_tile(tile, done):
            steps = tile.count * self.splits
            tile_steps = _TileSteps(self, wg, tile, done, inputs, scratch)
            H = self.shape.sizes.H
            (dq,) = self.accumulate_unless_empty(tile_steps.accumulate, tile, ((ROWS, H),))
            if self.reuse_operand_smem:
                staging = self.own_rows(wg, scratch.q_smem)
            else:
                staging = scratch.out_smem.at[0 if self.alternate else wg]
            gmem = dq_gmem.at[tile.b, tile_steps.queries, tile.n]
            self.store(wg, dq, self.scale, staging, gmem, handover)
            return done + steps

        self.scheduler.for_each_tile(work, compute_tile, 0)
        plgpu.wait_smem_to_gmem(0)


class _TileSteps:
    """The steps of one work tile on one compute warpgroup; `done` steps came before."""

    def __init__(self, kernel, wg, work_tile, done, inputs, scratch):
        self.kernel, self.wg, self.work_tile, self.done = kernel, wg, work_tile, done
        self.index, self.rule_refs, self.scratch = inputs.index, inputs.rule_refs, scratch
        self.bias_ref, self.d_bias = inputs.bias_ref, inputs.d_bias
        self.first_query = kernel.first_row(work_tile, wg)
        self.queries = pl.ds(self.first_query, ROWS)
        self.row_values = self.load_rows(kernel.rule, self.rule_refs)
        self.decides = kernel.rule.decides(self.rule_refs, work_tile, self.first_query)
        self.lse, self.delta = (
            plgpu.load(x.at[work_tile.b, work_tile.n, self.queries], layout=ROW, optimized=False)
            for x in (inputs.lse, inputs.delta)
        )

    def accumulate(self, dq_ref):
        """(dq,) over all steps."""
        scratch = self.scratch
        plgpu.barrier_wait(scratch.q_ready)
        plgpu.barrier_wait(scratch.d_out_ready)
        add = functools.partial(self.add, dq_ref)
        self.kernel.run_steps(self.wg, self.work_tile, self.done, self.decides, self.ds_of, add)
        plgpu.barrier_arrive(scratch.q_free)
        return (dq_ref[...],)

    def ds_of(self, t, masked):
        """ds of step t."""
        kernel, scratch = self.kernel, self.scratch
        slot = slot_of(self.done + t, kernel.v_stages)
        v = scratch.v_smem.at[slot].transpose((1, 0))
        bias = self.load_bias(t) if kernel.bias.loads_early else None
        words = self.load_words(t) if masked is not None and kernel.rule.tile_arrays else ()
        s = self.issue_scores(t)
        plgpu.barrier_wait(scratch.v_ready.at[slot])
        if masked is None:
            dp = kernel.issue(kernel.own_rows(self.wg, scratch.d_out_smem), v)
        s = kernel.settle(s, wait_n=1 if masked is None else 0)
        lse = lax.broadcast_in_dim(self.lse, s.shape, [0])
        if kernel.bias.exists and not kernel.bias.loads_early:
            bias = self.load_bias(t)
        keep = functools.partial(self.keep, t, words)
        p, slope = kernel.probabilities(s, lse, masked, keep, bias)
        if masked is not None:  # dp is issued only now: the rule needed its registers
            if kernel.soft_cap is None or self.d_bias is None:
                p = slope = lax.optimization_barrier(slope)  # p is not read, or it is the slope
            else:
                p, slope = lax.optimization_barrier((p, slope))
            dp = kernel.issue(kernel.own_rows(self.wg, scratch.d_out_smem), v)
        dp = kernel.settle(dp, 0)
        plgpu.barrier_arrive(scratch.v_free.at[slot])
        change = dp - lax.broadcast_in_dim(self.delta, s.shape, [0])
        if self.d_bias is not None:
            self.store_d_bias(t, p * change)
        return (slope * change).astype(v.dtype)

    def load_bias(self, t):
        """The bias of step t."""
        at = self.work_tile, self.first_query, self.first_key(t)
        return self.kernel.bias.load(self.bias_ref, *at, self.kernel.step)

    def load_words(self, t):
        """The token masks of step t."""
        at = self.work_tile, self.first_query, self.first_key(t)
        return self.kernel.rule.load_words(self.rule_refs.tiles, *at)

    def store_d_bias(self, t, d_logits):
        """The gradient of the bias in step t."""
        kernel = self.kernel
        at = self.work_tile, self.first_query, self.first_key(t)
        store_tile(d_logits, self.d_bias, *at, adds=kernel.adds, interpret=kernel.interpret)

    def add(self, dq_ref, t, ds):
        """dq += ds k."""
        slot = slot_of(self.done + t, self.kernel.stages)
        left = self.scratch.left_smem
        left = None if left is None else left.at[self.wg]
        self.kernel.add_product(dq_ref, ds, self.scratch.k_smem.at[slot], left)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.scratch.k_free.at[slot])

    def issue_scores(self, t):
        """s of step t, in flight."""
        kernel, scratch = self.kernel, self.scratch
        slot = slot_of(self.done + t, kernel.stages)
        plgpu.barrier_wait(scratch.k_ready.at[slot])
        q = kernel.own_rows(self.wg, scratch.q_smem)
        return kernel.issue(q, scratch.k_smem.at[slot].transpose((1, 0)))

    def load_rows(self, rule, refs):
        """A rule's values of this warpgroup's 64 queries."""
        return rule.load(refs.rows, self.work_tile, self.first_query, ROWS, ROW)

    def first_key(self, t):
        """The first key of step t."""
        return self.kernel.first_token(self.index, self.work_tile, t)

    def keep(self, t, words, p, rule):
        """p of step t with zeros where the rule forbids."""
        refs, row_values, step = self.rule_refs, self.row_values, self.kernel.step
        if rule is not self.kernel.rule:
            refs = refs.otherwise
            row_values = self.load_rows(rule, refs)
        first_key = self.first_key(t)
        column_values = rule.load(refs.columns, self.work_tile, first_key, step, COLUMN)
        at = self.work_tile, self.first_query, first_key
        return rule.keep(p, 0.0, *at, (0, 1), row_values, column_values, words)
