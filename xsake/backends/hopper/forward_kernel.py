"""Block-sparse attention forward on Hopper (sm90), in Pallas Mosaic GPU.

A work tile is a row block of 128 queries of one head (64 and 192: see kernel.py). A CTA computes
work tiles one after another:

    warpgroup 2, memory      record ─ kv_index[t] ─ TMA ─▶ K ring, V ring         (runs ahead)
    warpgroup 0, rows  0-63  ─┐ S = Q Kᵀ ─ softmax ─ acc += P V                   (0 and 1 alternate
    warpgroup 1, rows 64-127 ─┘                                              at the tensor cores)

A block that no list names is neither loaded nor multiplied. The compute warpgroups issue their
products in alternation, so that the softmax of one overlaps with the products of the other.
forward_steps.py has the steps of one work tile, work_table.py makes the table of work tiles.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper import barriers
from xsake.backends.hopper.bias_tile import bias_operands
from xsake.backends.hopper.forward_steps import TileSteps, over_columns
from xsake.backends.hopper.handover import Handover
from xsake.backends.hopper.kernel import BlockKernel
from xsake.backends.hopper.layouts import (
    ALIGNED,
    COLUMN,
    COMPUTE_WGS,
    LOG2E,
    PANEL,
    ROW,
    ROWS,
    SHARED_BYTES,
    pad_tokens,
    round_up,
    shared_bytes,
    tiles,
)
from xsake.backends.hopper.pipeline import Resident, Ring, stream
from xsake.backends.hopper.rule_tile import rule_operands
from xsake.backends.hopper.shape import Shape
from xsake.backends.hopper.statistics_tile import StatisticsTile, Sums, mean_mass
from xsake.backends.hopper.work_table import work_table
from xsake.backends.kernel_rule import KernelRule
from xsake.backends.options import ForwardTiling
from xsake.backends.statistics import Observed
from xsake.block_mask.lists import Lists

# Columns of the output that are staged at a time. At H = 256 a whole tile does not fit in shared
# memory together with Q, K and V.
OUT_COLUMNS = 128
DEFAULT_TILING = ForwardTiling()
SHARERS = 2  # warpgroups at the barrier of a turn: the one that waits and the one that passes it


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: Lists,
    *,
    block: tuple[int, int] = (128, 128),
    rule: KernelRule | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    bias: jax.Array | None = None,
    tiling: ForwardTiling = DEFAULT_TILING,
    statistics: Observed | None = None,
    sinks: jax.Array | None = None,
    mass_block: int | None = None,
    table: jax.Array | np.ndarray | None = None,
    rows_per_q: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Attention over the listed blocks: out [B, T, N, Hv] like q, logsumexp [B, N, T] float32.

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], bias [B|1, N|1, T|1, S] of bfloat16, float16 or
    float32; one value per key is float32. A row that sees no key gets zeros and -inf.

    With `rows_per_q`, batch row r of k and v reads row r // rows_per_q of q. `table` is the work
    table, where it is known before the call is compiled. It must suit the tiling's schedule: with
    "counter" it is written to, so it cannot be a constant.

    With `statistics` also, in float32: the mean mass of every block [B, N, row blocks, kv blocks],
    in whose denominator `sinks` are: float32 [N], the logarithm of their sum; and the entropy over
    blocks, and for "tokens" that over keys, [B, N, T] in nats, without sinks. Row blocks of the
    mass have `mass_block` tokens, a multiple of 64; None: as those of the lists.
    """
    all_rows = jax.ShapeDtypeStruct((q.shape[0] * rows_per_q, *q.shape[1:]), q.dtype)
    shape = Shape.of(all_rows, k, v, lists, block)
    B, T, _, N, _, H, Hv = shape.sizes
    q, k, v = (pad_tokens(x, round_up(x.shape[1], ALIGNED)) for x in (q, k, v))
    if table is None:
        with jax.named_scope("work_table"):
            table = work_table(lists, B, N, shape.sizes.K, shape.kv_bytes, tiling, interpret)
    rule = rule or KernelRule(None)
    kernel = _Kernel(
        shape,
        rule,
        tiling,
        rows_per_q,
        scale=1 / math.sqrt(H) if scale is None else scale,
        soft_cap=soft_cap,
        bias=bias,
        interpret=interpret,
    )
    if statistics:
        kernel.observe(statistics, sinks is not None, lists, q.dtype)
    others = (
        lists.kv_index.reshape(-1),
        *rule_operands(rule, shape, axis=0),
        *bias_operands(bias, shape),
        *([] if sinks is None else [sinks]),
    )
    table = _jax.own_copy(jnp.asarray(table), (q, k, v, *others))
    out, lse, *more = kernel.launch(
        "xsake_forward",
        kernel.body,
        (q, k, v, table, *others),
        (
            jax.ShapeDtypeStruct((B, q.shape[1], N, Hv), q.dtype),
            # Whole row blocks: the copy of a block's logsumexp needs no guard.
            jax.ShapeDtypeStruct((B, N, shape.padded_rows), jnp.float32),
            *(kernel.statistics.out_type() if statistics else ()),
        ),
        kernel.scratch(q.dtype),
        interpret,
    )
    if not statistics:
        return out[:, :T], lse[..., :T]
    count = kernel.statistics.entropies
    entropies, mass = more[:count], more[count]
    mass = mean_mass(mass, T, mass_block or block[0], shape.kv_blocks)
    return out[:, :T], lse[..., :T], mass, *(x[..., :T] for x in entropies)


