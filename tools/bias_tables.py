"""The rows of the table of bias and token masks; `tables` writes them as Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # head, rows

XSAKE = "xsake"
NAMES = {"jax_nn_xla": "XLA", "jax_nn_cudnn": "cuDNN"}


def hopper_bias(records: list[Record]) -> Cells:
    """The suite `hopper-bias`: TFLOP/s, and the speedup over the faster of jax.nn's two."""
    directions = list(dict.fromkeys(record["direction"] for record in records))
    found: dict[str, dict[str, dict[str, Record]]] = {}
    for record in records:
        row = found.setdefault(record["case"], {}).setdefault(record["direction"], {})
        row[record["implementation"]] = record
    lines = [
        [case, *(cell for direction in directions for cell in _cells(row.get(direction, {})))]
        for case, row in found.items()
    ]
    head = [x for direction in directions for x in (direction, "speedup over jax.nn")]
    return ["kind, B·N·T·H", *head], lines


def _cells(by_name: dict[str, Record]) -> list[str]:
    """(TFLOP/s, times faster than the faster peer and its name) of a case and direction."""
    if XSAKE not in by_name:
        return ["", ""]
    peers = {name: x for name, x in by_name.items() if name != XSAKE and "missing" not in x}
    speed = f"{by_name[XSAKE]['teraflops']:.0f}"
    if not peers:
        return [speed, ""]
    best = min(peers, key=lambda name: peers[name]["median_seconds"])
    ratio = peers[best]["median_seconds"] / by_name[XSAKE]["median_seconds"]
    return [speed, f"{ratio:.2f} ({NAMES[best]})"]
