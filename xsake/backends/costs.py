"""How long a call takes on a backend, estimated from measured constants.

    seconds = call + pairs · (pair + product · (H + Hv)) + compile / CALLS

for a forward and a backward. `pairs` are the token pairs that are computed: all of them, or those
of a band, by `dense`; those of the listed blocks by `xla`, or of the capacity of traced lists.

`costs.json` has the constants by platform and size of an element. `xsake bench --suite costs`
measures, `python -m xsake.bench.suites.costs` fits them. Without constants there is no estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xsake import _jax
from xsake.backends import Call

PATH = Path(__file__).with_name("costs.json")
# How many calls a compilation is spread over: those of a short training run.
CALLS = 1000


@dataclasses.dataclass(frozen=True)
class Constants:
    """Seconds of a backend on one platform."""

    call: float
    pair: float
    product: float  # of one pair, for each element of its q · k and p · v
    compile: float

    def seconds(self, pairs: int, width: int) -> float:
        """Of one call with so many token pairs, and H + Hv = width."""
        running = self.call + pairs * (self.pair + self.product * width)
        return running + self.compile / CALLS


@functools.cache
def table() -> dict[str, dict[str, Constants]]:
    """Constants by platform and backend."""
    found = json.loads(PATH.read_text())["constants"]
    return {
        where: {name: Constants(**constants) for name, constants in backends.items()}
        for where, backends in found.items()
    }


def platform_key(itemsize: int) -> str:
    """What the table calls this platform; a CPU computes in float32 whatever the dtype."""
    platform = _jax.platform()
    return platform if platform == "cpu" else f"{platform}, {min(itemsize, 4)} bytes"


def estimates(call: Call, pairs: dict[str, Callable[[Call], int]]) -> dict[str, float]:
    """Seconds of the call by backends that compute so many token pairs; {} without constants."""
    constants = table().get(platform_key(call.q.dtype.itemsize), {})
    if not constants:
        return {}
    width = call.sizes.H + call.sizes.Hv
    return {name: constants[name].seconds(count(call), width) for name, count in pairs.items()}


def listed_pairs(call: Call) -> int:
    """Token pairs of the blocks that all heads list, or can list where the mask is traced."""
    mask, sizes = call.mask, call.sizes
    counts: Any = mask.kv_count
    lists = math.prod(counts.shape[:2])
    if isinstance(counts, jax.core.Tracer):
        listed = lists * mask.kv_index.shape[-1]
    else:
        listed = int(np.asarray(counts).sum())
    return listed * (sizes.B * sizes.N // lists) * math.prod(mask.block)
