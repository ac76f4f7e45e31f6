"""What is fixed when the loops are compiled."""

from __future__ import annotations

import dataclasses

from xsake.backends.options import XlaSteps


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the loops are compiled."""

    scale: float
    soft_cap: float | None
    steps: XlaSteps
