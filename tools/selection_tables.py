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
    # a tiling that the kernel had until 2026-11-19
    has_overlap = any("overlap" in row for row in report["rows"])
    has_peaks = any("keys_per_peak" in row for row in report["rows"])
    columns = 4 + has_overlap + has_peaks

    def lines() -> Iterator[list[str]]:
        for row in report["rows"]:
            tiling = [""] * columns
            if "warpgroups" in row:
                sizes = (str(row[name] >> 10) for name in ("q_bytes", "k_bytes"))
                tiling = [str(row["warpgroups"]), *sizes, str(row["q_groups"])]
                if has_peaks:
                    tiling.insert(0, str(row["keys_per_peak"]))
                if has_overlap:
                    tiling.append("yes" if row["overlap"] else "no")
            seconds = row.get("device_seconds")
            time = "wrong" if seconds is None else f"{1e6 * seconds:.1f}"
            # the file has B·T·N·H
            B, T, N, H = row["shape"].split("·")
            yield [f"{B}·{N}·{T}·{H}", str(row["block"]), KERNELS[row["kernel"]], *tiling, time]

    peaks = " | keys per peak" * has_peaks
    head = f"B·N·T·H | block | kernel{peaks} | compute warpgroups | queries, KiB | keys, KiB"
    overlap = ["overlap"] * has_overlap
    return [*head.split(" | "), "groups of queries", *overlap, "µs"], lines()
