"""How many blocks each row block of each head keeps: five policies that meet one total exactly.

    uniform   every head keeps the same share of its blocks: the control
    entropy   a head's share is proportional to its entropy: broad heads keep more
    kl        the next block goes where it reduces KL(sparse ‖ dense) most
    output    the next block goes where it reduces the error of the projected output most
    loss      the next block goes where it reduces the change of the loss most, to first order

Counts are int32 [layers, heads, n], for n row blocks. Forced blocks are included
in the counts, and a partial block counts as a whole block. The total is
round(density · blocks that causality allows). An `end_weight` gives the last row blocks of a text
more of this total, or less: they have that weight, the others weight 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import ArrayLike, Bool, Float, Int
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

from xsake.hads import row_blocks

POLICIES = ("uniform", "entropy", "kl", "output", "loss")
ROUNDING = 1e-4  # of a row block's mass, summed in float32; what it lacks beyond is that of sinks


@dataclasses.dataclass(frozen=True)
class Budget:
    """Counts, and notes on heads without usable statistics."""

    counts: Int[np.ndarray, "layers heads n"]  # int32
    notes: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Blocks kept ÷ blocks that causality allows, over all layers and heads."""
        layers, heads, n = self.counts.shape
        return float(self.counts.sum() / (layers * heads * n * (n + 1) / 2))


def uniform(
    density: float, layers: int, heads: int, n: int, band: int = 0, end_weight: float = 1.0
) -> Budget:
    """Every head the same: row block i keeps blocks in proportion to its weight · (i + 1).

    Forced blocks put early row blocks above their share; later ones get fewer to compensate.

    Args:
      density: of all layers and heads together.
      layers: of the model.
      heads: of each layer.
      n: row blocks.
      band: forced blocks before the diagonal.
      end_weight: weight of the last `row_blocks.END` row blocks; the others have weight 1.
    """
    return _shared(np.ones((layers, heads)), density, n, band, end_weight, ())


def entropy(
    values: Float[ArrayLike, "layers heads"],
    density: float,
    n: int,
    band: int = 0,
    end_weight: float = 1.0,
) -> Budget:
    """Splits the budget over heads in proportion to their entropy.

        share[l, h] = clip(c · entropy[l, h], floor, 1),   c such that the total is the budget

    Args:
      values: normalised token entropies. A head without one (NaN) gets the mean.
      density: of all layers and heads together.
      n: row blocks.
      band: forced blocks before the diagonal.
      end_weight: weight of the last `row_blocks.END` row blocks; the others have weight 1.
    """
    values = np.asarray(values, np.float64)
    bad = ~np.isfinite(values) | (values < 0)
    notes = _named("has no entropy and gets the mean", bad)
    mean = values[~bad].mean() if not bad.all() else 1.0
    values = np.where(bad, mean, values)
    if values.max() == 0:
        notes += ("every head has entropy 0: the budget is uniform",)
        values = np.ones_like(values)
    return _shared(np.maximum(values, 1e-6), density, n, band, end_weight, notes)


def by_cost(
    cost: Float[ArrayLike, "layers heads n n"],
    density: float,
    band: int = 0,
    end_weight: float = 1.0,
) -> Budget:
    """Greedy allocation by cost curves: the next block goes where it reduces cost most.

        minimise Σ weight[i] · cost[l, h, i, counts[l, h, i] - 1]
        over counts with Σ counts = budget

    This is exact where each row block's cost is convex in its count. A cost that is not convex is
    replaced by its lower convex envelope; all row blocks except at most one then end at a count
    where envelope and cost agree.

    Args:
      cost: cost[..., i, c - 1] is the cost of row block i with c blocks. Entries past c = i + 1 are
        not read. A head with a NaN keeps the uniform share.
      density: of all layers and heads together.
      band: forced blocks before the diagonal.
      end_weight: weight of the last `row_blocks.END` row blocks; the others have weight 1.
    """
    return by_gains(falling_gains(cost, band), density, band, end_weight)


