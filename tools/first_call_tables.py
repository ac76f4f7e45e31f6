"""Tables of docs/kernels.md: the choice between `xla` and `dense`, and first calls."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], Iterable[list[str]]]  # the head and the rows of a table


def costs(records: list[Record]) -> Cells:
    """Milliseconds of a forward and a backward, and seconds to compile, by both backends."""
    by_case: dict[str, dict[str, Record]] = {}
    for record in records:
        by_case.setdefault(record["case"], {})[record["backend"]] = record
    head = ["B·N·T·H, rule, dtype", "`xla` ms", "`dense` ms", "compile `xla` s", "`dense` s"]
    rows = [
        [
            case,
            *(f"{1e3 * found[name]['median_seconds']:.3g}" for name in ("xla", "dense")),
            *(f"{found[name]['compile_seconds']:.2g}" for name in ("xla", "dense")),
        ]
        for case, found in by_case.items()
    ]
    return head, rows


STAGES = ("trace", "lower", "compile", "run", "first_call")


def first_call(records: list[Record]) -> Cells:
    """Seconds by stage, medians over repeats, beside the CPU seconds of the process."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["case"], record["variant"]), []).append(record)
    head = ["case", "by", *(stage.replace("_", " ") + " s" for stage in STAGES), "CPU s"]
    rows = [
        [case, variant, *(_median(found, f"{x}_seconds") for x in (*STAGES, "cpu"))]
        for (case, variant), found in groups.items()
    ]
    return head, rows


def _median(records: list[Record], key: str) -> str:
    values = [record[key] for record in records if key in record]
    return f"{statistics.median(values):.2f}" if values else ""
