"""The memory warpgroup: TMA copies into shared memory, ahead of the compute warpgroups.

ring       a tile for every step, as many in flight as the ring has slots
resident   a tile for every work tile, which stays for all its steps
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import slot_of
from xsake.backends.hopper.scheduler import WorkTile


class Ring(NamedTuple):
    """Tiles that are copied once per step."""

    stages: int  # slots
    await_free: Callable[[Any], None]  # (slot): returns when the slot was read
    load: Callable[[WorkTile, Any, Any], None]  # (work tile, the step's tokens, slot): copies


class Resident(NamedTuple):
    """A tile that is copied once per work tile."""

    source: Callable[[WorkTile], Any]  # its tile in global memory
    smem: Any
    ready: Any  # barrier: the copy has arrived
    # Barrier: the compute warpgroups have read the previous work tile's copy. None: the preceding
    # resident's barrier covers this one too.
    free: Any


def stream(kernel, work, index, first, second, residents, residents_last=False, step_count=None):
    """Copies both rings' tiles of every step of every work tile, as soon as their slots are free.

    Residents are copied after the first tile of the first ring, whose slot may be free sooner; with
    `residents_last`, after the first tiles of both rings. They are prefetched into L2 before that.
    step_count: how many steps a work tile has; None: all those of its visits.
    """
    step_count = step_count or (lambda work_tile: work_tile.count * kernel.splits)

    def load_tile(work_tile, carry):
        done, tiles_before = carry  # steps and work tiles loaded so far
        steps = step_count(work_tile)

        def load_residents():
            for source, smem, ready, free in residents:
                if free is not None:
                    pl.when(tiles_before > 0)(functools.partial(plgpu.barrier_wait, free))
                plgpu.copy_gmem_to_smem(source(work_tile), smem, ready)

        def prefetch_residents():
            for source, *_ in residents:
                plgpu.async_prefetch(source(work_tile))

        if kernel.scheduler.persistent and not kernel.interpret:
            pl.when(steps > 0)(prefetch_residents)

        @pl.loop(0, steps)
        def _(t):
            tokens = pl.ds(kernel.first_token(index, work_tile, t), kernel.step)

            def fill(ring):
                slot = slot_of(done + t, ring.stages)
                pl.when(done + t >= ring.stages)(lambda: ring.await_free(slot))
                ring.load(work_tile, tokens, slot)

            fill(first)
            if residents_last:
                fill(second)
            pl.when(t == 0)(load_residents)
            if not residents_last:
                fill(second)

        return done + steps, tiles_before + (steps > 0).astype(jnp.int32)

    done, tiles = kernel.scheduler.for_each_tile(work, load_tile, (0, 0), fetches=True)
    if kernel.interpret:  # the interpreter requires a wait for every barrier phase
        for ring in (first, second):

            @pl.loop(jnp.maximum(done - ring.stages, 0), done)
            def _(t, ring=ring):
                ring.await_free(slot_of(t, ring.stages))

        for free in (x.free for x in residents if x.free is not None):
            pl.when(tiles > 0)(functools.partial(plgpu.barrier_wait, free))
