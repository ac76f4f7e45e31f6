"""Which devices need keys of which others, as far as a rule without data says: before any run."""

from __future__ import annotations

import jax
import numpy as np

from xsake.masks.rule import Grid, Rule
from xsake.parallel.context.layout import Layout


def live_pairs(bound: Rule, queries: Layout, keys: Layout) -> np.ndarray:
    """bool [devices, devices]: whether a query of device d may see a key of device s."""
    grid = Grid((queries.length, keys.length), (queries.run, keys.run))
    live = live_blocks(bound, grid)
    for axis, side in enumerate((queries, keys)):  # by slot: the runs of a device are neighbours
        first = np.arange(grid.counts[axis]) * side.run
        live = np.take(live, side.index(first) // side.run, axis)
    runs = (queries.local // queries.run, keys.local // keys.run)
    count = queries.devices
    return np.logical_or.reduce(live.reshape(count, runs[0], count, runs[1]), (1, 3))


def live_blocks(bound: Rule, grid: Grid) -> np.ndarray:
    """bool [row blocks, kv blocks]: where a rule without data can allow a pair, for any head."""
    if (spans := bound.spans(grid)) is not None:
        column = np.arange(grid.counts[1])
        return np.asarray((column >= spans.live_lo[:, None]) & (column < spans.live_hi[:, None]))
    with jax.ensure_compile_time_eval():
        live = np.asarray(jax.jit(lambda: bound.classify(grid)[0])())
    return np.logical_or.reduce(np.broadcast_to(live, (*live.shape[:2], *grid.counts)), (0, 1))


def live_steps(pairs: np.ndarray) -> tuple[int, ...]:
    """The steps r ≥ 1 in which some device d needs keys of device d - r."""
    count = len(pairs)
    device = np.arange(count)
    return tuple(r for r in range(1, count) if pairs[device, (device - r) % count].any())


def reach(bound: Rule, length: int) -> tuple[int, int] | None:
    """How many keys before and after a query's own place the rule can allow.

    None if the last query sees the first key or the reverse: that is no window, and tokens beyond
    the ends of the text could be allowed too.
    """
    spans = bound.spans(Grid((length, length), (1, 1)))
    if spans is None:
        return None
    lo, hi = spans.live(length)
    token, some = np.arange(length), hi > lo
    left, right = (
        int(np.max(np.where(some, x, 0), initial=0)) for x in (token - lo, hi - 1 - token)
    )
    return None if max(left, right) >= length - 1 else (max(left, 0), max(right, 0))
