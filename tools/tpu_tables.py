"""The rows of the table of the `tpu` backend; `tables` writes them as Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def estimate(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Counted work and the least time of each chip."""
    chips = [name.removesuffix("_limit") for name in records[0] if name.endswith("_limit")]
    lines = [
        [
            record["case"],
            str(record["block"]),
            record["direction"],
            f"{record['visits']:,}",
            f"{record['operations'] / 1e12:.2f}",
            f"{record['copied_bytes'] / 1e9:.2f}",
            f"{record['operations'] / record['copied_bytes']:.0f}",
            *(
                f"{1e3 * record[f'{chip}_least_seconds']:.2f}, {record[f'{chip}_limit']}"
                for chip in chips
            ),
        ]
        for record in records
    ]
    head = "mask | block | direction | visits | 10¹² operations | GB | operations per byte"
    return [*head.split(" | "), *(f"{chip}: at least ms, limit" for chip in chips)], lines
