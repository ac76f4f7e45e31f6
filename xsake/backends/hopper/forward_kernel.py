"""Block-sparse attention forward on Hopper (sm90), in Pallas Mosaic GPU.

One work item is a row block of 128 queries of one head (64: see hopper_items.py). A CTA takes items
one after another:

    warpgroup 2, memory      record of the item ─ kv_index[t] ─ TMA ─▶ K ring, V ring  (runs ahead)
    warpgroup 0, rows  0-63  ─┐ S = Q Kᵀ ─ softmax ─ acc += P V             (0 and 1 take turns at
    warpgroup 1, rows 64-127 ─┘                                                   the tensor cores)

A block that no list names is neither loaded nor multiplied. Because the compute warpgroups take
turns, one's softmax hides behind the other's products; with `overlap`, a warpgroup also issues the
scores of its next visit before the values of this one, so its own softmax has a product behind it.

m (running maximum, in base 2), l (running sum) and acc are named as in xla.py and tpu_kernels.py.
This file is one kernel body and its roles; hopper_tables.py makes the table of work it reads.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from xsake.backends.hopper.items import (
    COLUMN,
    COMPUTE,
    LOG2E,
    PIECE,
    ROW,
    ROWS,
    THREADS,
    TILE,
    BlockKernel,
    Handover,
    Resident,
    Ring,
    check_sizes,
    tiles,
)
from xsake.backends.hopper.work_table import work_table
from xsake.backends.kernel_rule import KernelRule
from xsake.backends.options import ForwardTiling
from xsake.block_mask.lists import Lists

# The output leaves in pieces so wide: at H = 256 a whole tile has no room beside Q, K and V
OUT_COLUMNS = 128

# Named barriers 0 to 3 belong to Mosaic (the CTA and its warpgroups).
TURN_BARRIER = 4
FREE_BARRIER = TURN_BARRIER + COMPUTE


DEFAULT_TILING = ForwardTiling()


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
    sinks: jax.Array | None = None,
    tiling: ForwardTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the listed blocks: out [B, T, N, Hv] like q, logsumexp [B, N, T] float32.

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]. A row that sees no key gets zeros and -inf.
    `sinks` float32 [N] is the logsumexp of each head's sinks: it joins the denominator of out, not
    the logsumexp.
    """
    shape = _Shape.of(q, k, v, lists, block, tiling)
    # Shared memory is tiled by 8 rows, and Mosaic wants the same of what it copies from and to.
    q, k, v = (_pad_tokens(x, -(-x.shape[1] // 8) * 8) for x in (q, k, v))
    work = work_table(
        lists, shape.batch, shape.heads, shape.kv_heads, shape.kv_bytes, tiling, interpret
    )
    rule = rule or KernelRule(None)
    # A tile of these may be read past the end; what it finds there is masked.
    key_blocks = pl.cdiv(shape.keys, block[1])
    rows = tuple(_pad_tokens(x, shape.row_blocks * block[0]) for x in rule.rows)
    columns = tuple(_pad_tokens(x, key_blocks * block[1]) for x in rule.columns)
    kernel = _Kernel(
        shape,
        rule,
        tiling,
        scale=1 / math.sqrt(shape.size) if scale is None else scale,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        interpret=interpret,
    )
    operands = (q, k, v, work, lists.kv_index.reshape(-1))
    out, lse = kernel.launch(
        "xsake_forward",
        kernel.body,
        (*operands, *(() if sinks is None else (sinks,)), *rows, *columns),
        (
            jax.ShapeDtypeStruct((shape.batch, q.shape[1], shape.heads, shape.value_size), q.dtype),
            # Whole row blocks, so that the copy of a block's logsumexp needs no guard.
            jax.ShapeDtypeStruct(
                (shape.batch, shape.heads, shape.row_blocks * block[0]), jnp.float32
            ),
        ),
        kernel.scratch(q.dtype),
        interpret,
    )
    return out[:, : shape.queries], lse[..., : shape.queries]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes, checked."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    block: tuple[int, int]
    kv_bytes: int  # K and V of one kv head of one batch row
    step: int  # keys per product
    stages: int  # K and V tiles in flight, each

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.queries, self.block[0])

    @classmethod
    def of(cls, q, k, v, lists, block, tiling):
        batch, queries, heads, size = q.shape
        _, keys, kv_heads, value_size = v.shape
        if k.shape != (batch, keys, kv_heads, size):
            raise ValueError(
                f"key is {k.shape}; this query and value ask for {(batch, keys, kv_heads, size)}"
            )
        check_sizes(block, size, value_size)
        large = max(size, value_size) > 128
        step = tiling.step or min(block[1], 64 if large else 128)
        stages = tiling.stages or (4 if step == 64 and not large else 2)
        if lists.kv_count.shape[-1] != pl.cdiv(queries, block[0]):
            raise ValueError(
                f"the lists have {lists.kv_count.shape[-1]} rows, {queries} queries in blocks of "
                f"{block[0]} have {pl.cdiv(queries, block[0])}"
            )
        kv_bytes = keys * (size + value_size) * k.dtype.itemsize
        return cls(
            batch,
            queries,
            keys,
            heads,
            kv_heads,
            size,
            value_size,
            tuple(block),
            kv_bytes,
            step,
            stages,
        )


def _pad_tokens(x, length):
    """[B, T, ...] with zeros up to `length` tokens; nothing is copied when that is T already."""
    if x.shape[1] == length:
        return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def _splat(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _over(x, tile):
    """A value per row, repeated over the columns of `tile`."""
    return lax.broadcast_in_dim(x, tile.shape, [0])


class _Kernel(BlockKernel):
    """The kernel body and its roles."""

    def __init__(self, shape, rule, tiling, *, scale, soft_cap, has_sinks, interpret):
        self.tiling = tiling
        self.stages = shape.stages
        self.scale = scale
        self.soft_cap = soft_cap
        self.has_sinks = has_sinks
        super().__init__(
            shape,
            rule,
            tiling,
            item_block=shape.block[0],
            visit_block=shape.block[1],
            items=shape.batch * shape.heads * shape.row_blocks,
            step=shape.step,
            persistent=tiling.persistent,
            interpret=interpret,
        )
        if self.stages % self.stride:
            raise ValueError(f"blocks of {ROWS} take an even number of stages, not {self.stages}")

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        shape, stages = self.shape, self.stages
        ready = plgpu.Barrier(num_barriers=stages)
        free = plgpu.Barrier(num_barriers=stages, num_arrivals=self.consumers)
        scratch = dict(
            q_smem=tiles(shape.block[0], shape.size, dtype=dtype),
            k_smem=tiles(stages, self.step, shape.size, dtype=dtype),
            v_smem=tiles(stages, self.step, shape.value_size, dtype=dtype),
            out_smem=tiles(self.consumers, ROWS, self.out_columns, dtype=dtype),
            lse_smem=plgpu.SMEM((self.consumers, ROWS), jnp.float32),
            q_ready=plgpu.Barrier(),
            k_ready=ready,
            v_ready=ready,
            q_free=plgpu.Barrier(num_arrivals=COMPUTE),
            k_free=free,
            v_free=free,
        )
        if self.alternate:
            scratch["piece_smem"] = tiles(ROWS, PIECE, dtype=jnp.float32)
            scratch["m_l_smem"] = plgpu.SMEM((2, ROWS), jnp.float32)
            scratch |= Handover.barriers()
        return scratch

    @property
    def out_columns(self) -> int:
        return PIECE if self.alternate else min(self.shape.value_size, OUT_COLUMNS)

    def body(self, q_gmem, k_gmem, v_gmem, table, index, *refs, **scratch):
        work, scratch = self.work_of(table, scratch)
        sinks, refs = (refs[0], refs[1:]) if self.has_sinks else (None, refs)
        rows, refs = refs[: self.num_rows], refs[self.num_rows :]
        columns, (out_gmem, lse_gmem) = refs[: self.num_columns], refs[self.num_columns :]
        self.run_roles(
            self.tiling,
            lambda wg: self.compute(
                wg, work, index, sinks, rows, columns, out_gmem, lse_gmem, **scratch
            ),
            lambda: self.memory(q_gmem, k_gmem, v_gmem, work, index, **scratch),
        )

    # Barriers. The interpreter cannot run inline code: it takes mbarriers, and needs no turns.

    @property
    def named(self) -> bool:
        return not self.interpret

    def free_k(self, k_free, slot):
        if self.named:
            _named_barrier("arrive", FREE_BARRIER + slot, self.consumers + 1)
        else:
            plgpu.barrier_arrive(k_free.at[slot])

    def free_v(self, v_free, slot):
        if self.named:
            _named_barrier("arrive", FREE_BARRIER + self.stages + slot, self.consumers + 1)
        else:
            plgpu.barrier_arrive(v_free.at[slot])

    def await_free_k(self, k_free, slot):
        if self.named:
            _named_barrier("sync", FREE_BARRIER + slot, self.consumers + 1)
        else:
            plgpu.barrier_wait(k_free.at[slot])

    def await_free_v(self, v_free, slot):
        if self.named:
            _named_barrier("sync", FREE_BARRIER + self.stages + slot, self.consumers + 1)
        else:
            plgpu.barrier_wait(v_free.at[slot])

    @property
    def take_turns(self) -> bool:
        return self.tiling.alternate_products and not self.alternate and not self.interpret

    def take_turn(self, wg):
        """Waits until the other compute warpgroup has issued its products."""
        if self.take_turns:
            _named_barrier("sync", TURN_BARRIER + wg, COMPUTE)

    def pass_turn(self, wg):
        if self.take_turns:
            _named_barrier("arrive", TURN_BARRIER + 1 - wg, COMPUTE)

    # Memory warpgroup

    def memory(
        self, q_gmem, k_gmem, v_gmem, work, index,
        *, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free, **_,
    ):  # fmt: skip
        """Copies Q once per item and K, V once per step, as soon as there is room."""

        def load_k(item, keys, slot):
            gmem = k_gmem.at[item.b, keys, self.kv_head(item)]
            plgpu.copy_gmem_to_smem(gmem, k_smem.at[slot], k_ready.at[slot])

        def load_v(item, keys, slot):
            gmem = v_gmem.at[item.b, keys, self.kv_head(item)]
            plgpu.copy_gmem_to_smem(gmem, v_smem.at[slot], v_ready.at[slot])

        def q_tile(item):
            return self.tile_of(item, q_gmem, item.n)

        k_ring = Ring(self.stages, functools.partial(self.await_free_k, k_free), load_k)
        v_ring = Ring(self.stages, functools.partial(self.await_free_v, v_free), load_v)
        residents = [Resident(q_tile, q_smem, q_ready, q_free)]
        self.stream(work, index, k_ring, v_ring, residents)

    # Compute warpgroups

    def compute(
        self, wg, work, index, sinks, rows, columns, out_gmem, lse_gmem,
        *, q_smem, k_smem, v_smem, out_smem, lse_smem,
        q_ready, k_ready, v_ready, q_free, k_free, v_free,
        piece_smem=None, m_l_smem=None, piece_ready=None, piece_taken=None,
    ):  # fmt: skip
        """64 rows of every item: online softmax over its visits, then one store."""
        handover = Handover(piece_smem, piece_ready, piece_taken)

        def visits_of(item, done):
            """(visits, full, count) of an item, `done` steps of others before it."""
            q_rows = q_smem.at[pl.ds(0 if self.alternate else wg * ROWS, ROWS)]
            first_row = self.first_row(item, wg)
            row_values = self.token_values(rows, item, first_row, ROWS, ROW)

            def mask(s, t):
                """Scores of step t with -inf where the rule forbids."""
                first_key = self.first_token(index, item, t)
                column_values = self.token_values(columns, item, first_key, self.step, COLUMN)
                allowed = self.allowed(
                    item, first_row, first_key, (0, 1), row_values, column_values
                )
                return jnp.where(allowed, s, -jnp.inf)

            first, full, count = self.own_steps(wg, item, done)
            visits = _Visits(
                self, wg, done, first, mask, q_rows, k_smem, v_smem,
                q_ready, k_ready, v_ready, q_free, k_free, v_free,
            )  # fmt: skip
            return visits, full, count

        def compute_item(item, done):
            after = done + item.count * self.splits
            visits, full, count = visits_of(item, done)
            if self.alternate:  # a warpgroup without a step of its own takes part in this too
                pl.when(item.count > 0)(lambda: plgpu.barrier_wait(visits.q_ready))
            acc, m, l = (visits.overlapped if self.tiling.overlap else visits.plain)(full, count)
            if not self.alternate:
                self.store(item, wg, acc, m, l, sinks, out_gmem, lse_gmem, out_smem, lse_smem)
                return after
            pl.when(item.count > 0)(lambda: plgpu.barrier_arrive(visits.q_free))
            m_l = [m_l_smem.at[0], m_l_smem.at[1]]

            @pl.when(wg == 1)
            def _():
                handover.give(acc, beside=zip(m_l, (m, l), strict=True))

            @pl.when(wg == 0)
            def _():
                self.store(
                    item, 0, acc, m, l, sinks, out_gmem, lse_gmem, out_smem, lse_smem,
                    lambda beside: handover.take(m_l if beside else ()),
                )  # fmt: skip

            return after

        # Warpgroup 0 begins; the pass below is taken up by its last take, so that no arrival is
        # left over.
        pl.when(wg == 1)(lambda: self.pass_turn(wg))
        self.for_each_item(work, compute_item, 0)
        pl.when(wg == 0)(lambda: self.take_turn(wg))
        plgpu.wait_smem_to_gmem(0)

    def store(self, item, wg, acc, m, l, sinks, out_gmem, lse_gmem, out_smem, lse_smem, take=None):
        """out = acc / l and logsumexp = m + log l; zeros and -inf where nothing was seen.

        With `take`, acc, m and l are half of the visits, and the rest is taken piece by piece.
        """
        piece = None
        if take is not None:
            piece, (other_m, other_l) = take(True)
            both = jnp.maximum(m, other_m)
            base = jnp.where(both == -jnp.inf, 0.0, both)
            shrinks = jnp.exp2(m - base), jnp.exp2(other_m - base)
            m, l = both, l * shrinks[0] + other_l * shrinks[1]
        seen = l > 0
        # m is -inf on an empty row, whose l is 0: log2(1) - inf is the right answer.
        lse = (m + jnp.log2(jnp.where(seen, l, 1.0))) * (1 / LOG2E)
        denominator = l
        if sinks is not None:
            # An empty row gives 0 / inf = 0; a sink far above every logit does too, rightly.
            denominator = l + jnp.exp2(sinks[item.n] * LOG2E - m)
        shrink = jnp.where(seen, 1 / jnp.where(seen, denominator, 1.0), 0.0)
        if take is None:
            out = (acc * _over(shrink, acc)).astype(out_smem.dtype)

        queries = pl.ds(self.first_row(item, wg), ROWS)
        width = out_smem.shape[-1]
        for column in range(0, self.shape.value_size, width):
            columns = slice(column, column + width)
            if take is not None:
                if column > 0:
                    piece, _ = take(False)
                part = acc[:, columns] * _over(shrinks[0] * shrink, piece)
                part = part + piece * _over(shrinks[1] * shrink, piece)
            # The copy before this one must have read the buffers.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[wg] = out[:, columns] if take is None else part.astype(out_smem.dtype)
            if column == 0:
                lse_smem[wg] = lse
            plgpu.commit_smem()
            if column == 0:
                plgpu.copy_smem_to_gmem(
                    lse_smem.at[wg], lse_gmem.at[item.b, item.n, queries], commit_group=False
                )
            # The copy engine drops rows past T.
            plgpu.copy_smem_to_gmem(
                out_smem.at[wg], out_gmem.at[item.b, queries, item.n, pl.ds(column, width)]
            )


class _Visits:
    """The steps of one item on one compute warpgroup."""

    def __init__(
        self, kernel, wg, done, first, mask,
        q_rows, k_smem, v_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free,
    ):  # fmt: skip
        self.kernel, self.wg, self.done, self.first, self.mask_step = kernel, wg, done, first, mask
        self.q_rows, self.k_smem, self.v_smem = q_rows, k_smem, v_smem
        self.q_ready, self.k_ready, self.v_ready = q_ready, k_ready, v_ready
        self.q_free, self.k_free, self.v_free = q_free, k_free, v_free
        self.scores_type = plgpu.ACC((ROWS, kernel.step), jnp.float32)

    def init(self):
        size = self.kernel.shape.value_size
        return (
            _splat(0.0, (ROWS, size), TILE),
            _splat(-jnp.inf, (ROWS,), ROW),
            _splat(0.0, (ROWS,), ROW),
        )

    def softmax(self, s, m, l, masked):
        """p = 2^(s - m_new), the new m and l, and what acc must be multiplied with."""
        kernel = self.kernel
        scale = (kernel.scale if kernel.soft_cap is None else kernel.soft_cap) * LOG2E
        m_new = jnp.maximum(m, s.max(axis=1) * scale)
        if kernel.tiling.lazy_rescale:
            # m only has to be near the maximum: p stays below 2^lazy_rescale, far from overflow in
            # any dtype.
            m_new = jnp.where(m_new - m > kernel.tiling.lazy_rescale, m_new, m)
        # A row with nothing allowed so far keeps m = -inf; subtracting 0 instead makes its p and
        # shrink zeros, not NaN.
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        p = jnp.exp2(s * scale - _over(base, s))
        shrink = jnp.exp2(m - base)  # rescales what was summed under the old maximum
        return p, m_new, l * shrink + p.sum(axis=1), shrink

    def logits(self, s, t, masked):
        """Scores of step t in units of scale, or of the soft cap; -inf where the rule forbids."""
        kernel = self.kernel
        if kernel.soft_cap is not None:
            # tanh x = 1 - 2 / (1 + e^2x): tanh.approx errs by 5e-4, too much times a cap of 50.
            growth = jnp.exp2(s * (2 * LOG2E * kernel.scale / kernel.soft_cap))
            s = 1.0 - 2.0 / (1.0 + growth)
        return self.mask(s, t) if masked else s

    def rescale(self, acc, shrink):
        """acc * shrink; lazily, a warp skips it when none of its rows has a new maximum."""
        if not self.kernel.tiling.lazy_rescale or self.kernel.interpret:
            return acc * _over(shrink, acc)
        return lax.cond(_any_in_warp(shrink), lambda: acc * _over(shrink, acc), lambda: acc)

    def step_of(self, t):
        """The item's step that is this warpgroup's step t."""
        return t if self.kernel.stride == 1 else self.first + t * self.kernel.stride

    def slot(self, t):
        return self.kernel.slot(self.done + self.step_of(t), self.kernel.stages)

    def mask(self, s, t):
        return self.mask_step(s, self.step_of(t))

    def await_q(self):
        if not self.kernel.alternate:
            plgpu.barrier_wait(self.q_ready)

    def free_q(self):
        if not self.kernel.alternate:
            plgpu.barrier_arrive(self.q_free)

    def await_k(self, t):
        plgpu.barrier_wait(self.k_ready.at[self.slot(t)])

    def await_v(self, t):
        plgpu.barrier_wait(self.v_ready.at[self.slot(t)])

    def k(self, t):
        return self.k_smem.at[self.slot(t)].transpose((1, 0))

    def v(self, t):
        return self.v_smem.at[self.slot(t)]

    def free_k(self, t):
        self.kernel.free_k(self.k_free, self.slot(t))

    def free_v(self, t):
        self.kernel.free_v(self.v_free, self.slot(t))

    def add_values(self, acc, p, t, meanwhile=lambda: None):
        """acc + p V, in place on the card; `meanwhile` runs with the product in flight."""
        if self.kernel.interpret:  # it knows neither run_state(ACC.init) nor a register operand
            v = self.v(t)[...]
            plgpu.commit_smem()
            meanwhile()
            return acc + jnp.dot(p, v, preferred_element_type=jnp.float32)

        def product(acc_ref):
            plgpu.wgmma(acc_ref, p, self.v(t))
            meanwhile()

        return pl.run_state(product)(plgpu.ACC.init(acc))

    def loop(self, begin, full, count, step, carry):
        """Full steps without masking, then partial ones with it."""
        carry = lax.fori_loop(begin, full, lambda t, c: step(t, c, masked=False), carry)
        if not self.kernel.has_partial:
            return carry
        return lax.fori_loop(
            jnp.maximum(full, begin), count, lambda t, c: step(t, c, masked=True), carry
        )

    def plain(self, full, count):
        """Scores, softmax, values, one step after the other.

        A turn covers values of t and scores of t + 1.
        """
        dtype = self.v_smem.dtype

        def step(t, carry, masked):
            acc, m, l = carry

            def scores(s_ref):
                plgpu.wgmma(s_ref, self.q_rows, self.k(t))
                self.kernel.pass_turn(self.wg)
                return s_ref[...]

            s = pl.run_scoped(scores, self.scores_type)
            self.free_k(t)
            s = self.logits(s, t, masked)
            p, m, l, shrink = self.softmax(s, m, l, masked)
            acc = self.rescale(acc, shrink)
            p, acc, m, l = lax.optimization_barrier((p.astype(dtype), acc, m, l))
            self.await_v(t)
            self.kernel.take_turn(self.wg)
            acc = self.add_values(
                acc, p, t, lambda: pl.when(t + 1 < count)(lambda: self.await_k(t + 1))
            )
            self.free_v(t)
            return acc, m, l

        @pl.when(count > 0)
        def _():
            self.await_k(jnp.int32(0))
            self.await_q()

        self.kernel.take_turn(self.wg)
        carry = self.loop(0, full, count, step, self.init())
        self.kernel.pass_turn(self.wg)

        @pl.when(count > 0)
        def _():
            self.free_q()

        return carry

    def step(self, t, carry, masked):
        """Scores of step t are issued before the values of t - 1, whose p waits in registers."""
        acc, m, l, p = carry

        def softmax(s, m, l):
            s = self.logits(s, t, masked)
            p, m, l, shrink = self.softmax(s, m, l, masked)
            return m, l, shrink, p

        self.await_k(t)
        self.await_v(t - 1)
        self.kernel.take_turn(self.wg)
        if self.kernel.interpret:
            s = self.scores(t)
            acc = self.add_values(acc, p, t - 1)
            self.free_k(t)
            m, l, shrink, p = softmax(s, m, l)
        else:

            def products(refs):
                acc_ref, *new_refs = refs

                def with_scores(s_ref):
                    plgpu.wgmma(s_ref, self.q_rows, self.k(t))
                    plgpu.wgmma(acc_ref, p, self.v(t - 1))
                    self.kernel.pass_turn(self.wg)
                    # Key values for the rule need 32 registers, which p occupies until its
                    # product ends.
                    crowded = masked and self.kernel.num_columns > 0
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if crowded else 1)
                    self.free_k(t)
                    for ref, new in zip(new_refs, softmax(s, m, l), strict=True):
                        ref[...] = new

                pl.run_scoped(with_scores, self.scores_type)

            unset = _splat(0.0, self.scores_type.shape, TILE)
            acc, m, l, shrink, p = pl.run_state(products)((plgpu.ACC.init(acc), m, l, m, unset))
            # The product reads the old p until it ends: only now may the new one take its
            # registers.
            acc, p = lax.optimization_barrier((acc, p))
        self.free_v(t - 1)
        return self.rescale(acc, shrink), m, l, p.astype(self.v_smem.dtype)

    def first_softmax(self, s, full):
        """p, m, l of an item's first step."""
        _, m, l = self.init()
        s = self.logits(s, jnp.int32(0), masked=False)
        if self.kernel.has_partial:
            s = lax.cond(full > 0, lambda: s, lambda: self.mask(s, jnp.int32(0)))
        p, m, l, _ = self.softmax(s, m, l, self.kernel.has_partial)
        return p, m, l

    def overlapped(self, full, count):
        """An item by itself."""
        dtype = self.v_smem.dtype

        def run():
            acc, _, _ = self.init()
            self.await_k(jnp.int32(0))
            self.await_q()
            self.kernel.take_turn(self.wg)
            s = self.scores(jnp.int32(0), self.kernel.pass_turn)
            self.free_k(jnp.int32(0))
            p, m, l = self.first_softmax(s, full)
            acc, m, l, p = self.loop(1, full, count, self.step, (acc, m, l, p.astype(dtype)))
            self.free_q()
            self.await_v(count - 1)
            self.kernel.take_turn(self.wg)
            acc = self.add_values(acc, p, count - 1, lambda: self.kernel.pass_turn(self.wg))
            self.free_v(count - 1)
            return acc, m, l

        return lax.cond(count > 0, run, self.init)

    def scores(self, t, after=lambda wg: None):
        def product(s_ref):
            plgpu.wgmma(s_ref, self.q_rows, self.k(t))
            after(self.wg)
            return s_ref[...]

        return pl.run_scoped(product, self.scores_type)


def _any_in_warp(shrink):
    """Whether any row of this warp has shrink != 1.

    A scalar that differs between warps, so no product under it.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT),
    )
    def emit(_, shrink):
        one = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 1.0))
        changed = None
        for register in shrink.registers.flat:
            for lane in range(ir.VectorType(register.type).shape[0]):
                value = vector.extract(register, [], [lane])
                differs = arith.cmpf(arith.CmpFPredicate.UNE, value, one)
                changed = differs if changed is None else arith.ori(changed, differs)
        i32 = ir.IntegerType.get_signless(32)
        lanes = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
        return mgpu.FragmentedArray.splat(
            nvvm.vote_sync(lanes, changed, "any"), shape=(), is_signed=False
        )

    return emit(shrink)


def _named_barrier(action, barrier, warpgroups):
    """bar.arrive or bar.sync on a hardware barrier that `warpgroups` warpgroups share.

    `barrier` is an int32 scalar.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(_, barrier):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [barrier.registers[()]],
            f"bar.{action} $0, {warpgroups * THREADS};",
            "r",
            has_side_effects=True,
        )

    emit(jnp.int32(barrier))
