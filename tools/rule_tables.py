"""The rows of the table of windows, documents and causal masks; `tables` writes them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # head, rows

DIRECTIONS = ("forward", "backward")
OWN = {"xsake, mask made before": "mask made before", "xsake, whole call": "whole call"}
PEERS = {
    "cudnn_flex": "cuDNN flex",
    "flash_attention_4": "FlashAttention-4",
    "flex_attention": "FlexAttention",
}


def hopper_rules(records: list[Record]) -> Cells:
    """The suite `hopper-rules`: milliseconds forward / backward, and speedups over the best."""
    seconds: dict[str, dict[tuple[str, str], float]] = {}
    for record in records:
        row = seconds.setdefault(record["case"], {})
        if "median_seconds" in record:
            row[record["implementation"], record["direction"]] = record["median_seconds"]
    names = (*OWN, *PEERS)
    lines = [
        [case, *(_milliseconds(row, name) for name in names), *(_speedup(row, own) for own in OWN)]
        for case, row in seconds.items()
    ]
    labels = [f"XSAKE, {label}, ms" for label in OWN.values()]
    labels += [f"{label}, ms" for label in PEERS.values()]
    speedups = [f"speedup over the fastest peer, {label}" for label in OWN.values()]
    return ["rule, B·N·T·H", *labels, *speedups], lines


def _milliseconds(row: dict[tuple[str, str], float], name: str) -> str:
    """Forward / backward; a whole call has a forward only."""
    found = [row[name, direction] for direction in DIRECTIONS if (name, direction) in row]
    return " / ".join(f"{1e3 * seconds:.3f}" for seconds in found)


def _speedup(row: dict[tuple[str, str], float], own: str) -> str:
    cells = []
    for direction in DIRECTIONS:
        peers = [row[peer, direction] for peer in PEERS if (peer, direction) in row]
        if not peers or (own, direction) not in row:
            continue
        cells.append(f"{min(peers) / row[own, direction]:.2f}")
    return " / ".join(cells)
