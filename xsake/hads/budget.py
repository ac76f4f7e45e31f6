"""How many blocks each row of each head may visit: four policies, one total, kept exactly.

    uniform   every head the same share of its blocks: the control
    entropy   a head's share in proportion to its entropy: broad heads keep more
    kl        the next block goes where it saves most KL(sparse ‖ dense)
    output    the next block goes where it saves most error of the projected attention output

Counts are int32 [layers, heads, n]. Blocks are counted in whole, forced ones included, and add up
to round(density · blocks that causality allows).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

from xsake.hads import rows

POLICIES = ("uniform", "entropy", "kl", "output")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Counts, and what had to be decided about heads that say nothing."""

    counts: np.ndarray  # int32 [layers, heads, n]
    requested: float
    notes: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Blocks kept ÷ blocks that causality allows, over all layers and heads."""
        layers, heads, n = self.counts.shape
        return float(self.counts.sum() / (layers * heads * n * (n + 1) / 2))


def uniform(density: float, layers: int, heads: int, n: int, band: int = 0) -> Budget:
    """Every head the same: row i keeps about density · (i + 1) blocks, forced ones at least.

    What the floors of short rows take is taken from the long ones.
    """
    return _shared(np.ones((layers, heads)), density, n, band, ())


def entropy(values: Any, density: float, n: int, band: int = 0) -> Budget:
    """Splits the budget over heads in proportion to their entropy.

        share[l, h] = clip(c · entropy[l, h], floor, 1),   c such that the total is the budget

    Args:
      values: [layers, heads], normalised token entropies. A head without one (NaN) gets the mean.
      density: of all layers and heads together.
      n: rows of blocks.
      band: forced blocks before the diagonal.
    """
    values = np.asarray(values, np.float64)
    bad = ~np.isfinite(values) | (values < 0)
    notes = _named("has no entropy and gets the mean", bad)
    mean = values[~bad].mean() if not bad.all() else 1.0
    values = np.where(bad, mean, values)
    if values.max() == 0:
        notes += ("every head has entropy 0: the budget is uniform",)
        values = np.ones_like(values)
    return _shared(np.maximum(values, 1e-6), density, n, band, notes)


def by_cost(cost: Any, density: float, band: int = 0) -> Budget:
    """Gives block after block to the row where the next one saves most; `kl` and `output` are this.

        minimise Σ cost[l, h, i, counts[l, h, i] - 1]   over counts with Σ counts = budget

    exactly, where each row's cost is convex in its count. Where it is not, its greatest convex
    minorant stands in: all rows but one are then where that touches the cost.

    Args:
      cost: [layers, heads, n, n]: cost[..., i, c - 1] is what row i costs with c blocks. Entries
        past c = i + 1 are not read. A head with a NaN keeps the uniform share.
      density: of all layers and heads together.
      band: forced blocks before the diagonal.
    """
    return by_gains(falling_gains(cost, band), density, band)


def falling_gains(cost: Any, band: int = 0) -> np.ndarray:
    """What each block after the forced ones saves, never more than the one before it.

    [layers, heads, n, n] -> [layers, heads, n, n - 1]: entry c - 1 is the step from c to c + 1
    blocks on the convex minorant of the row's cost; -inf where there is no such step, NaN all over
    a head whose cost has one.
    """
    cost = np.asarray(cost, np.float64)
    n = cost.shape[-1]
    floor, most = rows.floors(n, band), rows.ceilings(n)
    may_grow = (np.arange(1, n) >= floor[:, None]) & (np.arange(1, n) < most[:, None])
    lost = ~np.isfinite(np.where(rows.allowed(n), cost, 0)).all((2, 3))
    gains = -np.diff(np.where(rows.allowed(n), np.nan_to_num(cost), 0), axis=-1)
    for i in range(n):
        part = gains[:, :, i, floor[i] - 1 : most[i] - 1]
        rising = (np.diff(part, axis=-1) > 0).any(-1)
        for l, h in zip(*np.nonzero(rising), strict=True):
            part[l, h] = isotonic_regression(part[l, h], increasing=False).x
    gains = np.where(may_grow, gains, -np.inf)
    gains[lost] = np.nan
    return gains


def by_gains(gains: np.ndarray, density: float, band: int = 0) -> Budget:
    """The budget of `by_cost` from the gains of its cost."""
    layers, heads, n, _ = gains.shape
    total = rows.blocks_of_density(density, n, layers * heads, band)
    counts = np.broadcast_to(rows.floors(n, band), (layers, heads, n)).astype(np.int32).copy()
    lost = np.isnan(gains).any((2, 3))
    if lost.any():
        counts[lost] = uniform(density, int(lost.sum()), 1, n, band).counts[:, 0]
    gains = np.where(lost[..., None, None], -np.inf, gains)
    notes = _named("has a cost that is not a number and keeps the uniform share", lost)
    dead = ~lost & (gains.max((2, 3), initial=-np.inf) <= 0)
    notes += _named("gains nothing by any block and gets what the others leave", dead)
    counts += _largest(gains, total - int(counts.sum())).sum(-1, dtype=np.int32)
    return Budget(counts, density, notes)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Marks the `count` largest; of equal ones the first, so that of a falling row a prefix."""
    if count <= 0:
        return np.zeros(values.shape, bool)
    last = np.partition(values, values.size - count, axis=None)[values.size - count]
    taken = values > last
    level = np.flatnonzero(values == last)
    taken.reshape(-1)[level[: count - int(taken.sum())]] = True
    return taken