class _Scratch(NamedTuple):
    """Shared memory and mbarriers of a CTA.

    A `ready` barrier says that a copy has arrived, a `free` barrier that the compute warpgroups
    have read it.
    """

    q_smem: Any  # [block, H]
    k_smem: Any  # [stages, step, H]
    v_smem: Any  # [stages, step, Hv]
    out_smem: Any  # [consumers, 64, staged columns]
    rows_smem: Any  # [values per row, consumers, 64]: the logsumexp; with statistics, entropies
    q_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any
    k_free: Any  # k_free and v_free: interpreter only; the GPU uses named barriers
    v_free: Any
    # With row blocks of 64: warpgroup 1's acc, m and l on their way to warpgroup 0.
    piece_smem: Any = None
    m_l_smem: Any = None
    piece_ready: Any = None
    piece_taken: Any = None
    bias_smem: Any = None  # [compute warpgroups, 64 · step], with `bias_in_shared`
    logs_smem: Any = None  # [consumers, visits, 64], with statistics if there is space


class _Kernel(BlockKernel):
    """The kernel body and its roles.

    rows_per_q: batch rows of k and v that share a batch row of q.
    """

    statistics: Any = None  # a StatisticsTile, if they are wanted

    def __init__(self, shape, rule, tiling, rows_per_q, **static):
        self.rows_per_q = rows_per_q
        large = shape.largest_head > 128
        step = tiling.step or min(shape.block[1], 64 if large else 128)
        self.stages = tiling.stages or (4 if step == 64 and not large else 2)
        in_shared = tiling.bias_in_shared and not large  # else there is no space
        super().__init__(shape, rule, tiling, axis=0, step=step, bias_in_shared=in_shared, **static)
        self.check_stages(self.stages)
        if self.first_free + 2 * self.stages > barriers.COUNT:
            most = (barriers.COUNT - self.first_free) // 2
            raise ValueError(f"stages can be at most {most} here, got {self.stages}")
        # Whether the compute warpgroups alternate at the tensor cores.
        self.alternate_products = (
            tiling.alternate_products and not self.alternate and not self.interpret
        )

    def observe(self, what, has_sinks, lists, dtype):
        """Adds statistics; their logarithms are in shared memory if there is space."""
        most_visits = min(lists.kv_index.shape[-1], self.shape.kv_blocks)
        self.statistics = StatisticsTile(self, what == "tokens", has_sinks, most_visits)
        used = shared_bytes(self.scratch(dtype) | self.scheduler.scratch())
        self.statistics.in_shared = self.statistics.log_bytes <= SHARED_BYTES - used

    @property
    def row_values(self) -> int:
        """Values that are stored for each row: the logsumexp, and entropies if they are wanted."""
        return 1 if self.statistics is None else 1 + self.statistics.entropies

    def scratch(self, dtype) -> dict[str, Any]:
        """The types of `_Scratch`."""
        shape, stages = self.shape, self.stages
        ready = plgpu.Barrier(num_barriers=stages)
        free = plgpu.Barrier(num_barriers=stages, num_arrivals=self.consumers)
        out_columns = PANEL if self.alternate else min(shape.sizes.Hv, OUT_COLUMNS)
        scratch = dict(
            q_smem=tiles(shape.block[0], shape.sizes.H, dtype=dtype),
            k_smem=tiles(stages, self.step, shape.sizes.H, dtype=dtype),
            v_smem=tiles(stages, self.step, shape.sizes.Hv, dtype=dtype),
            out_smem=tiles(self.consumers, ROWS, out_columns, dtype=dtype),
            rows_smem=plgpu.SMEM((self.row_values, self.consumers, ROWS), jnp.float32),
            q_ready=plgpu.Barrier(),
            k_ready=ready,
            v_ready=ready,
            q_free=plgpu.Barrier(num_arrivals=self.compute_wgs),
            k_free=free,
            v_free=free,
        )
        if self.alternate:
            scratch["piece_smem"] = tiles(ROWS, PANEL, dtype=jnp.float32)
            scratch["m_l_smem"] = plgpu.SMEM((self.row_values + 1, ROWS), jnp.float32)
            scratch |= Handover.barriers()
        if self.statistics is not None:
            scratch |= self.statistics.scratch()
        return scratch | self.bias.scratch(self.compute_wgs, self.step)

    def body(self, q_gmem, k_gmem, v_gmem, table, index, *refs, **buffers):
        """One CTA: what its warpgroups do."""
        work, others = self.scheduler.work_of(table, buffers)
        scratch = _Scratch(**others)
        rule_refs, others = self.rule.split(refs)
        bias_ref, outs = self.bias.split(others)
        sinks = None
        if self.statistics is not None:
            sinks, outs = self.statistics.split(outs)
        inputs = index, rule_refs, bias_ref
        self.run_roles(
            lambda wg: self.compute(wg, work, inputs, sinks, outs, scratch),
            lambda: self.memory(q_gmem, k_gmem, v_gmem, work, index, scratch),
        )

    # Barriers

    @property
    def first_turn(self) -> int:
        """The named barrier of warpgroup 0's turn, after Mosaic's own."""
        return barriers.TURN + self.compute_wgs - COMPUTE_WGS

    @property
    def first_free(self) -> int:
        """The named barrier of slot 0 of K's ring."""
        return self.first_turn + self.compute_wgs

    def k_slots(self, scratch):
        """Signals that slots of K's ring are free."""
        return barriers.FreeSlots(scratch.k_free, self.first_free, self.consumers, self.interpret)

    def v_slots(self, scratch):
        """Signals that slots of V's ring are free."""
        first = self.first_free + self.stages
        return barriers.FreeSlots(scratch.v_free, first, self.consumers, self.interpret)

    def await_turn(self, wg):
        """Waits until the compute warpgroup before this one has issued its products."""
        if self.alternate_products:
            barriers.sync(self.first_turn + wg, SHARERS)

    def pass_turn(self, wg):
        """Lets the next compute warpgroup issue its products."""
        if self.alternate_products:
            following = lax.rem(wg + 1, jnp.int32(self.compute_wgs))
            barriers.arrive(self.first_turn + following, SHARERS)

    # Memory warpgroup

    def memory(self, q_gmem, k_gmem, v_gmem, work, index, scratch):
        """Copies Q once per work tile and K, V once per step, as soon as their slots are free."""

        def load_k(tile, keys, slot):
            gmem = k_gmem.at[tile.b, keys, self.kv_head(tile)]
            plgpu.copy_gmem_to_smem(gmem, scratch.k_smem.at[slot], scratch.k_ready.at[slot])

        def load_v(tile, keys, slot):
            gmem = v_gmem.at[tile.b, keys, self.kv_head(tile)]
            plgpu.copy_gmem_to_smem(gmem, scratch.v_smem.at[slot], scratch.v_ready.at[slot])

        def q_tile(tile):
            if self.rows_per_q > 1:
                tile = tile._replace(b=lax.div(tile.b, jnp.int32(self.rows_per_q)))
            return self.tokens_of(tile, q_gmem, tile.n)

        k_ring = Ring(self.stages, self.k_slots(scratch).wait, load_k)
        v_ring = Ring(self.stages, self.v_slots(scratch).wait, load_v)
        residents = [Resident(q_tile, scratch.q_smem, scratch.q_ready, scratch.q_free)]
        stream(self, work, index, k_ring, v_ring, residents)

    # Compute warpgroups

    def compute(self, wg, work, inputs, sinks, outs, scratch):
        """64 rows of every work tile: online softmax over its visits, then one store."""
        for_mass = inputs[0], outs, sinks

        def compute_tile(tile, done):
            after = done + tile.count * self.splits
            steps = self.steps_of(wg, tile, done, *inputs, outs, scratch)
            if self.statistics is not None:
                self.clear_mass(tile, wg, outs)
            if self.alternate:  # a warpgroup without a step of its own waits for Q too
                pl.when(tile.count > 0)(lambda: plgpu.barrier_wait(scratch.q_ready))
            acc, m, l = steps.overlapped() if self.tiling.overlap else steps.in_sequence()
            if self.compute_wgs > COMPUTE_WGS:
                steps.leave_out(tile.count * self.splits)
            if not self.alternate:
                self.store(tile, steps.count, wg, acc, m, l, for_mass, outs, scratch)
                return after
            pl.when(tile.count > 0)(lambda: plgpu.barrier_arrive(scratch.q_free))
            self.store_merged(tile, wg, acc, m, l, for_mass, outs, scratch)
            return after

        # Warpgroup 0 issues products first. It waits once more at the end, below, to consume the
        # arrival of the last warpgroup at the barrier.
        pl.when(wg == self.compute_wgs - 1)(lambda: self.pass_turn(wg))
        self.scheduler.for_each_tile(work, compute_tile, 0)
        pl.when(wg == 0)(lambda: self.await_turn(wg))
        plgpu.wait_smem_to_gmem(0)

    def clear_mass(self, tile, wg, outs):
        """Zeros for the masses of a work tile, by the warpgroup that will store them."""
        if self.alternate:
            pl.when(wg == 0)(lambda: self.statistics.clear_mass(tile, outs, 0))
        else:
            self.statistics.clear_mass(tile, outs, wg)

    def steps_of(self, wg, tile, done, index, rule_refs, bias_ref, outs, scratch):
        """The steps of a work tile; `done` steps of other work tiles came before."""
        q_rows = scratch.q_smem.at[pl.ds(0 if self.alternate else wg * ROWS, ROWS)]
        first_row = self.first_row(tile, wg)
        row_values = self.rule.load(rule_refs.rows, tile, first_row, ROWS, ROW)
        decides = self.rule.decides(rule_refs, tile, first_row)

        def load_bias(t):
            at = tile, first_row, self.first_token(index, tile, t)
            if self.bias.in_shared:
                return self.bias.copy(bias_ref, scratch.bias_smem.at[wg], *at, self.step)
            return self.bias.load(bias_ref, *at, self.step)

        def load_words(t):
            at = tile, first_row, self.first_token(index, tile, t)
            return self.rule.load_words(rule_refs.tiles, *at)

        def mask(s, t, rule, words):
            """The scores of step t with -inf where the rule, or its otherwise, forbids."""
            refs, values = rule_refs, row_values
            if rule is not self.rule:  # the slower case, which leaves registers to the other one
                refs = rule_refs.otherwise
                values = rule.load(refs.rows, tile, first_row, ROWS, ROW)
            first_key = self.first_token(index, tile, t)
            column_values = rule.load(refs.columns, tile, first_key, self.step, COLUMN)
            at = tile, first_row, first_key
            return rule.keep(s, -jnp.inf, *at, (0, 1), values, column_values, words)

        def settle(sums, m, t):
            return self.statistics.settle(sums, m, outs, scratch, wg, t)

        own_steps = self.own_steps(wg, tile, done)
        loads = load_bias, load_words
        return TileSteps(self, wg, done, own_steps, decides, loads, mask, settle, q_rows, scratch)

    def own_steps(self, wg, work_tile, done, steps=None):
        """As of all kernels; but of 192 rows, a warpgroup leaves out the steps that it cannot see.

        A row block of the mask may drop what the work tile visits for other rows, and that may be
        NaN. The rule is causal, so these steps are the last ones, and the first one is seen.
        """
        first, full, count = super().own_steps(wg, work_tile, done, steps)
        if self.compute_wgs == COMPUTE_WGS:
            return first, full, count
        last_row = jnp.minimum(self.first_row(work_tile, wg) + ROWS, self.shape.sizes.T) - 1
        _, end = self.rule.bounds(last_row)
        seen = lax.div(end + (self.step - 1), jnp.int32(self.step))
        return first, full, jnp.minimum(count, seen)

    def store(self, tile, visits, wg, acc, m, l, for_mass, outs, scratch):
        """out = acc / l and logsumexp = m + log l; zeros and -inf in rows that saw no key."""
        rows, normalizer = _finish(m, l)
        out = (acc * over_columns(normalizer, acc)).astype(scratch.out_smem.dtype)
        queries = pl.ds(self.first_row(tile, wg), ROWS)
        for column in range(0, self.shape.sizes.Hv, scratch.out_smem.shape[-1]):
            self.copy_out(tile, wg, queries, column, out, rows, outs, scratch)
        if self.statistics is not None:
            self.statistics.store_mass(tile, visits, wg, queries.start, *for_mass, scratch)

    def store_merged(self, tile, wg, acc, m, l, for_mass, outs, scratch):
        """The same where each warpgroup has half of the visits: warpgroup 0 merges both.

        It takes warpgroup 1's acc one panel at a time.
        """
        handover = Handover(scratch.piece_smem, scratch.piece_ready, scratch.piece_taken)
        m_l = [scratch.m_l_smem.at[at] for at in range(scratch.m_l_smem.shape[0])]

        @pl.when(wg == 1)
        def _():
            handover.give(acc, zip(m_l, jax.tree.leaves((m, l)), strict=True))
            if self.statistics is not None:  # the logarithms of this work tile are read
                plgpu.barrier_wait(scratch.piece_taken)

        @pl.when(wg == 0)
        def _():
            panel, (other_m, *other_l) = handover.take(m_l)
            larger = jnp.maximum(m, other_m)
            base = jnp.where(larger == -jnp.inf, 0.0, larger)
            own_shrink, other_shrink = jnp.exp2(m - base), jnp.exp2(other_m - base)
            if self.statistics is None:
                merged = l * own_shrink + other_l[0] * other_shrink
            else:
                moved = Sums(*other_l).moved(other_m, base, other_shrink)
                merged = jax.tree.map(jnp.add, l.moved(m, base, own_shrink), moved)
            rows, normalizer = _finish(larger, merged)
            queries = pl.ds(self.first_row(tile, 0), ROWS)
            for column in range(0, self.shape.sizes.Hv, PANEL):
                if column > 0:
                    panel, _ = handover.take()
                own = acc[:, column : column + PANEL] * over_columns(own_shrink * normalizer, panel)
                out = own + panel * over_columns(other_shrink * normalizer, panel)
                self.copy_out(tile, 0, queries, column, out, rows, outs, scratch)
            if self.statistics is not None:
                self.statistics.store_mass(tile, tile.count, 0, queries.start, *for_mass, scratch)
                plgpu.barrier_arrive(scratch.piece_taken)

    def copy_out(self, tile, wg, queries, column, out, rows, outs, scratch):
        """Columns of the output, and with the first of them the values per row, to global memory.

        `out` is the whole tile, or as many of its columns as shared memory stages at a time.
        """
        out_smem = scratch.out_smem
        out_gmem, *rows_gmem = outs
        width = out_smem.shape[-1]
        # The previous copies must have read the buffers.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if out.shape[-1] > width:
            out = out[:, column : column + width]
        out_smem[wg] = out.astype(out_smem.dtype)
        if column == 0:
            for at, values in enumerate(rows):
                scratch.rows_smem[at, wg] = values
        plgpu.commit_smem()
        if column == 0:
            for at, gmem in enumerate(rows_gmem[: len(rows)]):
                plgpu.copy_smem_to_gmem(
                    scratch.rows_smem.at[at, wg],
                    gmem.at[tile.b, tile.n, queries],
                    commit_group=False,
                )
        # TMA drops rows past T.
        plgpu.copy_smem_to_gmem(
            out_smem.at[wg], out_gmem.at[tile.b, queries, tile.n, pl.ds(column, width)]
        )


def _finish(m, l):
    """([logsumexp, …], the factor that normalizes acc) of rows with maximum m and sum l.

    With statistics, the entropies follow the logsumexp.
    """
    entropies = []
    if isinstance(l, Sums):
        entropies, l = l.entropies(), l.l
    seen = l > 0
    # In a row without keys m is -inf and l is 0: log2(1) - inf is the right answer.
    lse = (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E)
    return [lse, *entropies], jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
