"""Block-sparse attention backward on Hopper (sm90), in Pallas Mosaic GPU.

    lists by column, delta = rowsum(d_out * out) - d_lse, zeros for dq                hopper_prepare

    seven products, bitwise repeatable:
      _Columns  one item = a kv block, visits its row blocks:   dv += pT d_out     dk += dsT q
      _Rows     one item = a row block, visits its kv blocks:   dq += ds k
    five products (`fused`): _Columns also makes ds k and adds it to dq in float32, in any order
    eight products, with a head of 256: _Columns runs twice, for dk and dv have no room together

    p = 2^(s - lse) in base 2,  dp = d_out vT,  ds = p (dp - delta), with a cap (1 - tanh²) ds

Both kernels have the forward's shape: a memory warpgroup reads the list and runs ahead with TMA,
two compute warpgroups hold 64 rows (of keys, of queries) each and accumulate in registers. _Columns
works on transposed tiles sT = k qT, so that pT and dsT are the left operands of their products
without leaving the registers; fused, dsT also goes to shared memory, where both warpgroups read it
as ds. An empty row and rows past T have lse = +inf: their p and ds are zeros.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper import dq_cast as hopper_cast
from xsake.backends.hopper.forward_kernel import _pad_tokens
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
    Item,
    Resident,
    Ring,
    check_sizes,
    tiles,
)
from xsake.backends.hopper.prepare import prepare
from xsake.backends.hopper.ptx import COMPUTE_BARRIER, NUMBER, SCALAR, asm, number
from xsake.backends.hopper.work_table import work_table
from xsake.backends.kernel_rule import KernelRule
from xsake.backends.options import BackwardTiling
from xsake.block_mask.lists import Lists

FUSED_SIZE = 128  # the largest head of the fused form
MOST_COLUMNS = 256  # of accumulators in a warpgroup's registers
CASTS = ("pass", "kernel")
OUT_COLUMNS = 128  # results leave in pieces so wide
DS_STAGES = 2  # dsT tiles of the fused form; with one, the warpgroups would meet twice per step


DEFAULT_TILING = BackwardTiling()


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    lists: Lists,
    *,
    block: tuple[int, int] = (128, 128),
    rule: KernelRule | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    tiling: BackwardTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, T, N, H], dk [B, S, K, H], dv [B, S, K, Hv] in the dtype of q.

    q, out, d_out [B, T, N, H|Hv], k, v [B, S, K, H|Hv], lse and d_lse float32 [B, N, T] as the
    forward returns them. `lists` name the kv blocks of every row block, full ones first.
    """
    shape = _Shape.of(q, k, v, lists, block)
    rule = rule or KernelRule(None)
    fused = tiling.fused and max(shape.size, shape.value_size) <= FUSED_SIZE
    prepared = prepare(
        out,
        lse,
        d_out,
        d_lse,
        lists,
        shape,
        tiling,
        zeros=shape.size if fused else None,
        counts=fused and tiling.cast == "kernel",
        interpret=interpret,
    )
    # Shared memory is tiled by 8 rows, and Mosaic wants the same of what it copies from and to.
    padded = tuple(_pad_tokens(x, -(-x.shape[1] // 8) * 8) for x in (q, k, v, d_out))
    # A tile of these may be read past the end; what it finds there is masked.
    rows = tuple(_pad_tokens(x, shape.row_blocks * block[0]) for x in rule.rows)
    keys = tuple(_pad_tokens(x, shape.kv_blocks * block[1]) for x in rule.columns)
    common = dict(
        scale=1 / math.sqrt(shape.size) if scale is None else scale,
        soft_cap=soft_cap,
        rule=rule,
        interpret=interpret,
    )
    statistics = prepared.lse, prepared.delta
    made: dict[str, jax.Array] = {}
    together = shape.size + shape.value_size <= MOST_COLUMNS
    for makes in (("dk", "dv"),) if together else (("dk",), ("dv",)):
        by_columns = _Columns(shape, tiling, makes=makes, fused=fused, **common)
        operands = (*padded, *statistics, prepared.table, prepared.row_blocks, *rows, *keys)
        made |= by_columns(operands, prepared.zeros, prepared.counters, interpret)
    if not fused:
        row_work = work_table(
            lists, shape.batch, shape.heads, shape.kv_heads, shape.kv_bytes, tiling, interpret
        )
        by_rows = _Rows(shape, tiling, **common)
        made["dq"] = by_rows(
            (*padded, *statistics, row_work, lists.kv_index.reshape(-1), *rows, *keys), interpret
        )
    group = shape.heads // shape.kv_heads
    dk, dv = (_sum_heads(made[x][:, : shape.keys], group) for x in ("dk", "dv"))
    return made["dq"][:, : shape.queries], dk, dv


def _sum_heads(x, group):
    """[B, S, N, H] -> [B, S, K, H]: what the query heads of a kv head gave it."""
    if group == 1:
        return x
    batch, keys, heads, size = x.shape
    grouped = x.reshape(batch, keys, heads // group, group, size)
    return grouped.astype(jnp.float32).sum(axis=3).astype(x.dtype)


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
    itemsize: int

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.queries, self.block[0])

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.keys, self.block[1])

    @property
    def kv_bytes(self) -> int:
        """K and V of one kv head of one batch row."""
        return self.keys * (self.size + self.value_size) * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Q and d_out of one head of one batch row, and dq in float32."""
        return self.queries * ((self.size + self.value_size) * self.itemsize + self.size * 4)

    @classmethod
    def of(cls, q, k, v, lists, block):
        batch, queries, heads, size = q.shape
        _, keys, kv_heads, value_size = v.shape
        if k.shape != (batch, keys, kv_heads, size):
            raise ValueError(
                f"key is {k.shape}; this query and value ask for {(batch, keys, kv_heads, size)}"
            )
        check_sizes(block, size, value_size)
        if lists.kv_count.shape[-1] != pl.cdiv(queries, block[0]):
            raise ValueError(
                f"the lists have {lists.kv_count.shape[-1]} rows, {queries} tokens in blocks of "
                f"{block[0]} have {pl.cdiv(queries, block[0])}"
            )
        return cls(
            batch, queries, keys, heads, kv_heads, size, value_size, tuple(block), k.dtype.itemsize
        )


class _Kernel(BlockKernel):
    """What both kernels share beyond items and the rule: steps, logits, results."""

    compute: Any  # the roles
    memory: Any
    out_names: Any  # what they write to, behind the inputs: refs that are added to, then results

    def __init__(self, shape, tiling, *, axis, step, scale, soft_cap, rule, interpret):
        self.tiling = tiling
        self.scale = scale
        self.soft_cap = soft_cap
        self.shape = shape
        self.alternate = shape.block[axis] == ROWS
        super().__init__(
            shape,
            rule,
            tiling,
            item_block=shape.block[axis],
            visit_block=shape.block[1 - axis],
            items=shape.batch * shape.heads * (shape.row_blocks, shape.kv_blocks)[axis],
            step=step,
            persistent=tiling.persistent and not self.lean,
            interpret=interpret,
        )

    def stages_of(self, asked):
        """Tiles in flight of what is loaded once per step, and of what is free early in a step."""
        large = max(self.shape.size, self.shape.value_size) > 128
        stages = asked or (4 if self.alternate and self.step == 64 and not large else 2)
        if stages % self.stride:
            raise ValueError(f"blocks of {ROWS} take an even number of stages, not {stages}")
        return stages, 1 if self.lean else stages

    @property
    def lean(self) -> bool:
        """Whether shared memory has no room for results: they leave through an operand's place.

        The place must not be filled again then, so a CTA has one item. One of the rings has one
        stage: that of d_out or v, which are free early in a step.
        """
        return self.shape.size + self.shape.value_size > 384 and not self.alternate

    def body(self, *refs, **scratch):
        inputs, rest = refs[:8], list(refs[8:])
        rows, rest = rest[: self.num_rows], rest[self.num_rows :]
        columns, written = rest[: self.num_columns], rest[self.num_columns :]
        q, k, v, d_out, lse, delta, table, index = inputs
        work, scratch = self.work_of(table, scratch)
        outs = dict(zip(self.out_names, written, strict=True))
        self.run_roles(
            self.tiling,
            lambda wg: self.compute(wg, lse, delta, work, index, rows, columns, outs, **scratch),
            lambda: self.memory(q, k, v, d_out, lse, delta, work, index, **scratch),
            self.beside(q.dtype, work, index, outs, **scratch),
        )

    def beside(self, dtype, work, index, outs, **scratch):
        """What a fourth warpgroup does, if there is one."""

    def run_steps(self, wg, item, done, front, back):
        """back(t, front(t, masked)) for every step t of an item that is this warpgroup's.

        Full steps come first, then those with the rule.
        """
        first_step, full, count = self.own_steps(wg, item, done)

        def step(t, masked):
            t = first_step + t * self.stride if self.alternate else t
            back(t, front(t, masked))

        pl.loop(0, full)(lambda t: step(t, False))
        if self.has_partial:
            pl.loop(full, count)(lambda t: step(t, True))

    # Elementwise

    def probabilities(self, s, lse, masked, allowed):
        """p, and p times the slope of the soft cap; both zero where the rule forbids.

        masked: whether there is a rule. allowed(): what it allows.
        """

        def mask(p):
            return jnp.where(allowed(), p, 0.0) if masked else p

        if self.soft_cap is None:
            p = mask(jnp.exp2(s * (self.scale * LOG2E) - lse))
            return p, p
        # tanh x = 1 - 2 / (1 + e^2x), as in the forward.
        growth = jnp.exp2(s * (2 * LOG2E * self.scale / self.soft_cap))
        capped = 1.0 - 2.0 / (1.0 + growth)
        p = mask(jnp.exp2(capped * (self.soft_cap * LOG2E) - lse))
        return p, p * (1.0 - capped * capped)

    def product(self, acc_ref, left, right, left_smem=None):
        """acc += left right, with `left` in registers.

        The interpreter takes it from shared memory.
        """
        if self.interpret:
            left_smem[...] = left
            plgpu.commit_smem()
            left = left_smem
        plgpu.wgmma(acc_ref, left, right)

    def again(self, wg):
        """wg, in a way that the compiler cannot hoist out of a loop.

        Otherwise it keeps a descriptor per product of k and v in registers, and spills.
        """
        return wg if self.interpret else _opaque(wg)

    def own(self, wg, ref):
        """This warpgroup's rows of an operand that stays for the whole item."""
        first = jnp.int32(0) if self.alternate else wg
        return ref.at[pl.ds(self.again(first) * ROWS, ROWS)]

    def unless_empty(self, accumulate, item, sizes):
        """accumulate(*accumulators) -> tiles; zeros for an item without visits."""

        def run():
            return pl.run_scoped(accumulate, *(plgpu.ACC(x, jnp.float32) for x in sizes))

        def zeros():
            return tuple(plgpu.layout_cast(jnp.zeros(x, jnp.float32), TILE) for x in sizes)

        return lax.cond(item.count > 0, run, zeros)

    def issued(self, left, right):
        """left right, both in shared memory: a tile that may be read only after settled()."""

        def product(ref):
            plgpu.wgmma(ref, left, right)
            return self.accumulated(ref, wait_n=None)

        return pl.run_scoped(product, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def settled(self, tile, wait_n):
        """A tile that was issued, once no more than `wait_n` products behind it are in flight."""
        if self.interpret:
            return tile
        plgpu.wgmma_wait(wait_n)
        return lax.optimization_barrier(tile)

    def accumulated(self, ref, wait_n):
        if self.interpret:
            return ref[...]
        return plgpu.wgmma_accumulator_load(ref, wait_n=wait_n)

    def out_tiles(self, sizes, dtype) -> dict[str, Any]:
        """A buffer per warpgroup for results of these sizes, unless they leave otherwise."""
        if self.lean:
            return {}
        if self.alternate:
            piece = tiles(ROWS, PIECE, dtype=jnp.float32)
            out = tiles(1, ROWS, PIECE, dtype=dtype)
            return {"out_smem": out, "piece_smem": piece, **Handover.barriers()}
        pieces = min(*sizes, OUT_COLUMNS) // PIECE
        return {"out_smem": tiles(COMPUTE, pieces, ROWS, PIECE, dtype=dtype)}

    def store(self, wg, tile, scale, out_smem, gmem, handover):
        """scale * tile to global memory; rows past T are dropped.

        Tiles of two warpgroups that alternate are summed.
        """
        if not self.alternate:
            self.copy_out(tile * scale, out_smem, gmem)
            return

        @pl.when(wg == 1)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dq left through the same place
            handover.give(tile)

        @pl.when(wg == 0)
        def _():
            for column in range(0, tile.shape[-1], PIECE):
                piece, _ = handover.take()
                piece = (tile[:, column : column + PIECE] + piece) * scale
                self.copy_out(piece, out_smem, gmem.at[:, pl.ds(column, PIECE)])

    def copy_out(self, tile, out_smem, gmem):
        """Tile to global memory through shared memory, as many columns as fit there at a time.

        out_smem is [64, columns], or [places, 64, 64] that take turns, this tile's after those of
        the tile before: all copies but the last (places - 1) must have read their place.
        """
        tile = tile.astype(out_smem.dtype)
        places = [out_smem]
        if len(out_smem.shape) == 3:
            places = [out_smem.at[place] for place in range(out_smem.shape[0])]
        width = out_smem.shape[-1]
        for turn, column in enumerate(range(0, tile.shape[-1], width)):
            place = places[turn % len(places)]
            plgpu.wait_smem_to_gmem(len(places) - 1, wait_read_only=True)
            place[...] = tile[:, column : column + width]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place, gmem.at[:, pl.ds(column, width)])


class _Columns(_Kernel):
    """dk and dv of a kv block, or one of them, over the row blocks that see it.

    Fused, its part of dq too.
    """

    def __init__(self, shape, tiling, *, makes, fused, **static):
        self.sizes = {"dk": shape.size, "dv": shape.value_size}
        self.sizes = {name: self.sizes[name] for name in makes}
        self.makes_dk, self.makes_dv = "dk" in makes, "dv" in makes
        self.fused = fused
        if tiling.cast not in CASTS:
            raise ValueError(f"cast is {tiling.cast!r}, which is none of {CASTS}")
        self.casts = fused and tiling.cast == "kernel"
        if self.casts:
            self.warpgroups, self.records = COMPUTE + 2, 4  # it may be late by some items
        small = shape.size == shape.value_size == 64
        step = 128 if fused and small and shape.block == (128, 128) else 64
        super().__init__(shape, tiling, axis=1, step=tiling.row_step or step, **static)
        self.stages, self.d_out_stages = self.stages_of(tiling.row_stages)
        # A warpgroup makes 64 queries of the step's dq, or 64 columns of the head, or all of it: at
        # its own steps, or at every other one.
        pieces = self.step // ROWS * shape.size // PIECE
        self.dq_by = "rows" if self.step > ROWS else "columns" if pieces > 1 else "turns"
        if self.alternate:
            self.dq_by = "steps"
        self.v_early = self.makes_dk and not self.alternate  # V is free before the item ends
        # Of two dsT tiles one has been read when an item ends: two results may leave through it.
        self.leaves_by_ds = fused and small and self.dq_by == "rows"
        # Which queries dq belongs to is read when a step begins; with small steps that is slower.
        self.reads_early = fused and self.step > ROWS
        if fused and (pieces > COMPUTE or (self.alternate and self.step > ROWS)):
            raise ValueError(f"fused, this shape needs row_step = {ROWS}, not {self.step}")

    @property
    def out_names(self):
        added_to = *["sums"] * self.fused, *["counters"] * self.casts
        return *added_to, *self.sizes, *["dq"] * self.casts

    @property
    def lean(self) -> bool:
        """Whether shared memory has no room for dk."""
        return self.makes_dk and super().lean

    def __call__(self, operands, zeros, counters, interpret):
        shape = self.shape
        q, k = operands[:2]
        out_type = tuple(
            jax.ShapeDtypeStruct((shape.batch, k.shape[1], shape.heads, size), q.dtype)
            for size in self.sizes.values()
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

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        shape, stages, d_out_stages, step = self.shape, self.stages, self.d_out_stages, self.step
        free = dict(num_arrivals=self.consumers)
        scratch = dict(
            k_smem=tiles(shape.block[1], shape.size, dtype=dtype),
            q_smem=tiles(stages, step, shape.size, dtype=dtype),
            d_out_smem=tiles(d_out_stages, step, shape.value_size, dtype=dtype),
            **self.out_tiles(self.sizes.values(), dtype),
            # lse and delta; apart, each would take 1,024 bytes
            statistics_smem=plgpu.SMEM((stages + d_out_stages, step), jnp.float32),
            k_ready=plgpu.Barrier(),
            q_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # Q and lse
            # d_out and delta
            d_out_ready=plgpu.Barrier(num_arrivals=1 + self.makes_dk, num_barriers=d_out_stages),
            k_free=plgpu.Barrier(num_arrivals=COMPUTE),  # V too, unless it has its own
            q_free=plgpu.Barrier(num_barriers=stages, **free),
            d_out_free=plgpu.Barrier(num_barriers=d_out_stages, **free),
        )
        if self.makes_dk:
            scratch["v_smem"] = tiles(shape.block[1], shape.value_size, dtype=dtype)
            scratch["v_ready"] = plgpu.Barrier()
        if self.v_early:
            scratch["v_free"] = plgpu.Barrier(num_arrivals=COMPUTE)
        if self.interpret:
            scratch["left_smem"] = tiles(COMPUTE, ROWS, step, dtype=dtype)
        if self.casts:
            if not self.counts:  # otherwise behind a record: there is no room for another buffer
                scratch["added_smem"] = plgpu.SMEM((COMPUTE,), jnp.int32)
            scratch["cast_started"] = plgpu.Barrier()
        if self.fused:
            places = (1 if self.alternate else DS_STAGES), step // ROWS
            scratch["ds_smem"] = tiles(*places, COMPUTE * ROWS, ROWS, dtype=dtype)
            scratch["dq_smem"] = tiles(COMPUTE, ROWS, PIECE, dtype=jnp.float32)
            if self.leaves_by_ds:
                del scratch["out_smem"]
            if self.alternate:  # there is no room for these; dq_smem and ds_smem serve
                del scratch["piece_smem"], scratch["out_smem"]
        return scratch

    def memory(
        self, q_gmem, k_gmem, v_gmem, d_out_gmem, lse_gmem, delta_gmem, work, index,
        *, q_smem, k_smem, d_out_smem, statistics_smem,
        q_ready, k_ready, d_out_ready, q_free, k_free, d_out_free,
        v_smem=None, v_ready=None, v_free=None, **_,
    ):  # fmt: skip
        """Copies K, V once per item and Q, d_out once per step, as soon as there is room."""
        copy = plgpu.copy_gmem_to_smem
        lse_smem, delta_smem = self.statistics(statistics_smem)

        def load_q(item, queries, slot):
            copy(q_gmem.at[item.b, queries, item.n], q_smem.at[slot], q_ready.at[slot])
            copy(lse_gmem.at[item.b, item.n, queries], lse_smem.at[slot], q_ready.at[slot])

        def load_d_out(item, queries, slot):
            ready = d_out_ready.at[slot]
            copy(d_out_gmem.at[item.b, queries, item.n], d_out_smem.at[slot], ready)
            if self.makes_dk:
                copy(delta_gmem.at[item.b, item.n, queries], delta_smem.at[slot], ready)

        def tile(gmem):
            return lambda item: self.tile_of(item, gmem, self.kv_head(item))

        residents = [Resident(tile(k_gmem), k_smem, k_ready, k_free)]
        if self.makes_dk:
            v = Resident(tile(v_gmem), v_smem, v_ready, v_free)
            residents = [v, *residents] if self.v_early else [*residents, v]

        q_ring = Ring(self.stages, lambda x: plgpu.barrier_wait(q_free.at[x]), load_q)
        d_out_ring = Ring(
            self.d_out_stages, lambda x: plgpu.barrier_wait(d_out_free.at[x]), load_d_out
        )
        self.stream(work, index, q_ring, d_out_ring, residents, late=self.v_early)

    def compute(
        self, wg, lse_gmem, delta_gmem, work, index, rows, columns, outs,
        *, q_smem, k_smem, d_out_smem, statistics_smem,
        q_ready, k_ready, d_out_ready, q_free, k_free, d_out_free,
        out_smem=None, v_smem=None, v_ready=None, v_free=None,
        left_smem=None, ds_smem=None, dq_smem=None,
        piece_smem=None, piece_ready=None, piece_taken=None,
        added_smem=None, cast_started=None,
    ):  # fmt: skip
        """64 keys of every item: dk and dv over its steps, then one store."""
        step = self.step
        lse_smem, delta_smem = self.statistics(statistics_smem)
        if self.casts:
            added = self.added(work, added_smem).at[pl.ds(wg, 1)]
            plgpu.barrier_wait(cast_started)
        left = None if left_smem is None else left_smem.at[wg]
        if self.fused and self.alternate:
            piece_smem, out_smem = dq_smem.at[1], ds_smem.at[0, :, pl.ds(0, ROWS)]
        handover = Handover(piece_smem, piece_ready, piece_taken)
        by_turns = self.fused and self.dq_by == "turns"

        def per_query(smem):
            """Values of queries over the columns of a tile."""
            values = plgpu.load(smem, layout=COLUMN, optimized=False)
            return lax.broadcast_in_dim(values, (ROWS, *smem.shape), [1])

        def part(tile, first):
            return tile if step == ROWS else tile[:, first : first + ROWS]

        def compute_item(item, done):
            steps = item.count * self.splits
            first_key = self.first_row(item, wg)
            column_values = self.token_values(columns, item, first_key, ROWS, ROW)
            own = functools.partial(self.own, wg)

            def q_slot(t):
                return self.slot(done + t, self.stages)

            def d_out_slot(t):
                return self.slot(done + t, self.d_out_stages)

            def scores(t):
                """sT of step t, in flight."""
                plgpu.barrier_wait(q_ready.at[q_slot(t)])
                return self.issued(own(k_smem), q_smem.at[q_slot(t)].transpose((1, 0)))

            def front(t, masked):
                """[(pT, dsT), ...] of the step's queries, 64 each, and the first of them.

                With fewer queries at a time, fewer registers are in use at once. None stands for
                what is not needed.
                """

                def allowed(at):
                    first_query = self.first_token(index, item, t) + at
                    row_values = self.token_values(rows, item, first_query, ROWS, COLUMN)
                    return self.allowed(
                        item, first_query, first_key, (1, 0), row_values, column_values, ROWS
                    )

                def d_p():
                    """dpT of step t, in flight."""
                    d_out = d_out_smem.at[d_out_slot(t)].transpose((1, 0))
                    return self.issued(own(v_smem), d_out)

                first_query = self.first_token(index, item, t) if self.reads_early else None
                s = scores(t)
                plgpu.barrier_wait(d_out_ready.at[d_out_slot(t)])
                early = self.makes_dk and (not masked or step > ROWS)
                dp = d_p() if early else None
                beside = not masked and step == ROWS
                made = []
                for at in range(0, step, ROWS):
                    columns = pl.ds(at, ROWS)
                    lse = functools.partial(per_query, lse_smem.at[q_slot(t), columns])
                    delta = functools.partial(per_query, delta_smem.at[d_out_slot(t), columns])
                    s, lse = self.settled_and(s, int(early) if at == 0 else None, lse, beside)
                    p, slope = self.probabilities(
                        part(s, at), lse, masked, functools.partial(allowed, at)
                    )
                    if not self.makes_dk:
                        made.append((p.astype(d_out_smem.dtype), None))
                        continue
                    if not early:  # the rule needed the registers of dp
                        p, slope = lax.optimization_barrier((p, slope))
                        dp = d_p()
                    p = p.astype(d_out_smem.dtype) if self.makes_dv else None
                    dp, delta = self.settled_and(dp, 0 if at == 0 else None, delta, beside)
                    if self.v_early and at == 0:
                        pl.when(t == steps - 1)(lambda: plgpu.barrier_arrive(v_free))
                    ds = slope * (part(dp, at) - delta)
                    made.append((p, ds.astype(d_out_smem.dtype)))
                if not self.makes_dv:
                    plgpu.barrier_arrive(d_out_free.at[d_out_slot(t)])
                return made, first_query

            def back(refs, t, made):
                """dv += pT d_out, dk += dsT q, and dq."""
                made, first_query = made

                def add_dq(dq, column=0):
                    first = self.first_token(index, item, t) if first_query is None else first_query
                    self.add_dq(wg, item, first, dq, dq_smem, outs["sums"], column)

                def product(name, tiles, right):
                    for queries, tile in _in_order(tiles):
                        at = None if left is None else left.at[:, queries]
                        self.product(refs[name], tile, right.at[queries], at)

                if self.makes_dv:
                    product("dv", [p for p, _ in made], d_out_smem.at[d_out_slot(t)])
                if self.leaves_by_ds:  # the results of the item before have left this place
                    pl.when(t == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                if self.fused:
                    self.share(wg, done + t, [ds for _, ds in made], ds_smem)
                if self.fused and not by_turns:
                    dq = self.issued(*self.dq_operands(wg, done + t, ds_smem, k_smem))
                    plgpu.wgmma_wait(1)  # dv is done, and the registers of p are free
                    plgpu.barrier_arrive(d_out_free.at[d_out_slot(t)])
                if self.makes_dk:
                    product("dk", [ds for _, ds in made], q_smem.at[q_slot(t)])
                behind = len(made) * self.makes_dk  # products after dv and dq
                if self.fused and not by_turns:
                    add_dq(self.settled(dq, behind))
                elif self.makes_dv:
                    plgpu.wgmma_wait(behind)  # dv is done
                    plgpu.barrier_arrive(d_out_free.at[d_out_slot(t)])
                if self.fused and self.dq_by == "steps":
                    for column in range(PIECE, self.shape.size, PIECE):
                        dq = self.issued(*self.dq_operands(wg, done + t, ds_smem, k_smem, column))
                        add_dq(self.settled(dq, 0), column)
                plgpu.wgmma_wait(0)  # dk is done
                plgpu.barrier_arrive(q_free.at[q_slot(t)])
                if by_turns:

                    @pl.when(lax.rem(done + t, jnp.int32(COMPUTE)) == wg)
                    def _():
                        dq = self.issued(*self.dq_operands(wg, done + t, ds_smem, k_smem))
                        add_dq(self.settled(dq, 0))

            def accumulate(*accumulators):
                plgpu.barrier_wait(k_ready)
                if self.makes_dk:
                    plgpu.barrier_wait(v_ready)
                refs = dict(zip(self.sizes, accumulators, strict=True))
                self.run_steps(wg, item, done, front, functools.partial(back, refs))
                plgpu.barrier_arrive(k_free)
                return tuple(ref[...] for ref in refs.values())

            sizes = [(ROWS, size) for size in self.sizes.values()]
            results = self.unless_empty(accumulate, item, sizes)
            results = dict(zip(self.sizes, results, strict=True))
            leaving = [
                (results[name], scale, outs[name].at[item.b, pl.ds(first_key, ROWS), item.n])
                for name, scale in (("dv", 1.0), ("dk", self.scale))
                if name in results
            ]
            if self.leaves_by_ds:
                self.leave_by_ds(wg, leaving, ds_smem.at[self.ds_slot(done + steps)], steps)
            else:
                place = own(k_smem) if self.lean else out_smem.at[0 if self.alternate else wg]
                for tile, scale, gmem in leaving:
                    self.store(wg, tile, scale, place, gmem, handover)
            if self.casts:
                # What was added to dq is in memory; the results that left after it may be late.
                late = 0 if self.alternate else sum(self.sizes.values()) // PIECE
                plgpu.wait_smem_to_gmem(late)
                hopper_cast.tell(added)
            return done + steps

        self.for_each_item(work, compute_item, 0)
        plgpu.wait_smem_to_gmem(0)
        if self.casts:
            plgpu.set_max_registers(self.tiling.memory_registers, action="decrease")

    def beside(self, dtype, work, index, outs, added_smem=None, cast_started=None, **_):
        """The cast of dq, if it is the kernel's."""
        if not self.casts:
            return None
        patience = self.tiling.max_polls if self.persistent else 0
        cast = hopper_cast.Cast(self, dtype, patience)
        added = self.added(work, added_smem)
        refs = (outs[name] for name in ("counters", "sums", "dq"))
        return lambda: cast.run(work, index, *refs, added, cast_started)

    def added(self, work, added_smem):
        """Where each compute warpgroup counts the items whose part of dq it has added."""
        if not self.counts:
            return added_smem
        return work.record_smem.at[0, pl.ds(len(Item._fields) + 2, COMPUTE)]

    def statistics(self, smem):
        """The places of lse and of delta in shared memory."""
        return smem.at[pl.ds(0, self.stages)], smem.at[pl.ds(self.stages, self.d_out_stages)]

    # dq of the step: of all 128 keys, one half of the tile by each warpgroup; or of all 64 keys

    def half(self, wg):
        return pl.ds(self.again(wg) * ROWS, ROWS)

    def leave_by_ds(self, wg, leaving, ds_smem, steps):
        """Results to global memory through the dsT tile of the step before an item's last.

        Both warpgroups have read it: they have met since. Without steps, what left before this item
        may still be on its way out of the same tile.
        """
        pl.when(steps == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        places = [ds_smem.at[at, self.half(wg)] for at in range(len(leaving))]
        for place, (tile, scale, _) in zip(places, leaving, strict=True):
            place[...] = (tile * scale).astype(place.dtype)
        plgpu.commit_smem()
        for place, (*_, gmem) in zip(places, leaving, strict=True):
            plgpu.copy_smem_to_gmem(place, gmem)

    def ds_slot(self, t):
        return self.slot(t, DS_STAGES)

    def share(self, wg, t, made, ds_smem):
        """dsT of both warpgroups to shared memory."""
        if self.alternate:  # each for itself
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results left through here
            (ds_smem[0, 0, self.half(wg)],) = made
            plgpu.commit_smem()
            return
        for at, ds in enumerate(made):
            ds_smem[self.ds_slot(t), at, self.half(wg)] = ds
        _meet()

    def settled_and(self, tile, wait_n, read, beside):
        """A tile that was issued, and read(), which runs beside the product or after it.

        Without wait_n it is settled already.
        """
        values = read() if beside else None
        if wait_n is not None:
            tile = self.settled(tile, wait_n)
        return tile, values if beside else read()

    def dq_operands(self, wg, t, ds_smem, k_smem, column=0):
        """The operands of this warpgroup's part of ds k; alternating, of 64 columns from there."""
        if self.alternate:
            columns = pl.ds(column, PIECE)
            return ds_smem.at[0, 0, self.half(wg)].transpose((1, 0)), k_smem.at[:, columns]
        ds_smem = ds_smem.at[self.ds_slot(t)]
        match self.dq_by:
            case "rows":
                return ds_smem.at[self.again(wg)].transpose((1, 0)), k_smem
            case "columns":
                return ds_smem.at[0].transpose((1, 0)), k_smem.at[:, self.half(wg)]
        return ds_smem.at[0].transpose((1, 0)), k_smem

    def add_dq(self, wg, item, first_query, dq, dq_smem, sums, column=0):
        """sums += dq by the copy engine."""
        # The copy before this one must have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_smem[self.again(wg)] = dq
        plgpu.commit_smem()
        first, columns = pl.ds(first_query, ROWS), pl.ds(column, PIECE)
        if self.dq_by == "rows":
            first = pl.ds(first_query + wg * ROWS, ROWS)
        if self.dq_by == "columns":
            columns = self.half(wg)
        place = sums.at[item.b, first, item.n, columns]
        plgpu.copy_smem_to_gmem(dq_smem.at[wg], place, reduction_op="add")


class _Rows(_Kernel):
    """dq of a row block, over the kv blocks it sees."""

    out_names = ("dq",)

    def __init__(self, shape, tiling, **static):
        most = 64 if max(shape.size, shape.value_size) > 128 else 128
        step = tiling.key_step or min(shape.block[1], most)
        super().__init__(shape, tiling, axis=0, step=step, **static)
        self.stages, self.v_stages = self.stages_of(tiling.key_stages)

    def __call__(self, operands, interpret):
        q = operands[0]
        out_type = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
        name = "xsake_backward_dq"
        return self.launch(name, self.body, operands, out_type, self.scratch(q.dtype), interpret)[0]

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        shape, stages, v_stages, step = self.shape, self.stages, self.v_stages, self.step
        free = dict(num_arrivals=self.consumers)
        scratch = dict(
            q_smem=tiles(shape.block[0], shape.size, dtype=dtype),
            d_out_smem=tiles(shape.block[0], shape.value_size, dtype=dtype),
            k_smem=tiles(stages, step, shape.size, dtype=dtype),
            v_smem=tiles(v_stages, step, shape.value_size, dtype=dtype),
            **self.out_tiles([shape.size], dtype),
            q_ready=plgpu.Barrier(),
            d_out_ready=plgpu.Barrier(),
            k_ready=plgpu.Barrier(num_barriers=stages),
            v_ready=plgpu.Barrier(num_barriers=v_stages),
            q_free=plgpu.Barrier(num_arrivals=COMPUTE),  # d_out too
            k_free=plgpu.Barrier(num_barriers=stages, **free),
            v_free=plgpu.Barrier(num_barriers=v_stages, **free),
        )
        if self.interpret:
            scratch["left_smem"] = tiles(COMPUTE, ROWS, step, dtype=dtype)
        return scratch

    def memory(
        self, q_gmem, k_gmem, v_gmem, d_out_gmem, lse_gmem, delta_gmem, work, index,
        *, q_smem, k_smem, v_smem, d_out_smem,
        q_ready, k_ready, v_ready, d_out_ready, q_free, k_free, v_free, **_,
    ):  # fmt: skip
        """Copies Q, d_out once per item and K, V once per step, as soon as there is room."""
        copy = plgpu.copy_gmem_to_smem

        def load_k(item, keys, slot):
            copy(k_gmem.at[item.b, keys, self.kv_head(item)], k_smem.at[slot], k_ready.at[slot])

        def load_v(item, keys, slot):
            copy(v_gmem.at[item.b, keys, self.kv_head(item)], v_smem.at[slot], v_ready.at[slot])

        def tile(gmem):
            return lambda item: self.tile_of(item, gmem, item.n)

        residents = [
            Resident(tile(q_gmem), q_smem, q_ready, q_free),
            Resident(tile(d_out_gmem), d_out_smem, d_out_ready, None),
        ]
        k_ring = Ring(self.stages, lambda x: plgpu.barrier_wait(k_free.at[x]), load_k)
        v_ring = Ring(self.v_stages, lambda x: plgpu.barrier_wait(v_free.at[x]), load_v)
        self.stream(work, index, k_ring, v_ring, residents)

    def compute(
        self, wg, lse_gmem, delta_gmem, work, index, rows, columns, outs,
        *, q_smem, k_smem, v_smem, d_out_smem,
        q_ready, k_ready, v_ready, d_out_ready, q_free, k_free, v_free,
        out_smem=None, left_smem=None, piece_smem=None, piece_ready=None, piece_taken=None,
    ):  # fmt: skip
        """64 queries of every item: dq over its steps, then one store."""
        shape, step = self.shape, self.step
        left = None if left_smem is None else left_smem.at[wg]
        handover = Handover(piece_smem, piece_ready, piece_taken)

        def compute_item(item, done):
            steps = item.count * self.splits
            first_query = self.first_row(item, wg)
            queries = pl.ds(first_query, ROWS)
            own = functools.partial(self.own, wg)
            row_values = self.token_values(rows, item, first_query, ROWS, ROW)
            lse, delta = (
                plgpu.load(x.at[item.b, item.n, queries], layout=ROW, optimized=False)
                for x in (lse_gmem, delta_gmem)
            )

            def scores(t):
                """s of step t, in flight."""
                slot = self.slot(done + t, self.stages)
                plgpu.barrier_wait(k_ready.at[slot])
                return self.issued(own(q_smem), k_smem.at[slot].transpose((1, 0)))

            def front(t, masked):
                """ds."""

                def allowed():
                    first_key = self.first_token(index, item, t)
                    column_values = self.token_values(columns, item, first_key, step, COLUMN)
                    return self.allowed(
                        item, first_query, first_key, (0, 1), row_values, column_values
                    )

                slot = self.slot(done + t, self.v_stages)
                v = v_smem.at[slot].transpose((1, 0))
                s = scores(t)
                plgpu.barrier_wait(v_ready.at[slot])
                if not masked:
                    dp = self.issued(own(d_out_smem), v)
                s = self.settled(s, wait_n=0 if masked else 1)
                base = lax.broadcast_in_dim(lse, s.shape, [0])
                _, slope = self.probabilities(s, base, masked, allowed)
                if masked:  # the rule needed the registers of dp
                    slope = lax.optimization_barrier(slope)
                    dp = self.issued(own(d_out_smem), v)
                dp = self.settled(dp, 0)
                plgpu.barrier_arrive(v_free.at[slot])
                ds = slope * (dp - lax.broadcast_in_dim(delta, s.shape, [0]))
                return ds.astype(v.dtype)

            def back(dq_ref, t, ds):
                """dq += ds k."""
                slot = self.slot(done + t, self.stages)
                self.product(dq_ref, ds, k_smem.at[slot], left)
                plgpu.wgmma_wait(0)  # dq is done
                plgpu.barrier_arrive(k_free.at[slot])

            def accumulate(dq_ref):
                plgpu.barrier_wait(q_ready)
                plgpu.barrier_wait(d_out_ready)
                self.run_steps(wg, item, done, front, functools.partial(back, dq_ref))
                plgpu.barrier_arrive(q_free)
                return (dq_ref[...],)

            (dq,) = self.unless_empty(accumulate, item, ((ROWS, shape.size),))
            place = own(q_smem) if self.lean else out_smem.at[0 if self.alternate else wg]
            gmem = outs["dq"].at[item.b, queries, item.n]
            self.store(wg, dq, self.scale, place, gmem, handover)
            return done + steps

        self.for_each_item(work, compute_item, 0)
        plgpu.wait_smem_to_gmem(0)


def _in_order(tiles):
    """(its columns, tile) of tiles that stand side by side."""
    first = 0
    for tile in tiles:
        yield pl.ds(first, tile.shape[1]), tile
        first += tile.shape[1]


def _meet():
    """Waits for the other compute warpgroup.

    What both wrote to shared memory before is visible to the products after.
    """
    lines = [
        "fence.proxy.async.shared::cta;",
        f"barrier.cta.sync {COMPUTE_BARRIER}, {COMPUTE * THREADS};",
    ]

    @plgpu.inline_mgpu()
    def emit(_):
        asm(lines)

    emit()


def _opaque(scalar):
    """The same int32 scalar, computed anew where this stands."""

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=NUMBER)
    def emit(_, scalar):
        return number(asm(["mov.b32 $0, $1;"], "=r,r", [scalar.registers[()]]))

    return emit(jnp.int32(scalar))