def falling_gains(
    cost: Float[ArrayLike, "layers heads n n"], band: int = 0
) -> Float[np.ndarray, "layers heads n n-1"]:
    """The gain of each block beyond the forced ones, made non-increasing.

    Entry c - 1 is the step from c to c + 1 blocks on the lower convex envelope of the row block's
    cost; -inf where there is no such step. A head whose cost contains a NaN is all NaN.
    """
    cost = np.asarray(cost, np.float64)
    n = cost.shape[-1]
    floor, most = row_blocks.floors(n, band), row_blocks.ceilings(n)
    may_grow = (np.arange(1, n) >= floor[:, None]) & (np.arange(1, n) < most[:, None])
    lost = ~np.isfinite(np.where(row_blocks.allowed(n), cost, 0)).all((2, 3))
    gains = -np.diff(np.where(row_blocks.allowed(n), np.nan_to_num(cost), 0), axis=-1)
    for i in range(n):
        part = gains[:, :, i, floor[i] - 1 : most[i] - 1]
        rising = (np.diff(part, axis=-1) > 0).any(-1)
        for l, h in zip(*np.nonzero(rising), strict=True):
            part[l, h] = isotonic_regression(part[l, h], increasing=False).x
    gains = np.where(may_grow, gains, -np.inf)
    gains[lost] = np.nan
    return gains


def by_gains(
    gains: Float[np.ndarray, "layers heads n n-1"],
    density: float,
    band: int = 0,
    end_weight: float = 1.0,
) -> Budget:
    """The budget of `by_cost` from `gains = falling_gains(cost, band)`.

    Minimises Σ weight[i] · cost[l, h, i, counts[l, h, i] - 1], with weight[i] = end_weight in the
    last `row_blocks.END` row blocks and 1 in the others.
    """
    layers, heads, n, _ = gains.shape
    total = row_blocks.blocks_of_density(density, n, layers * heads, band)
    counts = np.broadcast_to(row_blocks.floors(n, band), (layers, heads, n)).astype(np.int32).copy()
    lost = np.isnan(gains).any((2, 3))
    if lost.any():
        counts[lost] = uniform(density, int(lost.sum()), 1, n, band, end_weight).counts[:, 0]
    gains = np.where(lost[..., None, None], -np.inf, gains)
    gains = gains * row_blocks.weights(n, end_weight)[:, None]
    notes = _named("has a cost that is not a number and keeps the uniform share", lost)
    dead = ~lost & (gains.max((2, 3), initial=-np.inf) <= 0)
    notes += _named(
        "gains nothing from further blocks and gets only blocks that no other head needs", dead
    )
    counts += _largest(gains, total - int(counts.sum())).sum(-1, dtype=np.int32)
    return Budget(counts, notes)


def _largest(values: Float[np.ndarray, "*shape"], count: int) -> Bool[np.ndarray, "*shape"]:
    """Marks the `count` largest values; ties go to the lower index.

    In a non-increasing list the marked values are therefore a prefix.
    """
    if count <= 0:
        return np.zeros(values.shape, bool)
    last = np.partition(values, values.size - count, axis=None)[values.size - count]
    marked = values > last
    tied = np.flatnonzero(values == last)
    marked.reshape(-1)[tied[: count - int(marked.sum())]] = True
    return marked


def surrogate(
    mass: Float[ArrayLike, "*batch n n"], band: int = 0
) -> Float[np.ndarray, "*batch n n"]:
    """Approximate KL by number of blocks kept, as if every query had its row block's mean mass.

        cost[..., i, c - 1] = -ln(mass of the c best blocks of row block i and of its sinks)

    It is at most the mean KL of the same blocks, because -ln is convex. It is convex in c for
    counts that include the forced blocks. The mass of sinks is what the blocks lack to 1.
    """
    mass = np.asarray(mass, np.float64)
    sinks = 1 - mass.sum(-1, keepdims=True)
    sinks = np.where(sinks > ROUNDING, sinks, 0)
    kept = np.cumsum(_in_order(mass, band), -1) + sinks
    return np.maximum(-np.log(np.clip(kept, 1e-30, None)), 0)


