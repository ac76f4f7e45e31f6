"""The rows of the tables of Native Sparse Attention; `tables` writes them as Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]  # head, rows


def nsa(records: list[Record]) -> Cells:
    """The suite `nsa`."""
    lines = [
        [
            f"{record['case'].partition(' T=')[0]}, {record['T']:,} tokens",
            record["direction"],
            f"{record['median_seconds']:.2f}",
            f"{record['temporary_bytes'] / 2**20:.0f}",
            f"{record['peak_resident_bytes'] / 2**20:.0f}",
            f"{record['load_average']:.1f}",
            f"{record['error']:.1e}",
        ]
        for record in records
    ]
    head = "case | direction | seconds | temporary MiB | process MiB | load average | error"
    return head.split(" | "), lines


def hopper_nsa(records: list[Record]) -> Cells:
    """The suite `hopper-nsa`: forward / backward in ms, an implementation a column."""
    names = list(dict.fromkeys(record["implementation"] for record in records))
    found: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        row = found.setdefault((record["case"], record["part"]), {})
        row.setdefault(record["implementation"], []).append(record)
    lines = []
    for (case, part), by_name in sorted(found.items(), key=lambda item: _order(records, item[0])):
        times = [
            " / ".join(f"{1e3 * record['median_seconds']:.2f}" for record in by_name.get(name, []))
            for name in names
        ]
        per_pair = [
            f"{x['picoseconds_per_pair']:.2f}"
            for x in by_name.get("xsake", [])
            if "picoseconds_per_pair" in x
        ]
        lines.append([case, part, *times, " / ".join(per_pair)])
    return ["case", "part", *names, "ps per pair of query and key"], lines


def _order(records: list[Record], row: tuple[str, str]) -> tuple[int, int]:
    """Cases by length, in the order of the file; parts of a case stay together."""
    cases = list(dict.fromkeys(record["case"] for record in records))
    lengths = {record["case"]: record["T"] for record in records}
    of_groups = row[0].startswith("selected")
    return of_groups, lengths[row[0]] * len(cases) + cases.index(row[0])
