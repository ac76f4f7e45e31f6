"""Rows of blocks of a causal head: what a row may visit, and what it always visits.

  0 1 2 3 4
0 F                F  forced: the first block, the diagonal, and `band` blocks before it
1 F F              o  allowed by causality: a policy decides
2 F o F
3 F o o F          n rows allow n (n + 1) / 2 blocks; density is blocks visited ÷ those
4 F o o o F
"""

from __future__ import annotations

import numpy as np


def count_blocks(length: int, block: int) -> int:
    """Blocks that hold `length` tokens; the last may be short."""
    return -(-length // block)


def allowed(n: int) -> np.ndarray:
    """bool [n, n]: row i may visit blocks 0 … i."""
    return np.tri(n, dtype=bool)


def forced(n: int, band: int = 0) -> np.ndarray:
    """bool [n, n]: the first block, the diagonal, and `band` blocks before the diagonal."""
    row, column = np.ogrid[:n, :n]
    near = (column <= row) & (column >= row - band)
    return near | ((column == 0) & (row >= 0))


def floors(n: int, band: int = 0) -> np.ndarray:
    """int32 [n]: how many blocks each row is forced to keep.

    >>> floors(5)
    array([1, 2, 2, 2, 2], dtype=int32)
    """
    return forced(n, band).sum(1, dtype=np.int32)


def ceilings(n: int) -> np.ndarray:
    """int32 [n]: how many blocks causality allows each row."""
    return np.arange(1, n + 1, dtype=np.int32)


def least_density(n: int, band: int = 0) -> float:
    """The density of the forced blocks alone."""
    return float(floors(n, band).sum() / (n * (n + 1) / 2))


def density_at(density: float, n: int, other: int, band: int = 0) -> float:
    """The density of `other` rows whose unforced blocks are kept in the same share as those of n.

    Forced blocks weigh more in a short text: what is little for a long one may be too little there.

    >>> round(density_at(0.10, 128, 32), 3)
    0.182
    """
    blocks_of_density(density, n, 1, band)  # refuses what n rows cannot have
    if n == other:
        return density
    own, others = (least_density(x, band) for x in (n, other))
    free = (density - own) / (1 - own) if own < 1 else 1.0
    return others + max(free, 0.0) * (1 - others)


def blocks_of_density(density: float, n: int, heads: int, band: int = 0) -> int:
    """Blocks that `heads` heads of n rows keep in all at a density; refused below the forced."""
    most = heads * n * (n + 1) // 2
    least = heads * int(floors(n, band).sum())
    asked = round(density * most)
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, got {density}")
    if asked < least:
        smallest = np.ceil(1000 * least / most) / 1000
        raise ValueError(
            f"density {density} is below {smallest:.3f}, which the first block and the diagonal "
            f"of {n} rows take; ask for that, or use smaller blocks"
        )
    return asked
