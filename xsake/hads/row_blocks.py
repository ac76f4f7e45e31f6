"""Row blocks of a causal head: the minimum and maximum number of kv blocks that each visits.

A head of n row blocks (blocks of queries) allows n (n + 1) / 2 blocks. Density is blocks visited ÷
those. Row block i keeps between floors(n)[i] blocks, the forced ones (`selection.is_forced`), and
ceilings(n)[i], all that causality allows.
"""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.selection import is_forced

# Row blocks that an end weight applies to. The last one may hold a single token; with the one
# before it, they hold more than a whole block of tokens.
END = 2


def count_blocks(length: int, block: int) -> int:
    """Blocks that hold `length` tokens, at least 1; the last may be short."""
    length = plain(length)
    if not isinstance(length, numbers.Integral) or isinstance(length, bool):
        raise ValueError(f"length must be a whole number of tokens, got {length!r}")
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    return int(-(-length // block))


def allowed(n: int) -> Bool[np.ndarray, "n n"]:
    """Which kv blocks each row block may visit: row block i those from 0 to i."""
    return np.tri(n, dtype=bool)


def forced(n: int, band: int = 0) -> Bool[np.ndarray, "n n"]:
    """Which kv blocks each row block always visits."""
    row, column = np.ogrid[:n, :n]
    return is_forced(row, column, band)


def floors(n: int, band: int = 0) -> Int[np.ndarray, " n"]:
    """int32: how many blocks each row block is forced to keep.

    >>> floors(5)
    array([1, 2, 2, 2, 2], dtype=int32)
    """
    return forced(n, band).sum(1, dtype=np.int32)


def ceilings(n: int) -> Int[np.ndarray, " n"]:
    """int32: how many blocks causality allows each row block."""
    return np.arange(1, n + 1, dtype=np.int32)


def weights(n: int, end_weight: float) -> Float[np.ndarray, " n"]:
    """How much each row block counts in a budget: 1, and end_weight in the last END of them.

    >>> weights(4, 3.0)
    array([1., 1., 3., 3.])
    """
    return np.where(np.arange(n) < n - END, 1.0, end_weight)


def least_density(n: int, band: int = 0) -> float:
    """The density of the forced blocks alone."""
    return float(floors(n, band).sum() / (n * (n + 1) / 2))


def density_at(density: float, n: int, other: int, band: int = 0) -> float:
    """Converts a density for n row blocks to one for `other` row blocks.

    The fraction of optional (not forced) blocks that is kept stays the same.

    Forced blocks are a larger part of a short text. A density that is possible for a long text may
    be impossible for a short one.

    >>> round(density_at(0.10, 128, 32), 3)
    0.182
    """
    blocks_of_density(density, n, 1, band)  # raises if n row blocks cannot have this density
    if n == other:
        return density
    own, others = (least_density(x, band) for x in (n, other))
    free = (density - own) / (1 - own) if own < 1 else 1.0
    return others + max(free, 0.0) * (1 - others)


def check_density(density: Any) -> None:
    """Raises unless `density` is a number above 0 and at most 1."""
    if not is_number(density) or not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, got {density!r}")


def plain(x: Any) -> Any:
    """The number in a scalar array of JAX or NumPy; everything else as it is."""
    is_array = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
    return x.item() if is_array and x.ndim == 0 else x


def is_number(x: Any) -> bool:
    """Whether x is a real number of Python or NumPy; True and False are not."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def check_sizes(**sizes: Any) -> None:
    """Raises unless each is a whole number of at least 1, or 0 for `band`."""
    for name, size in sizes.items():
        least = 0 if name == "band" else 1
        is_whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        if not is_whole or size < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {size!r}")


def blocks_of_density(density: float, n: int, heads: int, band: int = 0) -> int:
    """How many blocks `heads` heads of n row blocks keep in all; raises if the forced are more."""
    check_density(density)
    most = heads * n * (n + 1) // 2
    least = heads * int(floors(n, band).sum())
    requested = round(density * most)
    if requested < least:
        smallest = np.ceil(1000 * least / most) / 1000
        forced, remedy = "first and diagonal", "or smaller blocks"
        if band:
            forced += f", and {band} before the diagonal"
            remedy = "a narrower band, or smaller blocks"
        raise ValueError(
            f"density {density} is below {smallest:.3f}, the share of the blocks that are always "
            f"kept ({forced}) of {n} row blocks; use at least that, {remedy} "
            "(`xsake calibrate --block`, `xsake train --hads.block`)"
        )
    return requested


def extended(
    counts: Float[np.ndarray, "layers heads m"], n: int, end: int, band: int = 0
) -> Float[np.ndarray, "layers heads n"]:
    """Resizes counts of m row blocks to n, in proportion to which a budget is then filled.

    The first row blocks keep their counts. Those beyond m get the mean density of the last quarter
    of the m. With an `end`, the last `end` of the n are set apart: each keeps the fraction of its
    optional (not forced) blocks that its counterpart among the m keeps, and the others beyond
    m - end the mean fraction of the last quarter of the m before their end. Row blocks that are all
    forced blocks have no such fraction and do not count.
    """
    m = counts.shape[-1]
    known = m - end
    most, old_most = ceilings(n), ceilings(m)
    floor, old_floor = (floors(x, band) * (end > 0) for x in (n, m))
    forced = int((most == floor).sum())  # of the n row blocks; they are the first ones
    if known <= forced < n - end:
        raise ValueError(
            f"a plan with an end weight needs at least {forced + end + 1} calibrated row blocks "
            f"to be extended to {n}, this one has {m}: all blocks before its end are forced; "
            "calibrate on longer texts, or with smaller blocks"
        )
    kept = (counts - old_floor) / np.maximum(old_most - old_floor, 1)
    last = kept[..., max(min(forced, known - 1), known - max(1, m // 4)) : known]
    optional, first = most - floor, min(m, n) - end
    parts = [
        counts[..., :first],  # floor + kept · optional would differ in the last bit
        floor[first : n - end] + last.mean(-1, keepdims=True) * optional[first : n - end],
        floor[n - end :] + kept[..., known:] * optional[n - end :],
    ]
    return np.concatenate(parts, -1)


def stretched(scores: np.ndarray, n: int) -> np.ndarray:
    """Resizes scores [..., m, m] to n row blocks: truncates, or extrapolates.

    A row block beyond m takes the scores of row block m - 1: nearby columns at the same distance
    from the diagonal, the others from the column at the same relative position, rounded down.
    """
    m = scores.shape[-1]
    if n <= m:
        return scores[..., :n, :n]
    row, column = np.ogrid[:n, :n]
    source = np.minimum(row, m - 1)
    near = source // 2
    away = row - column
    far = column * np.maximum(source - near, 1) // np.maximum(row - near, 1)
    taken = np.where(away <= near, source - away, far)
    taken = np.clip(np.where(row < m, column, taken), 0, m - 1)
    return np.where(column <= row, scores[..., source, taken], 0)
