"""How many bytes of keys and values each method sends, and which one is taken.

    ring     live steps × keys of a device
    gather   other devices × capacity in blocks
    halo     the reach of the window on both sides

The numbers are known when a call is traced: the rule's bound, sizes and capacities decide them. The
ring sends less at run time where a mask from data leaves steps without a live block.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xsake import masks
from xsake.masks.rule import Grid, Rule
from xsake.parallel.context import steps
from xsake.parallel.context.layout import Layout

METHODS = ("halo", "ring", "gather")
MOST_BLOCKS = 1 << 26  # block pairs up to which the capacity of a rule is counted


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the traffic of a call depends on."""

    queries: Layout
    keys: Layout
    block: tuple[int, int]
    bound: Rule  # without data; allows at least as much as the mask
    is_static: bool  # the bound is the mask
    token_bytes: int  # of one key and its value, over the batch and the kv heads of a device
    capacity: int | None = None  # kv blocks from each other device, as asked for
    moves_rows: bool = False  # queries are sent to other devices for balance

    @property
    def chunk_bytes(self) -> int:
        """Keys and values of a device."""
        return self.keys.local * self.token_bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One method: the bytes that a device receives in the forward, or why it cannot run."""

    received_bytes: int = 0
    held_bytes: int = 0  # of other devices' keys and values, at one time
    reason: str | None = None
    steps: tuple[int, ...] = ()  # ring: those that can have a live block
    capacity: int = 0  # gather: blocks from each other device
    reach: tuple[int, int] = (0, 0)  # halo: keys before and after a device's own


def estimates(problem: Problem) -> dict[str, Estimate]:
    """The methods by name."""
    return {"ring": _ring(problem), "halo": _halo(problem), "gather": _gather(problem)}


def chosen(found: dict[str, Estimate], asked: str | None) -> str:
    """The method asked for, or the one with the least traffic; of equals, the least memory."""
    if asked is None:
        able = [name for name in METHODS if found[name].reason is None]
        return min(able, key=lambda name: (found[name].received_bytes, found[name].held_bytes))
    if asked not in METHODS:
        raise ValueError(
            f"method {asked!r} is not one of {list(METHODS)}; leave it out for the one with the "
            "least traffic"
        )
    if (reason := found[asked].reason) is not None:
        raise ValueError(f"method {asked!r} cannot run this call: it {reason}")
    return asked


def _ring(problem: Problem) -> Estimate:
    bound = masks.everything() if problem.moves_rows else problem.bound
    live = steps.live_steps(steps.live_pairs(bound, problem.queries, problem.keys))
    chunk = problem.chunk_bytes  # those in use and those that arrive
    return Estimate(len(live) * chunk, min(len(live), 2) * chunk, steps=live)


def _halo(problem: Problem) -> Estimate:
    queries, keys, bk = problem.queries, problem.keys, problem.block[1]
    if problem.moves_rows:
        return Estimate(reason="needs every query beside its window; leave balance out")
    if keys.name != "contiguous" or queries != keys:
        return Estimate(reason="needs layout 'contiguous' and as many queries as keys")
    reach = steps.reach(problem.bound, keys.length)
    if reach is None:
        return Estimate(reason="needs a rule whose keys lie within a window around each query")
    # whole blocks, and no more than there is
    left, right = (min(-(-side // bk) * bk, keys.length - keys.local) for side in reach)
    size = (left + right) * problem.token_bytes
    return Estimate(size, size, reach=(left, right))


def _gather(problem: Problem) -> Estimate:
    bk, others = problem.block[1], problem.keys.devices - 1
    if problem.keys.run % bk or problem.queries.run % problem.block[0]:
        return Estimate(
            reason=f"needs whole blocks of {problem.block} on every device; pad the sequence"
        )
    most = problem.keys.local // bk
    capacity = problem.capacity
    if capacity is None:
        capacity = _needed(problem) if problem.is_static and not problem.moves_rows else most
    capacity = min(capacity, most)
    size = capacity * bk * problem.token_bytes
    return Estimate(others * size, (others + 1) * size, capacity=capacity)


def _needed(problem: Problem) -> int:
    """The largest number of kv blocks that a device needs of another one, under the bound."""
    queries, keys = problem.queries, problem.keys
    most = keys.local // problem.block[1]
    grid = Grid((queries.length, keys.length), (queries.run, problem.block[1]))
    if grid.counts[0] * grid.counts[1] > MOST_BLOCKS:
        return most
    live = steps.live_blocks(problem.bound, grid)
    rows = queries.index(np.arange(grid.counts[0]) * queries.run) // queries.run
    columns = keys.index(np.arange(grid.counts[1]) * problem.block[1]) // problem.block[1]
    live = live[rows][:, columns].reshape(queries.devices, -1, keys.devices, most)
    counts = np.logical_or.reduce(live, 1).sum(-1)
    return max(1, int(counts[~np.eye(queries.devices, dtype=bool)].max(initial=0)))
