"""The rows of the table of two versions' times; `tables` writes them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # head, rows


def hopper_versions(records: list[Record]) -> Cells:
    """The suite `hopper-versions`: above 1, the newer version is slower."""
    commits = dict.fromkeys(record["against_commit"][:7] for record in records)
    older = ", ".join(commits)
    head = ["B·N·T·H", "direction", "ms", f"ms at {older}", "ratio", "least … most of the rounds"]
    return head, [
        [
            record["case"],
            record["direction"],
            f"{1e3 * record['median_seconds']:.3f}",
            f"{1e3 * record['against_median_seconds']:.3f}",
            f"{record['over_against']:.3f}",
            f"{record['least_over_against']:.3f} … {record['most_over_against']:.3f}",
        ]
        for record in records
    ]
