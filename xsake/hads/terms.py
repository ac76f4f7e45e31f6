"""Terms: the settings and the provenance of a plan, and what they require of its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from xsake.hads import budget, row_blocks
from xsake.hads.statistics import SELECTORS

# Smallest and largest end_weight; far beyond them the bisection of `budget.filled` would not reach
# its scale.
END_WEIGHTS = 1e-6, 1e6


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings and provenance of a plan."""

    density: float  # requested, over all layers and heads
    policy: str
    selector: str
    block: int
    length: int  # tokens of the calibration texts
    band: int = 0  # blocks before the diagonal that are always kept
    # If set, a row block keeps the fewest blocks that reach this fraction of its estimated mass, at
    # most its count.
    top_p: float | None = None
    model_hash: str = ""
    data_hash: str = ""
    notes: tuple[str, ...] = ()
    validation: str = "{}"  # JSON: metrics on held-out text
    # Weight of the last two row blocks of a text in the budget; the others have 1. A prompt ends
    # with its question, and the generated tokens depend on it most.
    end_weight: float = 1.0

    def __post_init__(self) -> None:
        row_blocks.check_density(self.density)
        row_blocks.check_sizes(block=self.block, length=self.length, band=self.band)
        check_terms(self.policy, self.selector, self.top_p, self.end_weight)


def check_terms(policy: str, selector: str, top_p: Any, end_weight: Any) -> None:
    """Raises for a name that does not exist, and for a number outside its range."""
    if policy not in budget.POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {list(budget.POLICIES)}")
    if selector not in SELECTORS:
        raise ValueError(f"selector {selector!r} is not one of {list(SELECTORS)}")
    if top_p is not None and not (row_blocks.is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    least, most = END_WEIGHTS
    if not row_blocks.is_number(end_weight) or not least <= end_weight <= most:
        raise ValueError(
            f"end_weight must be a number from {least:g} to {most:g}, got {end_weight!r}; "
            "1 weighs all row blocks alike"
        )


def check_arrays(arrays: dict[str, np.ndarray], terms: Terms) -> None:
    """Raises unless counts and scores have the shapes and ranges of a plan with these terms."""
    wanted = {"counts", "scores"} if terms.selector == "static" else {"counts"}
    if arrays.keys() != wanted:
        raise ValueError(f"it has the arrays {sorted(arrays)}, not {sorted(wanted)}")
    counts = arrays["counts"]
    if counts.dtype != np.int32 or counts.ndim != 3 or 0 in counts.shape:
        raise ValueError(
            "counts must be int32 [layers, heads, row blocks], "
            f"got {counts.dtype} {list(counts.shape)}"
        )
    n = counts.shape[-1]
    low, high = row_blocks.floors(n, terms.band), row_blocks.ceilings(n)
    if ((counts < low) | (counts > high)).any():
        raise ValueError(
            "a row block has fewer blocks than are always kept, or more than there are"
        )
    scores = arrays.get("scores", np.zeros((*counts.shape, n), np.float32))
    if scores.shape != (*counts.shape, n) or scores.dtype != np.float32:
        raise ValueError(
            f"scores must be float32 {[*counts.shape, n]}, got {scores.dtype} {list(scores.shape)}"
        )
