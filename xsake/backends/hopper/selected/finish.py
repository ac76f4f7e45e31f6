"""The end of the forward over selected blocks on Hopper (sm90): forced blocks, and all parts.

    first and last blocks, which neighbouring tokens share ─ S = Q Kᵀ ─ softmax ─ O = P V ─┐
    parts [slots, g, Hv] ─ a copy for each token and selection (gather.py) ────────────────┴─ out

Blocks that every token selects need no parts: the query heads of 64 / g neighbouring tokens are a
tile of 64 rows, and two such tiles share the keys in shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import LOG2E, ROW, ROWS, TILE, div_rem, slot_of, tiles
from xsake.backends.hopper.selected import BLOCK
from xsake.backends.hopper.selected.gather import Copies
from xsake.backends.hopper.selected.spans import launch, over_columns, product, values

COMPUTE_WGS = 2
KV_STAGES = 2
PART_STAGES = 3  # for each compute warpgroup
LAG = 3  # tiles of parts of small groups that are copied before one is reported


def finish(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    part: jax.Array,
    lse: jax.Array,
    slots: jax.Array,
    begin: jax.Array,
    *,
    forced: tuple[int, int],
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, K, g, Hv], logsumexp in base 2, float32 [K, T · g]) of T tokens of one batch row.

    q [B · tokens · K, g, H], k [B, S, K, H], v [B, S, K, Hv]; part [slots, g, Hv]; lse float32
    [K, n, T · g], the parts' logsumexp in base 2, -inf where there is none; slots int32 [T, K, n],
    0 where there is none; begin int32 [2], batch row and first token, a multiple of 64. T is a
    multiple of 64; tokens past the last one have results too, of no use. forced: every token also
    sees this many first blocks, and this many up to its own.
    """
    kernel = _Kernel(q, k, v, slots, forced, scale, interpret)
    T, K, _ = slots.shape
    group, Hv = part.shape[1:]
    token = jnp.minimum(begin[1] + jnp.arange(T, dtype=jnp.int32), kernel.length - 1)
    rows = ((begin[0] * kernel.length + token) * K)[:, None] + jnp.arange(K, dtype=jnp.int32)
    out, total = launch(
        kernel,
        "xsake_finish",
        COMPUTE_WGS + 1,
        (q, k, v, part, lse, slots.reshape(-1), rows.reshape(-1), begin),
        (
            kernel.copies.stored(T, K, Hv, q.dtype),
            jax.ShapeDtypeStruct((K, T * group), jnp.float32),
        ),
        interpret,
    )
    return kernel.copies.by_token(out, T, K), total


