"""Which devices need keys of which others, as far as a rule without data says: before any run."""

from __future__ import annotations

import jax
import numpy as np

from xsake.masks.rule import Grid, Rule
from xsake.parallel.context.layout import Layout


def live_pairs(bound: Rule, queries: Layout, keys: Layout) -> np.ndarray:
    """bool [devices, devices]: whether a query of device d may see a key of device s."""
    grid = Grid((queries.length, keys.length), (queries.run, keys.run))
    with jax.ensure_compile_time_eval():
        live = np.asarray(jax.jit(lambda: bound.classify(grid)[0])())
    live = np.logical_or.reduce(np.broadcast_to(live, (*live.shape[:2], *grid.counts)), (0, 1))
    for axis, side in enumerate((queries, keys)):  # by slot: the runs of a device are neighbours
        first = np.arange(grid.counts[axis]) * side.run
        live = np.take(live, side.index(first) // side.run, axis)
    runs = (queries.local // queries.run, keys.local // keys.run)
    count = queries.devices
    return np.logical_or.reduce(live.reshape(count, runs[0], count, runs[1]), (1, 3))


def live_steps(pairs: np.ndarray) -> tuple[int, ...]:
    """The steps r ≥ 1 in which some device d needs keys of device d - r."""
    count = len(pairs)
    device = np.arange(count)
    return tuple(r for r in range(1, count) if pairs[device, (device - r) % count].any())
