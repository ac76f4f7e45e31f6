"""When a run stops before its last step: signals, and how all processes stop at the same step.

    SIGTERM to one process ─ its request ─ compiled step: max over devices ─ metrics.stop_request
                                                     └─ every process reads it and stops there

With one process a request is known at once. With several, every process passes its own to the
compiled step, and all of them read the largest one after the next step has been dispatched. So a
signal to one process saves a checkpoint of all, two steps later at most.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Reasons by the number that processes exchange; the largest wins.
REASONS = ("", "stop_at", "seconds", "signal")


def requests(reason: str | None, mesh: Mesh) -> Any:
    """int32 [devices] on the mesh: this process's request for each of its devices, 0 for none."""
    number = np.full(1, REASONS.index(reason or ""), np.int32)
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size,), everywhere, lambda index: number)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that collects SIGTERM and SIGINT; the second SIGINT interrupts at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        previous = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:
        # Only the main thread may set handlers. In another thread the caller must stop training.
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
