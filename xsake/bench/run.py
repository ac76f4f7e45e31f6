"""Suites by name: what `xsake bench --suite NAME` measures and writes.

A suite is a list of parts. A file that was cut off, by the same commit on the same machine, is gone
on with: parts whose case it holds are not measured again. Parts that several processes measured
become one file by `join`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xsake.bench import peers
from xsake.bench.suites import cpu, hopper
from xsake.bench.timing import provenance

Suite = Callable[[bool], Iterable[hopper.Part]]
SUITES: dict[str, Suite] = {
    "cpu": lambda quick: [("cpu", lambda done: cpu.suite(quick))],
    "hopper": hopper.suite,
    "hopper-features": hopper.feature_suite,
}

SAME = ("commit", "machine", "versions", "quick")  # what rows of one file have in common


def run_suite(
    name: str,
    out: Path,
    quick: bool = False,
    model: Path | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
    only: str = "",
) -> dict[str, Any]:
    """Runs a suite and writes its JSON: provenance and one row per measurement.

    `model` is the checkpoint that the suite "model" measures. Only cases with `only` in their name
    are measured; the suites "cpu" and "model" are one piece.
    """
    parts = dict(_parts(name, quick, model))
    asked = [case for case in parts if only in case]
    if not asked:
        raise ValueError(f"suite {name!r} has no case with {only!r} in its name: {list(parts)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    facts, began = provenance() | {"quick": quick}, time.perf_counter()
    if name == "hopper":
        facts["versions"] |= peers.versions()
    report = _earlier(out, facts)
    rows = [row for row in report["results"] if row["case"] in parts]
    held, seconds_before = {row["case"] for row in rows}, report["seconds"]
    for case in asked:
        if case in held:
            continue
        for row in parts[case](rows):
            rows.append(row)
            if tell is not None:
                tell(row)
            # after every row: a run that is cut off keeps what it measured
            seconds = seconds_before + time.perf_counter() - began
            report = {**facts, "seconds": seconds, "results": rows}
            out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def join(name: str, files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes files of the same commit, machine, versions and sizes as one, in the suite's order.

    Its `command` is all of theirs, its `date` the first, its `seconds` their sum.
    """
    reports = [json.loads(file.read_text()) for file in files]
    first = reports[0]
    for file, report in zip(files, reports, strict=True):
        for fact in SAME:
            if report[fact] != first[fact]:
                raise ValueError(
                    f"{file} has {fact} {report[fact]}, {files[0]} has {first[fact]}; join only "
                    "files of one commit, machine and size"
                )
    cases = [case for case, _ in _parts(name, first["quick"], None)]
    held = [{row["case"] for row in report["results"]} for report in reports]
    for case in dict.fromkeys(case for found in held for case in found):
        if case not in cases:
            raise ValueError(f"suite {name!r} has no case {case!r}")
        if sum(case in found for found in held) > 1:
            raise ValueError(f"case {case!r} is in more than one of {list(map(str, files))}")
    rows = [row for report in reports for row in report["results"]]
    whole = first | {
        "date": min(report["date"] for report in reports),
        "command": "; ".join(dict.fromkeys(report["command"] for report in reports)),
        "seconds": sum(report["seconds"] for report in reports),
        "results": sorted(rows, key=lambda row: cases.index(row["case"])),
    }
    out.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def _parts(name: str, quick: bool, model: Path | None) -> Iterator[hopper.Part]:
    if name == "model":
        if model is None:
            raise ValueError("suite 'model' needs a checkpoint: --model PATH")
        from xsake.bench.suites import model as checkpoint  # needs the extra `model`

        yield "model", lambda done: checkpoint.suite(model, quick)
    elif name in SUITES:
        yield from SUITES[name](quick)
    else:
        raise ValueError(f"suite {name!r} is not one of {[*SUITES, 'model']}")


def _earlier(out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a file holds of the same commit, machine, versions and sizes; else nothing."""
    nothing = {**facts, "seconds": 0.0, "results": []}
    if not out.exists() or facts["commit"] == "unknown" or facts["commit"].endswith("+"):
        return nothing
    found = json.loads(out.read_text())
    return found if all(found.get(x) == facts[x] for x in SAME) else nothing
