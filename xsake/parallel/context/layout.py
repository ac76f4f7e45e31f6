"""Which tokens of a sequence lie on which device of the context axis.

    contiguous   device 0: 0 1   device 1: 2 3   device 2: 4 5   device 3: 6 7
    zigzag       device 0: 0 7   device 1: 1 6   device 2: 2 5   device 3: 3 4      (8 half chunks)

Under causality a device of a contiguous layout has the more work the later its tokens are. In the
zigzag layout every device has an early half chunk and the late one that makes up for it.

A *slot* is an index into the sequence as it is laid out, device after device; an *index* is a
token's place in the text. They are the same in a contiguous layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

LayoutName = Literal["contiguous", "zigzag"]
NAMES = ("contiguous", "zigzag")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One side, queries or keys, of a sequence over the devices."""

    name: str
    devices: int
    local: int  # tokens of a device

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.devices * self.local

    @property
    def run(self) -> int:
        """Tokens that lie on one device one after the other."""
        return self.local if self.name == "contiguous" else self.local // 2

    def index(self, slot: Any) -> Any:
        """The place in the text of the tokens in these slots, NumPy or JAX integers."""
        if self.name == "contiguous":
            return slot
        device, offset = slot // self.local, slot % self.local
        first = offset // self.run == 0
        chunk = first * device + (1 - first) * (2 * self.devices - 1 - device)
        return chunk * self.run + offset % self.run

    def check(self, what: str) -> None:
        """Raises where the tokens of a device cannot be laid out."""
        if self.name not in NAMES:
            raise ValueError(f"layout must be one of {list(NAMES)}, got {self.name!r}")
        if self.name == "zigzag" and self.local % 2:
            raise ValueError(
                f"layout 'zigzag' needs an even number of {what} on every device, got "
                f"{self.local}; make the length a multiple of {2 * self.devices}"
            )


def token_order(length: int, devices: int, layout: str = "contiguous") -> np.ndarray:
    """The tokens in the order in which they lie on the devices: `tokens[:, order]` lays them out.

    `np.argsort(order)` is the inverse. Everything but attention treats every token by itself, so a
    model permutes its tokens, targets, positions and segment ids once, before its first layer.

    >>> token_order(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if length % devices:
        raise ValueError(
            f"a sequence of {length} tokens does not divide over {devices} devices; pad it to "
            f"{-(-length // devices) * devices}"
        )
    sides = Layout(layout, devices, length // devices)
    sides.check("tokens")
    return np.asarray(sides.index(np.arange(length)))
