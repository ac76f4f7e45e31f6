"""What attention over a split sequence costs: operations, bytes and expected seconds of a device.

    Shape, devices ─┬─ operations   4 · pairs · N · H forward, 2.5 times that backward
                    ├─ bytes        context/traffic.py, which also chooses the method at run time
                    └─ seconds      operations ÷ a measured kernel's speed (benchmarks/results)
                                    bytes ÷ a link's speed (cost_data.json, with its sources)

The backward of the ring receives the keys again and the gradients of its own: twice the forward's
bytes. Gather and halo keep the keys, and receive the gradients alone.

A ring's step sends while it computes, so it takes the longer of both; gather and halo send first.
Between devices of one node the links of the node count, else every step waits for the network.
Latency of messages, launches and everything that is not attention are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from xsake import masks, shipped
from xsake.parallel.context import traffic
from xsake.parallel.context.layout import Layout

DATA = Path(__file__).with_name("cost_data.json")
BACKWARD_OPERATIONS = 2.5  # five products instead of two
BACKWARD_BYTES = {"ring": 2, "gather": 1, "halo": 1}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention layer over a whole sequence."""

    length: int
    batch: int = 1
    heads: int = 64
    kv_heads: int = 4
    head_size: int = 128
    window: int | None = None  # keys that a query sees, itself included; None: all before it
    density_ratio: float = 1.0  # blocks visited ÷ those that causality and the window allow
    itemsize: int = 2  # bytes of a number

    def __post_init__(self) -> None:
        for name in ("length", "batch", "heads", "kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if not 0 < self.density_ratio <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density_ratio}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    @property
    def rule(self) -> masks.Rule:
        """What causality and the window allow."""
        return masks.causal() if self.window is None else masks.sliding_window(self.window - 1, 0)

    @property
    def pairs(self) -> float:
        """Token pairs of one head that are computed."""
        T, w = self.length, min(self.window or self.length, self.length)
        return self.density_ratio * (w * (w + 1) / 2 + (T - w) * w)

    @property
    def operations(self) -> float:
        """Of the forward, on all devices."""
        return 4 * self.batch * self.heads * self.head_size * self.pairs


@dataclasses.dataclass(frozen=True)
class Cost:
    """One method on one device of a number of them; seconds are None without a measured card."""

    method: str
    devices: int
    direction: str  # "forward" or "backward"
    operations: float
    received_bytes: int
    held_bytes: int
    compute_seconds: float | None = None
    link_seconds: float | None = None
    expected_seconds: float | None = None


def costs(shape: Shape, devices: int, card: str | None = None, block: int = 128) -> list[Cost]:
    """Every method that can run, forward and backward, with balanced work.

    Causal sequences lie in zigzag, windows contiguously. A HADS mask (density below 1) has every
    block needed by some query of each device, which is the gather's worst case.
    """
    layout = "contiguous" if shape.window is not None else "zigzag"
    share = -(-shape.length // devices)
    if shape.length % devices or (layout == "zigzag" and share % 2):
        raise ValueError(
            f"a sequence of {shape.length} tokens does not divide over {devices} devices in layout "
            f"{layout!r}; use a multiple of {devices * (2 if layout == 'zigzag' else 1)}"
        )
    side = Layout(layout, devices, share)
    problem = traffic.Problem(
        side,
        side,
        (math.gcd(block, side.run),) * 2,
        shape.rule,
        is_static=True,
        token_bytes=2 * shape.batch * shape.kv_heads * shape.head_size * shape.itemsize,
    )
    found = []
    for method, estimate in traffic.estimates(problem).items():
        if estimate.reason is not None:
            continue
        for direction in ("forward", "backward"):
            is_backward = direction == "backward"
            times = BACKWARD_BYTES[method] if is_backward else 1
            cost = Cost(
                method,
                devices,
                direction,
                shape.operations / devices * (BACKWARD_OPERATIONS if is_backward else 1),
                estimate.received_bytes * times,
                estimate.held_bytes,
            )
            steps = len(estimate.steps) if method == "ring" else 0
            found.append(cost if card is None else _timed(cost, shape, share, steps, card))
    return found


def _timed(cost: Cost, shape: Shape, share: int, steps: int, name: str) -> Cost:
    card = card_data(name)
    density = shape.pairs / shape.length**2
    speed = measured_speed(name, cost.direction, shape.head_size, share, density)
    within = cost.devices <= card["cards_per_node"]
    link = card["node_bytes_per_second" if within else "network_bytes_per_second"]
    compute, sends = cost.operations / speed, cost.received_bytes / link
    if steps:  # the own keys first, then the longer of both in every step
        expected = compute / (steps + 1) + max(compute * steps / (steps + 1), sends)
    else:
        expected = compute + sends
    return dataclasses.replace(
        cost, compute_seconds=compute, link_seconds=sends, expected_seconds=expected
    )


# ------------------------------------------------------------------------------------------- data


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text())  # type: ignore[no-any-return]


def card_data(name: str) -> dict[str, Any]:
    """A card's constants, with their sources."""
    cards = _data()["cards"]
    if name not in cards:
        raise ValueError(f"card {name!r} is not one of {sorted(cards)}")
    return cards[name]  # type: ignore[no-any-return]


def published() -> list[dict[str, Any]]:
    """What other systems publish, with their sources."""
    return _data()["published"]  # type: ignore[no-any-return]


@functools.cache
def measurements(name: str) -> tuple[str, list[dict[str, Any]]]:
    """(file name, records) of the newest benchmark of the kernels on a card."""
    pattern = card_data(name)["results"]
    files = sorted(shipped.RESULTS.glob(pattern))
    if not files:
        raise FileNotFoundError(
            f"no result file {pattern} in {shipped.RESULTS}, which the speed of a {name} is read "
            "from; run `xsake bench --suite hopper` on one"
        )
    records = json.loads(files[-1].read_text())["results"]
    # one budget for all heads: these differ in density alone
    return files[-1].name, [x for x in records if "teraflops" in x and "heads" not in x["case"]]


def measured_speed(
    name: str, direction: str, head_size: int, length: int, density_ratio: float
) -> float:
    """Operations per second of the kernel, from the measured cases nearest to a call.

    The nearest head size and length are taken, and speeds are interpolated by density (of all
    pairs, so that causal is one half).
    """
    _, records = measurements(name)

    def nearest(key: str, wanted: int) -> int:
        return min({x[key] for x in records}, key=lambda x: abs(math.log(x / wanted)))

    at = {"H": nearest("H", head_size), "T": nearest("T", length)}
    near = [
        x
        for x in records
        if x["direction"] == direction and all(x[key] == value for key, value in at.items())
    ]
    near.sort(key=lambda x: x["density_ratio"])
    densities = [x["density_ratio"] for x in near]
    return 1e12 * float(np.interp(density_ratio, densities, [x["teraflops"] for x in near]))
