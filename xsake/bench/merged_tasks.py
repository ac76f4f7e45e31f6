"""Tables of tasks joined: those of several lengths, block sizes or methods → one.

python -m xsake.bench.suites.tasks table ─ a length, a block size ─┐
…                                                                  ├─ merge ─ docs' tables
python -m xsake.bench.suites.tasks merge ─ tables joined before ───┘
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xsake import _files
from xsake.evaluate.table import to_json

WHAT = "a table of tasks that can be joined"
CELL = ("length", "family", "method", "density")  # these fields identify a record of a table
RECORDS = ("rows", "perplexity", "infeasible")  # the lists of a table
FACTS = ("block", "calibration_data_hash", "kinds")  # of the methods of a length
FACTS_IF_RECORDED = ("made_from", "others")
SAME = ("schema", "kind", "model_hash", "filler_hash", "prompts", "seed", "rule")
SAME_IF_RECORDED = ("dtype", "implementation")  # tables from before these were have neither


def merge(out: Path, parts: list[Path], names: tuple[str, ...] = ()) -> None:
    """Joins tables of several lengths, block sizes or methods of the same model, prompts and seed.

    If a length occurs with several block sizes, the names of its methods get the block size. Of a
    cell that several tables have, the first table's is kept. A table may be one that this wrote, if
    it has one block size for each length. With `names`, these methods are kept, and from tables
    that have them at a length also dense attention and what is infeasible there. Tables of which
    nothing is kept are not named.

    Args:
      out: the JSON file to write.
      parts: JSON files that `table` or `merge` wrote, the most important first.
      names: methods to keep; default all.
    """
    tables = [_read(part) for part in parts]
    if not tables:
        raise ValueError("there is nothing to join; name files that `table` wrote")
    result: dict[str, Any] = {}
    for name in (*SAME, *SAME_IF_RECORDED):
        values = [table[name] for table in tables if name in table]
        if any(value != values[0] for value in values):
            raise ValueError(f"the tables differ in {name}; measure them again, from one folder")
        result |= {name: values[0]} if values else {}
    have = {row["method"] for table in tables for _, row in _records(table) if "method" in row}
    if missing := sorted(set(names) - have):
        raise ValueError(f"no table has the methods {missing}; those there are {sorted(have)}")
    result |= {"provenance": {}, "parts": [], **{name: [] for name in RECORDS}}
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    origins = []
    for table in tables:
        own = _parts(table)
        fresh = {cell: x for cell, x in _cells(table, own, names).items() if cell not in known}
        if names:
            lengths = {x["length"] for x in fresh.values() if x.get("method") in names}
            fresh = {cell: x for cell, x in fresh.items() if x["length"] in lengths}
        known |= fresh
        lengths = {x["length"] for x in fresh.values()}
        kept_parts = [part for part in own if part["length"] in lengths]
        result["parts"] += [part for part in kept_parts if part not in result["parts"]]
        origins += [table["provenance"]] if fresh else []
    sizes = {(part["length"], part["block"]) for part in result["parts"]}
    sizes_at = collections.Counter(length for length, _ in sizes)
    for (name, *_), row in known.items():
        if sizes_at[row["length"]] > 1 and row.get("method", "dense") != "dense":
            row["method"] += f", blocks of {row['block']}"
        result[name].append(row)
    commands = dict.fromkeys(one for x in origins for one in x["command"].split("; "))
    commits = dict.fromkeys(one for x in origins for one in x["commit"].split(", "))
    joined = {"command": "; ".join(commands), "commit": ", ".join(commits)}
    result["provenance"] = {**origins[0], **joined} if origins else joined
    out.write_text(to_json(result))


def _read(part: Path) -> dict[str, Any]:
    """A table; raises if the file is none that `table` or `merge` wrote."""
    wanted = dict.fromkeys(SAME, object) | {"rows": list, "provenance": dict}
    found = _files.read_record(part, WHAT, wanted)
    if "parts" not in found:
        _files.read_record(part, WHAT, dict.fromkeys(FACTS, object))
    return found


def _cells(
    table: dict[str, Any], parts: list[dict[str, Any]], names: tuple[str, ...]
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Records with their block size, by what identifies them, first of which is their list's name.

    Those of `names` or of all methods, of dense attention, and of what is infeasible.
    """
    block_of = {part["length"]: part["block"] for part in parts}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, row in _records(table):
        method, block = row.get("method"), block_of[row["length"]]
        if not names or method in (None, "dense", *names):
            cell = *(row.get(x) for x in CELL), None if method == "dense" else block
            found.setdefault((name, *cell), row | {"block": block})
    return found


def _records(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(its list's name, record) of all records; a table that was cut off may lack some lists."""
    for name in RECORDS:
        yield from ((name, row) for row in table.get(name, []))


def _parts(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What the methods of each length were made from; a table that `merge` wrote has several."""
    parts = table.get("parts")
    if parts is None:
        kept = (*FACTS, *(x for x in FACTS_IF_RECORDED if x in table))
        facts = {name: table[name] for name in kept}
        lengths = dict.fromkeys(row["length"] for _, row in _records(table))
        parts = [{"length": x, **facts} for x in lengths]
    if len({(x["length"], x["block"]) for x in parts}) > len({x["length"] for x in parts}):
        raise ValueError(
            "a table that has a length with two block sizes cannot be joined again; "
            "join the tables that it was made from"
        )
    return parts