class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    def __init__(self, q, k, v, slots, forced, scale, interpret):
        rows, self.group, self.H = q.shape
        self.T, self.K, self.n = slots.shape
        self.length = rows // self.K // k.shape[0]  # tokens of a batch row
        self.Hv, self.kv_blocks = v.shape[-1], k.shape[1] // BLOCK
        self.initial, self.local = forced
        self.scale = scale
        self.copies = Copies(self.group)
        self.tokens = self.copies.tokens  # of a tile
        self.unit = COMPUTE_WGS * self.tokens  # tokens of a unit of work: in one block
        self.runs = self.T // self.unit
        self.units = self.K * self.runs
        self.ctas = min(_jax.multiprocessors(), self.units)
        self.interpret = bool(interpret)

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        slots = COMPUTE_WGS * PART_STAGES
        return dict(
            q_smem=tiles(COMPUTE_WGS, ROWS, self.H, dtype=dtype),
            k_smem=tiles(KV_STAGES, BLOCK, self.H, dtype=dtype),
            v_smem=tiles(KV_STAGES, BLOCK, self.Hv, dtype=dtype),
            part_smem=tiles(slots, ROWS, self.Hv, dtype=dtype),
            out_smem=tiles(COMPUTE_WGS, ROWS, self.Hv, dtype=dtype),
            total_smem=plgpu.SMEM((COMPUTE_WGS, ROWS), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=COMPUTE_WGS * self.copies.arrivals),
            q_free=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
            kv_ready=plgpu.Barrier(num_barriers=KV_STAGES, num_arrivals=2),
            kv_free=plgpu.Barrier(num_barriers=KV_STAGES, num_arrivals=COMPUTE_WGS),
            part_ready=plgpu.Barrier(num_barriers=slots, num_arrivals=self.copies.arrivals),
            part_free=plgpu.Barrier(num_barriers=slots),
        )

    def body(self, q, k, v, part, lse, slots, rows, begin, out, total, **scratch):
        """One CTA: what its warpgroups do."""
        wg = lax.axis_index("wg")
        b, first = begin[0], begin[1]

        @pl.when(wg < COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(216, action="increase")
            self.compute(wg, first, lse, out, total, **scratch)

        @pl.when(wg == COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(72, action="decrease")
            self.memory(b, first, q, k, v, part, slots, rows, **scratch)

    def for_each_unit(self, visit, init):
        """carry = visit(turn, kv head, first token of the unit, counted from `first`, carry)."""
        cta = lax.axis_index("cta")
        turns = lax.div(self.units - 1 - cta, jnp.int32(self.ctas)) + 1

        def step(turn, carry):
            head, run = div_rem(cta + turn * self.ctas, self.runs)
            return visit(turn, head, run * self.unit, carry)

        return turns, lax.fori_loop(0, turns, step, init)

    def forced(self, current):
        """How many blocks of a unit are forced; it is in block `current`."""
        return jnp.minimum(current + 1, self.initial + self.local)

    def block_of(self, current, number):
        """Forced block `number`: the initial ones, then the last ones; `current` comes last."""
        count = self.forced(current)
        return jnp.where(number < self.initial, number, current - (count - 1 - number))

    # Memory warpgroup

    def memory(
        self, b, first, q_gmem, k_gmem, v_gmem, part_gmem, slots_gmem, rows_gmem,
        *, q_smem, k_smem, v_smem, part_smem, q_ready, q_free, kv_ready, kv_free,
        part_ready, part_free, **_,
    ):  # fmt: skip
        """Copies queries, forced blocks and parts of every unit, as soon as slots are free."""
        copy = plgpu.copy_gmem_to_smem

        def part_slot(wg, done):
            return wg * PART_STAGES + slot_of(done, PART_STAGES)

        def arrive(t):
            done, wg = div_rem(t, COMPUTE_WGS)
            plgpu.barrier_arrive(part_ready.at[part_slot(wg, done)])

        def load(turn, head, begin, carry):
            blocks, reported = carry
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(q_free))
            for wg in range(COMPUTE_WGS):
                own = begin + wg * self.tokens
                tokens = (jnp.minimum(first + own + i, self.length - 1) for i in range(self.tokens))
                known = tuple((b * self.length + t) * self.K + head for t in tokens)
                source = rows_gmem, own * self.K + head, self.K
                self.copies.copy(q_gmem, q_smem.at[wg], q_ready, *source, found=known)
            self.copies.commit()
            if not self.copies.by_tma:
                # Keys wait for the unit before: all its parts must have been reported.
                reported = self.copies.report(turn * self.n * COMPUTE_WGS, reported, 0, arrive)
                for _wg in range(COMPUTE_WGS):
                    plgpu.barrier_arrive(q_ready)
            current = lax.div(first + begin, jnp.int32(BLOCK))
            count = self.forced(current)

            @pl.loop(0, count)
            def _(number):
                slot = slot_of(blocks + number, KV_STAGES)
                pl.when(blocks + number >= KV_STAGES)(lambda: plgpu.barrier_wait(kv_free.at[slot]))
                block = jnp.minimum(self.block_of(current, number), self.kv_blocks - 1)
                keys = pl.ds(block * BLOCK, BLOCK)
                copy(k_gmem.at[b, keys, head], k_smem.at[slot], kv_ready.at[slot])
                copy(v_gmem.at[b, keys, head], v_smem.at[slot], kv_ready.at[slot])

            def load_parts(s, reported):
                done = turn * self.n + s
                for wg in range(COMPUTE_WGS):
                    slot = part_slot(wg, done)
                    read = functools.partial(plgpu.barrier_wait, part_free.at[slot])
                    pl.when(done >= PART_STAGES)(read)
                    own = ((begin + wg * self.tokens) * self.K + head) * self.n + s
                    self.copies.copy(
                        *(part_gmem, part_smem.at[slot], part_ready.at[slot], slots_gmem, own),
                        stride=self.K * self.n,
                    )
                    self.copies.commit()
                    issued = done * COMPUTE_WGS + wg + 1
                    reported = self.copies.report(issued, reported, LAG, arrive)
                return reported

            return blocks + count, lax.fori_loop(0, self.n, load_parts, reported)

        turns, (blocks, reported) = self.for_each_unit(load, (jnp.int32(0), jnp.int32(0)))
        self.copies.report(turns * self.n * COMPUTE_WGS, reported, 0, arrive)
        if self.interpret:  # the interpreter requires a wait for every barrier phase
            plgpu.barrier_wait(q_free)

            @pl.loop(jnp.maximum(blocks - KV_STAGES, 0), blocks)
            def _(t):
                plgpu.barrier_wait(kv_free.at[slot_of(t, KV_STAGES)])

            @pl.loop(jnp.maximum(turns * self.n - PART_STAGES, 0), turns * self.n)
            def _(t):
                for wg in range(COMPUTE_WGS):
                    plgpu.barrier_wait(part_free.at[wg * PART_STAGES + slot_of(t, PART_STAGES)])

    # Compute warpgroups

    def compute(
        self, wg, first, lse_gmem, out_gmem, total_gmem,
        *, q_smem, k_smem, v_smem, part_smem, out_smem, total_smem, q_ready, q_free, kv_ready,
        kv_free, part_ready, part_free,
    ):  # fmt: skip
        """64 rows of every unit."""

        def visit(turn, head, begin, blocks):
            begin = begin + wg * self.tokens
            rows = pl.ds(begin * self.group, ROWS)
            current = lax.div(first + begin, jnp.int32(BLOCK))
            count = self.forced(current)
            plgpu.barrier_wait(q_ready)

            def step(number, carry):
                acc, m, l = carry
                slot = slot_of(blocks + number, KV_STAGES)
                plgpu.barrier_wait(kv_ready.at[slot])
                s = product(q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
                s = s * (self.scale * LOG2E)
                s = lax.cond(
                    number == count - 1,
                    lambda: self.masked(s, first + begin - current * BLOCK),
                    lambda: s,
                )
                m_new = jnp.maximum(m, s.max(axis=1))
                p = jnp.exp2(s - over_columns(m_new, s))
                shrink = jnp.exp2(m - m_new)
                l = l * shrink + p.sum(axis=1)
                new = values(p.astype(q_smem.dtype), v_smem.at[slot], self.interpret)
                plgpu.barrier_arrive(kv_free.at[slot])
                return acc * over_columns(shrink, acc) + new, m_new, l

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.Hv), jnp.float32), TILE)
            nothing, lowest = (
                plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ROW) for x in (0.0, -jnp.inf)
            )
            acc, m, l = lax.fori_loop(0, count, step, (zeros, lowest, nothing))
            plgpu.barrier_arrive(q_free)

            def add(s, carry):
                acc, m, l = carry
                slot = wg * PART_STAGES + slot_of(turn * self.n + s, PART_STAGES)
                own = plgpu.load(lse_gmem.at[head, s, rows], layout=ROW, optimized=False)
                m_new = jnp.maximum(m, own)
                base = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing seen so far
                shrink, weight = jnp.exp2(m - base), jnp.exp2(own - base)
                plgpu.barrier_wait(part_ready.at[slot])
                x = plgpu.load(part_smem.at[slot], layout=TILE).astype(jnp.float32)
                plgpu.barrier_arrive(part_free.at[slot])
                wide = over_columns(weight, x)
                acc = acc * over_columns(shrink, x) + jnp.where(wide > 0, x * wide, 0.0)
                return acc, m_new, l * shrink + weight

            acc, m, l = lax.fori_loop(0, self.n, add, (acc, m, l))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous copies have read these
            one = jnp.where(l > 0, l, 1.0)
            out_smem[wg] = (acc * over_columns(1 / one, acc)).astype(out_smem.dtype)
            total_smem[wg] = m + jnp.log2(one)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                total_smem.at[wg], total_gmem.at[head, rows], commit_group=False
            )
            self.copies.store(out_smem.at[wg], out_gmem, begin, head, self.K)
            return blocks + count

        self.for_each_unit(visit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def masked(self, s, place):
        """s with -inf after each row's own token; the first token has this place in the block."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        limit = place + 1 + row // self.group
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=TILE)
        return jnp.where(column < over_columns(limit, s), s, -jnp.inf)
