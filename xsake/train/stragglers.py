"""Stragglers: steps that take ten times the median of the steps before them."""

from __future__ import annotations

import collections
import statistics

FACTOR = 10.0
LEAST = 5  # steps before the first that can be a straggler
WINDOW = 101  # steps whose median it is compared with


class Stragglers:
    """The times of the last steps."""

    def __init__(self) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def median_if_slow(self, seconds: float) -> float | None:
        """The median of the steps before, if this one took ten times as long; else None.

        >>> times = Stragglers()
        >>> [times.median_if_slow(x) for x in (2.0, 1.0, 1.0, 1.0, 1.0, 9.9, 10.1)]
        [None, None, None, None, None, None, 1.0]
        """
        known = self._seconds
        median = statistics.median(known) if len(known) >= LEAST else None
        known.append(seconds)
        return median if median is not None and seconds > FACTOR * median else None