def surrogate(mass: Any, band: int = 0) -> np.ndarray:
    """KL by count if every query of a row had the row's mean mass: -ln(mass of the c best blocks).

    [..., n, n] -> [..., n, n]. Never above the mean KL of the same blocks (-ln is convex), and
    convex in c once the forced blocks are in.
    """
    kept = np.cumsum(_in_order(np.asarray(mass, np.float64), band), -1)
    return np.maximum(-np.log(np.clip(kept, 1e-30, None)), 0)


def additive(sensitivity: Any, band: int = 0) -> np.ndarray:
    """Output error by count if the errors of dropped blocks just added up: their sum."""
    ordered = _in_order(np.asarray(sensitivity, np.float64), band)
    return ordered.sum(-1, keepdims=True) - np.cumsum(ordered, -1)


def _in_order(values: np.ndarray, band: int) -> np.ndarray:
    """Each row's values, the forced blocks' first, the others falling; 0 past what is allowed."""
    n = values.shape[-1]
    values = np.where(rows.allowed(n), values, 0)
    key = np.where(rows.forced(n, band), np.inf, np.where(rows.allowed(n), values, -np.inf))
    return np.take_along_axis(values, np.argsort(-key, axis=-1, kind="stable"), -1)


def cost_of(cost: Any, counts: Any) -> float:
    """The sum that `by_cost` minimises."""
    chosen = np.take_along_axis(np.asarray(cost, np.float64), np.asarray(counts)[..., None] - 1, -1)
    return float(chosen.sum())


def level(density: float, layers: int, heads: int, n: int, band: int = 0) -> Budget:
    """The same number of blocks for every row that has so many: what a window is.

    A level between two whole numbers is spread over the rows.
    """
    target = np.ones((layers, heads, n))
    return filled(target, density, n, band, ())


def _shared(weight: np.ndarray, density: float, n: int, band: int, notes: Any) -> Budget:
    target = weight[..., None] * rows.ceilings(n)
    return filled(target, density, n, band, notes)


def filled(
    target: np.ndarray, density: float, n: int, band: int = 0, notes: tuple[str, ...] = ()
) -> Budget:
    """Counts in proportion to target [layers, heads, n], clipped, rounded, with the exact total."""
    layers, heads, _ = target.shape
    total = rows.blocks_of_density(density, n, layers * heads, band)
    low, high = rows.floors(n, band), rows.ceilings(n)
    small, large = 0.0, float(n / target.min())
    for _ in range(100):
        middle = (small + large) / 2
        too_much = np.clip(middle * target, low, high).sum() > total
        small, large = (small, middle) if too_much else (middle, large)
    exact = np.clip(small * target, low, high)
    # every head is rounded along its rows, so that heads of one target get the same counts to a
    # block; the few blocks that are then missing or over go to single rows
    sums = np.rint(np.cumsum(exact, -1))
    counts = np.diff(sums, axis=-1, prepend=0).astype(np.int64)
    counts = np.clip(counts, low, high)
    missing = total - int(counts.sum())
    step = 1 if missing > 0 else -1
    while missing:
        open_rows = counts < high if step > 0 else counts > low
        nearest = np.where(open_rows, step * (exact - counts), -np.inf)
        best = np.argsort(-nearest, axis=None, kind="stable")[: abs(missing)]
        best = best[open_rows.reshape(-1)[best]]
        counts.reshape(-1)[best] += step
        missing -= step * len(best)
    return Budget(counts.astype(np.int32), density, tuple(notes))


def _named(what: str, which: np.ndarray) -> tuple[str, ...]:
    return tuple(f"layer {l}, head {h} {what}" for l, h in zip(*np.nonzero(which), strict=True))
