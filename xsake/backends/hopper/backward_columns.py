"""dk and dv of a kv block over the row blocks that see it; fused, its part of dq too.

The steps are in backward_steps.py. Their tiles are transposed, so that pT and dsT are the left
operands of their products without leaving the registers. Fused, dsT also goes to shared memory,
where both warpgroups read it as ds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper import backward_dq, dq_cast
from xsake.backends.hopper.backward_steps import DS_STAGES, ColumnSteps
from xsake.backends.hopper.gradient_kernel import GradientKernel
from xsake.backends.hopper.handover import Handover
from xsake.backends.hopper.layouts import COMPUTE_WGS, PANEL, ROWS, slot_of, tiles
from xsake.backends.hopper.pipeline import Resident, Ring, stream
from xsake.backends.hopper.scheduler import WorkTile


class _Scratch(NamedTuple):
    """Shared memory and mbarriers of a CTA; None where a variant does without."""

    k_smem: Any  # [block, H]
    q_smem: Any  # [stages, step, H]
    d_out_smem: Any  # [d_out_stages, step, Hv]
    statistics_smem: Any  # [stages + d_out_stages, step]: lse, delta
    k_ready: Any
    q_ready: Any  # Q and lse
    d_out_ready: Any  # d_out and delta
    k_free: Any  # V too, unless it has its own
    q_free: Any
    d_out_free: Any
    out_smem: Any = None  # staging of results
    v_smem: Any = None  # [block, Hv]
    v_ready: Any = None
    v_free: Any = None
    left_smem: Any = None  # staging of left operands, interpreter only
    ds_smem: Any = None  # [DS_STAGES, step / 64, 128 keys, 64 queries]
    dq_smem: Any = None  # [2, 64, 64] float32: staging of dq
    # With kv blocks of 64: warpgroup 1's sums on their way to warpgroup 0.
    piece_smem: Any = None
    piece_ready: Any = None
    piece_taken: Any = None
    added_smem: Any = None  # see `added`
    cast_started: Any = None


class _Context(NamedTuple):
    """What the compute role reads and writes besides its work tiles."""

    index: Any  # flat index of the transposed lists
    rule_refs: Any  # the rule's arrays
    bias_ref: Any  # or None
    outs: dict[str, Any]  # refs in global memory, by name
    scratch: _Scratch


def bytes_read_together(shape):
    """Bytes of Q and d_out of all heads that multiprocessors work on at one time."""
    B, T, S, _, K, H, Hv = shape.sizes
    heads = pl.cdiv(_jax.multiprocessors(), pl.cdiv(S, shape.block[1]))
    return min(heads, B * K) * T * (H + Hv) * 2


class ColumnsKernel(GradientKernel):
    """A work tile is a kv block; `results` are ("dk", "dv") or one of them.

    sums_bias: whether the kernel of dk also computes the gradient of a bias per key.
    """

    def __init__(self, shape, rule, tiling, *, results, fused, sums_bias=False, **static):
        H, Hv = shape.sizes.H, shape.sizes.Hv
        self.sizes = {name: {"dk": H, "dv": Hv}[name] for name in results}
        self.has_dk, self.has_dv = "dk" in results, "dv" in results
        self.fused, self.sums_bias = fused, sums_bias and self.has_dk
        self.descending = tiling.descending
        if self.descending is None:
            self.descending = bytes_read_together(shape) > tiling.l2_bytes
        self.casts = fused and tiling.cast == "kernel"
        if self.casts:
            # The cast may lag a few work tiles behind, and needs their records.
            self.warpgroups, self.record_slots = COMPUTE_WGS + 2, 4
        small = H == Hv == 64
        step = 128 if fused and small and shape.block == (128, 128) else 64
        super().__init__(shape, rule, tiling, axis=1, step=tiling.row_step or step, **static)
        self.stages, self.d_out_stages = self.stages_of(tiling.row_stages)
        panels = self.step // ROWS * H // PANEL  # of a step's dq
        if fused and (panels > COMPUTE_WGS or (self.alternate and self.step > ROWS)):
            raise ValueError(f"fused needs row_step={ROWS} for this shape, got {self.step}")
        self.dq = self._dq_strategy(panels) if fused else None
        # Whether V is released before the work tile ends.
        self.frees_v_early = self.has_dk and not self.alternate
        # One of the two dsT tiles has been read when a work tile ends: dk and dv are staged there.
        self.results_through_ds = fused and small and self.dq is backward_dq.ByRows
        # Whether the second half of a work tile's last visit may be left out. With alternating
        # steps, each warpgroup would have to count its own.
        has_ends = self.rule.is_interval and self.rule.column_arrays > 0
        self.can_shorten = has_ends and self.visit_block > ROWS and not self.alternate
        # Whether dq's row index is loaded when a step begins; with small steps that is slower.
        self.loads_index_early = fused and self.step > ROWS

    def step_count(self, work_tile, index, rule_refs):
        """(number of steps, whether the last one computes only its first 64 queries).

        The second half of the last visit is left out if its queries see no key of the block, for
        instance if the last document of the block ends in the first half of that row block. With
        steps of 64 the last one is left out of the number instead; None: all steps are whole.
        """
        steps = work_tile.count * self.splits
        if not self.can_shorten:
            return steps, None
        last_key = jnp.minimum((work_tile.i + 1) * self.tile_block, self.shape.sizes.S) - 1
        end = self.rule.end_of_column(rule_refs, work_tile, last_key)
        last_visit = jnp.maximum(work_tile.start + work_tile.count - 1, 0)
        ends = (end >= 0) & (end <= index[last_visit] * self.visit_block + ROWS)
        ends = (ends & (work_tile.count > work_tile.full)).astype(jnp.int32)
        # Opaque: otherwise the compiler keeps what the number is made of, and spills.
        if self.splits > 1:
            return self.opaque(steps - ends), None
        return steps, self.opaque(ends) > 0

    def _dq_strategy(self, panels):
        if self.alternate:
            return backward_dq.OwnSteps
        if self.step > ROWS:
            return backward_dq.ByRows
        return backward_dq.ByColumns if panels > 1 else backward_dq.AlternatingSteps

    @property
    def reuse_operand_smem(self) -> bool:
        """Whether shared memory has no space to stage dk."""
        return self.has_dk and super().reuse_operand_smem

    def __call__(self, operands, zeros, counters, interpret):
        """{"dk", "dv" or one of them, "dq" if fused, "bias_sums" if wanted}: the gradients."""
        if not self.sums_bias:
            return self.run(operands, zeros, counters, interpret)
        B, _, _, N, *_ = self.shape.sizes
        # Where both warpgroups have the same keys, each adds to sums of its own, in order.
        size = COMPUTE_WGS, B, N, self.shape.padded_keys
        sums = jax.new_ref(_jax.own_copy(jnp.zeros(size, jnp.float32), operands))
        gradients = self.run((*operands, sums), zeros, counters, interpret)
        return gradients | {"bias_sums": jax.freeze(sums).sum(axis=0)}

    def run(self, operands, zeros, counters, interpret):
        """The same without the sums."""
        B, _, _, N, *_ = self.shape.sizes
        q, k = operands[:2]
        out_type = tuple(
            jax.ShapeDtypeStruct((B, k.shape[1], N, size), q.dtype) for size in self.sizes.values()
        )
        scratch = self.scratch(q.dtype)
        name = "xsake_backward_d" + "".join(x[1] for x in self.sizes)
        if not self.fused:
            results = self.launch(name, self.body, operands, out_type, scratch, interpret)
            return dict(zip(self.sizes, results, strict=True))
        sums = jax.new_ref(zeros)
        operands, name = (*operands, sums), name + "q"
        if self.casts:
            out_type = (*out_type, jax.ShapeDtypeStruct(q.shape, q.dtype))
            operands = (*operands, jax.new_ref(counters))
            results = self.launch(name, self.body, operands, out_type, scratch, interpret)
            return dict(zip(("dk", "dv", "dq"), results, strict=True))
        dk, dv = self.launch(name, self.body, operands, out_type, scratch, interpret)
        return {"dk": dk, "dv": dv, "dq": (jax.freeze(sums) * self.scale).astype(q.dtype)}

    @property
    def out_names(self) -> tuple[str, ...]:
        """The refs after the inputs: accumulators in global memory, then results."""
        accumulators = (
            *["bias_sums"] * self.sums_bias,
            *["sums"] * self.fused,
            *["counters"] * self.casts,
        )
        return *accumulators, *self.sizes, *["dq"] * self.casts

    def scratch(self, dtype) -> dict[str, Any]:
        """The types of `_Scratch`."""
        (_, bk), step, (*_, H, Hv) = self.shape.block, self.step, self.shape.sizes
        stages, d_out_stages = self.stages, self.d_out_stages
        free = dict(num_arrivals=self.consumers)
        scratch = dict(
            k_smem=tiles(bk, H, dtype=dtype),
            q_smem=tiles(stages, step, H, dtype=dtype),
            d_out_smem=tiles(d_out_stages, step, Hv, dtype=dtype),
            **self.staging_scratch(self.sizes.values(), dtype),
            # One allocation for lse and delta: each would be padded to 1,024 bytes.
            statistics_smem=plgpu.SMEM((stages + d_out_stages, step), jnp.float32),
            k_ready=plgpu.Barrier(),
            q_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            d_out_ready=plgpu.Barrier(num_arrivals=1 + self.has_dk, num_barriers=d_out_stages),
            k_free=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
            q_free=plgpu.Barrier(num_barriers=stages, **free),
            d_out_free=plgpu.Barrier(num_barriers=d_out_stages, **free),
        )
        if self.has_dk:
            scratch["v_smem"] = tiles(bk, Hv, dtype=dtype)
            scratch["v_ready"] = plgpu.Barrier()
        if self.frees_v_early:
            scratch["v_free"] = plgpu.Barrier(num_arrivals=COMPUTE_WGS)
        if self.interpret:
            scratch["left_smem"] = tiles(COMPUTE_WGS, ROWS, step, dtype=dtype)
        if self.casts:
            if not self.scheduler.has_counter:
                scratch["added_smem"] = plgpu.SMEM((COMPUTE_WGS,), jnp.int32)
            scratch["cast_started"] = plgpu.Barrier()
        if self.fused:
            buffers = (1 if self.alternate else DS_STAGES), step // ROWS
            scratch["ds_smem"] = tiles(*buffers, COMPUTE_WGS * ROWS, ROWS, dtype=dtype)
            scratch["dq_smem"] = tiles(COMPUTE_WGS, ROWS, PANEL, dtype=jnp.float32)
            if self.results_through_ds:
                del scratch["out_smem"]
            if self.alternate:  # shared memory is full: dq_smem and ds_smem are used instead
                del scratch["piece_smem"], scratch["out_smem"]
        return scratch

    def body(self, q, k, v, d_out, lse, delta, table, index, *refs, **buffers):
        """One CTA: what its warpgroups do."""
        rule_refs, refs = self.rule.split(refs)
        bias_ref, written = self.bias.split(refs)
        work, others = self.scheduler.work_of(table, buffers)
        scratch = _Scratch(**others)
        outs = dict(zip(self.out_names, written, strict=True))
        context = _Context(index, rule_refs, bias_ref, outs, scratch)
        self.run_roles(
            lambda wg: self.compute(wg, work, context),
            lambda: self.memory(q, k, v, d_out, lse, delta, work, context),
            self.cast_role(q.dtype, work, context),
        )

    # Memory warpgroup

    def memory(self, q_gmem, k_gmem, v_gmem, d_out_gmem, lse_gmem, delta_gmem, work, context):
        """Copies K, V once per work tile and Q, d_out once per step, as soon as slots are free."""
        copy, index, scratch = plgpu.copy_gmem_to_smem, context.index, context.scratch
        lse_smem, delta_smem = self.statistics(scratch)

        def load_q(tile, queries, slot):
            ready = scratch.q_ready.at[slot]
            copy(q_gmem.at[tile.b, queries, tile.n], scratch.q_smem.at[slot], ready)
            copy(lse_gmem.at[tile.b, tile.n, queries], lse_smem.at[slot], ready)

        def load_d_out(tile, queries, slot):
            ready = scratch.d_out_ready.at[slot]
            copy(d_out_gmem.at[tile.b, queries, tile.n], scratch.d_out_smem.at[slot], ready)
            if self.has_dk:
                copy(delta_gmem.at[tile.b, tile.n, queries], delta_smem.at[slot], ready)

        def keys_of(gmem):
            return lambda tile: self.tokens_of(tile, gmem, self.kv_head(tile))

        residents = [Resident(keys_of(k_gmem), scratch.k_smem, scratch.k_ready, scratch.k_free)]
        if self.has_dk:
            v = Resident(keys_of(v_gmem), scratch.v_smem, scratch.v_ready, scratch.v_free)
            residents = [v, *residents] if self.frees_v_early else [*residents, v]

        q_ring = Ring(self.stages, lambda x: plgpu.barrier_wait(scratch.q_free.at[x]), load_q)
        d_out_ring = Ring(
            self.d_out_stages, lambda x: plgpu.barrier_wait(scratch.d_out_free.at[x]), load_d_out
        )
        stream(
            self,
            work,
            index,
            q_ring,
            d_out_ring,
            residents,
            residents_last=self.frees_v_early,
            step_count=lambda tile: self.step_count(tile, index, context.rule_refs)[0],
        )

    def statistics(self, scratch):
        """(lse, delta) in shared memory, by slot."""
        smem = scratch.statistics_smem
        return smem.at[pl.ds(0, self.stages)], smem.at[pl.ds(self.stages, self.d_out_stages)]

    # Cast warpgroup

    def cast_role(self, dtype, work, context):
        """The cast of dq, if this kernel does it; otherwise None."""
        if not self.casts:
            return None
        max_polls = self.tiling.max_polls if self.scheduler.persistent else 0
        cast = dq_cast.Cast(self, dtype, max_polls)
        added = self.added(work, context.scratch)
        refs = (context.outs[name] for name in ("counters", "sums", "dq"))
        return lambda: cast.run(work, context.index, *refs, added, context.scratch.cast_started)

    def added(self, work, scratch):
        """For each compute warpgroup, the number of work tiles whose part of dq it has added.

        With the "counter" schedule the two integers are in the padding of a record's slot, because
        no shared memory is left.
        """
        if not self.scheduler.has_counter:
            return scratch.added_smem
        return work.record_smem.at[0, pl.ds(len(WorkTile._fields) + 2, COMPUTE_WGS)]

    # Compute warpgroups

    def compute(self, wg, work, context):
        """64 keys of every work tile: dk and dv over its steps, then one store."""
        scratch = context.scratch
        if self.casts:
            added = self.added(work, scratch).at[pl.ds(wg, 1)]
            plgpu.barrier_wait(scratch.cast_started)

        def compute_tile(tile, done):
            tile_steps = ColumnSteps(self, wg, tile, done, context)
            sizes = [(ROWS, size) for size in self.sizes.values()]
            results = self.accumulate_unless_empty(tile_steps.accumulate, tile, sizes)
            results = dict(zip(self.sizes, results, strict=True))
            self.store_results(tile_steps, results, context)
            if self.casts:
                # Waits for the additions to dq; the copies of dk and dv, issued after them, may
                # still be in flight.
                result_copies = 0 if self.alternate else sum(self.sizes.values()) // PANEL
                plgpu.wait_smem_to_gmem(result_copies)
                dq_cast.report_added(added)
            return done + tile_steps.steps

        self.scheduler.for_each_tile(work, compute_tile, 0)
        plgpu.wait_smem_to_gmem(0)
        if self.casts:
            plgpu.set_max_registers(self.tiling.memory_registers, action="decrease")

    def store_results(self, tile_steps, results, context):
        """dv and scale * dk to global memory."""
        wg, tile, scratch = tile_steps.wg, tile_steps.work_tile, context.scratch
        keys = pl.ds(tile_steps.first_key, ROWS)
        stores = [
            (results[name], scale, context.outs[name].at[tile.b, keys, tile.n])
            for name, scale in (("dv", 1.0), ("dk", self.scale))
            if name in results
        ]
        if self.results_through_ds:
            self.store_through_ds(wg, stores, tile_steps)
            return
        panel_smem, staging = scratch.piece_smem, scratch.out_smem
        if self.fused and self.alternate:
            panel_smem, staging = scratch.dq_smem.at[1], scratch.ds_smem.at[0, :, pl.ds(0, ROWS)]
        handover = Handover(panel_smem, scratch.piece_ready, scratch.piece_taken)
        if self.reuse_operand_smem:
            staging = self.own_rows(wg, scratch.k_smem)
        else:
            staging = staging.at[0 if self.alternate else wg]
        for result, scale, gmem in stores:
            self.store(wg, result, scale, staging, gmem, handover)

    def store_through_ds(self, wg, stores, tile_steps):
        """Stages results in the dsT tile of the last but one step of a work tile.

        Both warpgroups have read that tile: they have synchronized since. After a work tile without
        steps, the previous stores may still read it.
        """
        steps = tile_steps.steps
        ds_smem = tile_steps.scratch.ds_smem.at[slot_of(tile_steps.done + steps, DS_STAGES)]
        pl.when(steps == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        buffers = [ds_smem.at[i, self.half(wg)] for i in range(len(stores))]
        for buffer, (result, scale, _) in zip(buffers, stores, strict=True):
            buffer[...] = (result * scale).astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, (*_, gmem) in zip(buffers, stores, strict=True):
            plgpu.copy_smem_to_gmem(buffer, gmem)

    def half(self, wg):
        """This warpgroup's 64 of the 128 rows of a dsT tile, or of the 128 columns of k and dq."""
        return pl.ds(self.opaque(wg) * ROWS, ROWS)
