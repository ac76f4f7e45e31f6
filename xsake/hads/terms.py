"""Terms: the settings and the provenance of a plan."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from xsake.hads import budget, row_blocks
from xsake.hads.statistics import SELECTORS


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
    # How many times as much as other row blocks the last ones of a text count in the budget: the
    # question of a prompt is there, and what is generated depends on them most.
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
    if top_p is not None and not (isinstance(top_p, numbers.Real) and 0 < float(top_p) <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    is_number = isinstance(end_weight, numbers.Real) and not isinstance(end_weight, bool)
    if not is_number or not 0 < float(end_weight) < float("inf"):
        raise ValueError(f"end_weight must be a number above 0, got {end_weight!r}")