def additive(
    sensitivity: Float[ArrayLike, "*batch n n"], band: int = 0
) -> Float[np.ndarray, "*batch n n"]:
    """Approximate output error by number of blocks kept: the sum of the dropped sensitivities."""
    ordered = _in_order(np.asarray(sensitivity, np.float64), band)
    return ordered.sum(-1, keepdims=True) - np.cumsum(ordered, -1)


def _in_order(
    values: Float[np.ndarray, "*batch n n"], band: int
) -> Float[np.ndarray, "*batch n n"]:
    """Each row block's values: forced blocks first, then descending; 0 for blocks not allowed."""
    n = values.shape[-1]
    values = np.where(row_blocks.allowed(n), values, 0)
    key = np.where(
        row_blocks.forced(n, band), np.inf, np.where(row_blocks.allowed(n), values, -np.inf)
    )
    return np.take_along_axis(values, np.argsort(-key, axis=-1, kind="stable"), -1)


def cost_of(
    cost: Float[ArrayLike, "layers heads n n"], counts: Int[ArrayLike, "layers heads n"]
) -> float:
    """The sum that `by_cost` minimises if all row blocks have weight 1."""
    chosen = np.take_along_axis(np.asarray(cost, np.float64), np.asarray(counts)[..., None] - 1, -1)
    return float(chosen.sum())


def level(density: float, layers: int, heads: int, n: int, band: int = 0) -> Budget:
    """The same number of blocks for every row block, as in a sliding window.

    The first row blocks get fewer, as many as causality allows.
    If the number is fractional, some row blocks get one block more than others.
    """
    target = np.ones((layers, heads, n))
    return filled(target, density, n, band, ())


def _shared(
    weight: Float[np.ndarray, "layers heads"],
    density: float,
    n: int,
    band: int,
    end_weight: float,
    notes: tuple[str, ...],
) -> Budget:
    """Row block i gets blocks in proportion to (i + 1) · the head's weight · the row block's."""
    target = weight[..., None] * row_blocks.ceilings(n) * row_blocks.weights(n, end_weight)
    return filled(target, density, n, band, notes)


def filled(
    target: Float[np.ndarray, "layers heads n"],
    density: float,
    n: int,
    band: int = 0,
    notes: tuple[str, ...] = (),
) -> Budget:
    """Counts in proportion to target, clipped, rounded, with the exact total."""
    layers, heads, _ = target.shape
    total = row_blocks.blocks_of_density(density, n, layers * heads, band)
    low, high = row_blocks.floors(n, band), row_blocks.ceilings(n)
    small, large = 0.0, float(n / target.min())
    for _ in range(100):
        middle = (small + large) / 2
        too_much = np.clip(middle * target, low, high).sum() > total
        small, large = (small, middle) if too_much else (middle, large)
    exact = np.clip(small * target, low, high)
    # Round the cumulative sums of each head, so that heads of equal targets differ by one block at
    # most. Then add or remove single blocks until the total is exact.
    sums = np.rint(np.cumsum(exact, -1))
    counts = np.diff(sums, axis=-1, prepend=0).astype(np.int64)
    counts = np.clip(counts, low, high)
    missing = total - int(counts.sum())
    step = 1 if missing > 0 else -1
    while missing:
        can_change = counts < high if step > 0 else counts > low
        nearest = np.where(can_change, step * (exact - counts), -np.inf)
        best = np.argsort(-nearest, axis=None, kind="stable")[: abs(missing)]
        best = best[can_change.reshape(-1)[best]]
        counts.reshape(-1)[best] += step
        missing -= step * len(best)
    return Budget(counts.astype(np.int32), tuple(notes))


def _named(what: str, which: Bool[np.ndarray, "layers heads"]) -> tuple[str, ...]:
    return tuple(f"layer {l}, head {h} {what}" for l, h in zip(*np.nonzero(which), strict=True))
