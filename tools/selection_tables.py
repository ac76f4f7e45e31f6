"""The rows of the table of the kernels that select blocks; `tables` writes them as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], Iterator[list[str]]]  # head, rows

KERNELS = {"outliers": "queries", "scores": "scores", "best_blocks": "lists"}


def selection(report: Record) -> Cells:
    """The suite `selection`: one line per kernel, and per tiling of the one that scores blocks.

    A tiling whose scores were wrong has no time.
    """

    def lines() -> Iterator[list[str]]:
        for row in report["rows"]:
            tiling = [""] * 5
            if "warpgroups" in row:
                sizes = (row[name] >> 10 for name in ("q_bytes", "k_bytes"))
                fields = row["keys_per_peak"], row["warpgroups"], *sizes, row["q_groups"]
                tiling = list(map(str, fields))
            seconds = row.get("device_seconds")
            time = "wrong" if seconds is None else f"{1e6 * seconds:.1f}"
            # the file has B·T·N·H
            B, T, N, H = row["shape"].split("·")
            yield [f"{B}·{N}·{T}·{H}", str(row["block"]), KERNELS[row["kernel"]], *tiling, time]

    head = (
        "B·N·T·H | block | kernel | keys per peak | compute warpgroups | queries, KiB | keys, KiB"
    )
    return [*head.split(" | "), "groups of queries", "µs"], lines()
