"""Gathers rows of tokens into a tile of 64 rows in shared memory (Hopper, sm90).

    groups of 8 heads and more   one TMA copy for each token, which fills whole tiles of 8 rows
    smaller groups               every thread copies 16 bytes at a time to their swizzled place

A TMA copy arrives at a barrier by itself. For the others the warpgroup that copies waits for its
copies, some tiles later, and arrives for them: `Copies.report`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import ALIGNED, ROWS, THREADS, swizzled
from xsake.backends.hopper.ptx import SCALAR, address, asm, shared_address

CHUNK = 16  # bytes that a thread copies at a time
LINE = 128  # bytes of a row of a swizzled tile
ATOM = ALIGNED * LINE  # bytes of a swizzled tile


class Copies:
    """Copies of the rows of `group` heads of the tokens of a tile."""

    def __init__(self, group: int):
        self.group, self.tokens = group, ROWS // group
        self.by_tma = group % ALIGNED == 0
        self.arrivals = self.tokens if self.by_tma else 1  # at the barrier of a tile

    def record(self, rows: Any, first: Any) -> tuple[Any, ...]:
        """What `copy` should read ahead of its call: rows[first …] of a tile's tokens."""
        return tuple(rows[first + i] for i in range(self.tokens)) if self.by_tma else ()

    def copy(
        self, source: Any, smem: Any, ready: Any, rows: Any, first: Any, stride: int = 1,
        found: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """Copies source[rows[first + i · stride]], [g, size], for the tokens i of a tile.

        `found` is those entries of rows, if they are known.
        """
        if not self.by_tma:
            _copy_by_threads(source, smem, rows, first, stride, self.group)
            return
        for i in range(self.tokens):
            row = rows[first + i * stride] if found is None else found[i]
            own = pl.ds(i * self.group, self.group)
            plgpu.copy_gmem_to_smem(source.at[row], smem.at[own], ready)

    def report(self, issued: Any, reported: Any, lag: int, arrive: Callable[[Any], None]) -> Any:
        """Waits for all but the last `lag` of the `issued` tiles, and arrives for them.

        `reported` counts those that were reported before; returns the new count. A tile is what is
        copied between two calls of `commit`.
        """
        if self.by_tma:
            return reported
        self.wait(lag)
        end = jnp.maximum(issued - lag, reported)
        pl.loop(reported, end)(arrive)
        return end

    def report_before_keys(
        self, changed: Any, issued: Any, reported: Any, lag: int, arrive: Callable[[Any], None]
    ) -> Any:
        """`report`; where the keys are about to change, of all but the last tile.

        New keys wait until all tiles of an earlier block were read, so these must be reported.
        """
        return lax.cond(
            changed,
            lambda: self.report(issued, reported, 1, arrive),
            lambda: self.report(issued, reported, lag, arrive),
        )

    def wait(self, lag: int) -> None:
        """Waits for all but the last `lag` tiles, copied by threads, of all threads."""
        _threads(f"cp.async.wait_group {lag};")
        plgpu.commit_smem()  # before the products that read them

    def commit(self) -> None:
        """Ends the copies of a tile."""
        if not self.by_tma:
            _threads("cp.async.commit_group;")

    # Results of neighbouring tokens: [T · K, g, size] by token, or [K, T · g, size] by kv head.

    def stored(self, T: int, K: int, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The array that `store` writes to."""
        shape = (T * K, self.group, size) if self.by_tma else (K, T * self.group, size)
        return jax.ShapeDtypeStruct(shape, dtype)

    def store(self, smem: Any, gmem: Any, first: Any, head: Any, heads: int) -> None:
        """Copies a tile of results: tokens from `first` on, of one of `heads` kv heads."""
        if not self.by_tma:
            plgpu.copy_smem_to_gmem(smem, gmem.at[head, pl.ds(first * self.group, ROWS)])
            return
        for i in range(self.tokens):
            own = pl.ds(i * self.group, self.group)
            target = gmem.at[(first + i) * heads + head]
            plgpu.copy_smem_to_gmem(smem.at[own], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def by_token(self, out: jax.Array, T: int, K: int) -> jax.Array:
        """What was stored, as [T, K, g, size]."""
        if self.by_tma:
            return out.reshape(T, K, self.group, -1)
        return jnp.moveaxis(out.reshape(K, T, self.group, -1), 0, 1)


def _copy_by_threads(source, smem, rows, first, stride, group):
    """Every thread copies its chunk of some rows of the tile."""
    row_bytes = smem.shape[1] * 2
    chunks = row_bytes // CHUNK  # of a row
    at_a_time = THREADS // chunks  # rows
    turns, tokens = ROWS // at_a_time, at_a_time // group
    tiles_across = row_bytes // LINE
    lines = [
        ".reg .b32 lane, row, chunk, x, to; .reg .b64 from, list, a;",
        f".reg .b32 {', '.join(f'r{turn}' for turn in range(turns))};",
        f"mov.u32 lane, %tid.x; and.b32 lane, lane, {THREADS - 1};",
        f"and.b32 chunk, lane, {chunks - 1}; div.u32 row, lane, {chunks};",
        # to: tile of 8 rows, tile across, row in the tile, swizzled place in the row
        f"shr.u32 x, row, 3; mul.lo.u32 to, x, {tiles_across * ATOM};",
        f"shr.u32 x, chunk, 3; mad.lo.u32 to, x, {ATOM}, to;",
        f"and.b32 x, row, 7; mad.lo.u32 to, x, {LINE}, to;",
        f"xor.b32 x, x, chunk; and.b32 x, x, 7; mad.lo.u32 to, x, {CHUNK}, to;",
        "add.u32 to, to, $0;",
        # from: head and chunk; list: the entry of this thread's first token
        f"rem.u32 x, row, {group}; mul.lo.u32 x, x, {row_bytes};",
        f"mad.lo.u32 x, chunk, {CHUNK}, x; cvt.u64.u32 from, x; add.u64 from, from, $1;",
        f"div.u32 x, row, {group}; mad.lo.u32 x, x, {stride}, $3; mad.wide.u32 list, x, 4, $2;",
    ]
    lines += [
        f"ld.global.nc.u32 r{turn}, [list+{4 * stride * tokens * turn}];" for turn in range(turns)
    ]
    for turn in range(turns):
        place = turn * at_a_time // ALIGNED * tiles_across * ATOM
        lines += [
            f"mad.wide.u32 a, r{turn}, {group * row_bytes}, from;",
            f"cp.async.cg.shared.global [to+{place}], [a], {CHUNK};",
        ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(smem.dtype)), plgpu.RefType(), plgpu.RefType(), SCALAR)
    )
    def emit(_, smem, source, rows, first):
        operands = [shared_address(smem), address(source), address(rows), first.registers[()]]
        asm(lines, "r,l,l,r", operands)

    emit(smem, source, rows, jnp.int32(first))


def _threads(line: str) -> None:
    @plgpu.inline_mgpu()
    def emit(_):
        asm([line])

    emit()
