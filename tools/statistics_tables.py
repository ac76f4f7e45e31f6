"""The rows of the table of statistics beside the Hopper forward; `tables` writes them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # head, rows


def hopper_statistics(records: list[Record]) -> Cells:
    """The suite `hopper-statistics`: time of observed calls ÷ time of the plain call."""
    head = [
        "B·N·T·H",
        "plain ms",
        'time with `what="blocks"` ÷ plain',
        'time with `what="tokens"` ÷ plain',
        "largest error",
    ]
    return head, [
        [
            record["case"],
            f"{1e3 * record['plain_seconds']:.3f}",
            _ratio(record, "blocks_over_plain"),
            _ratio(record, "observed_over_plain"),
            f"{max(record['errors'].values()):.0e}",
        ]
        for record in records
    ]


def _ratio(record: Record, name: str) -> str:
    return f"{record[name]:.3f}" if name in record else "not measured"
