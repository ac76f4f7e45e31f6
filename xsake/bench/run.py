"""Runs the suites of `xsake bench --suite NAME` and writes their JSON files.

An interrupted suite resumes from its file, if commit, machine, versions and `quick` match, and in
`hopper-versions` the commit of the other version: cases with a record in the file are not measured
again. The suites `cpu` and `model` are one case each; they start again and cannot be joined. `join`
merges the files of several processes, each of which measured a subset of the cases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from xsake import _files
from xsake.bench import peers
from xsake.bench.suites import (
    Part,
    Record,
    Suite,
    costs,
    cpu,
    hopper,
    hopper_bias,
    hopper_features,
    hopper_nsa,
    hopper_rules,
    hopper_statistics,
    hopper_versions,
    model,
    nsa,
)
from xsake.bench.timing import provenance

SUITES: dict[str, Suite] = {
    "costs": costs,
    "cpu": cpu,
    "hopper": hopper,
    "hopper-bias": hopper_bias,
    "hopper-features": hopper_features,
    "hopper-nsa": hopper_nsa,
    "hopper-rules": hopper_rules,
    "hopper-statistics": hopper_statistics,
    "hopper-versions": hopper_versions,
    "model": model,
    "nsa": nsa,
}

COMMITS = ("commit", "against_commit")  # of this version; of the other one in `hopper-versions`
WHOLE = ("cpu", "model")  # suites of one case
MUST_MATCH = (
    *COMMITS,
    "suite",
    "machine",
    "versions",
    "xla_flags",
    "quick",
)  # for files to be resumed or joined


def run_suite(
    name: str,
    out: Path,
    quick: bool = False,
    model: Path | None = None,
    report: Callable[[Record], None] | None = None,
    only: str = "",
    cases: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Runs a suite and writes its JSON: provenance, and one record per measurement.

    Args:
      name: of the suite, one of SUITES.
      out: the JSON file.
      quick: shorter sequences and fewer repeats.
      model: the checkpoint that the suite "model" measures.
      report: called with every record.
      only: measures the cases with this text in their name, or one of several with | between
        them; "cpu" and "model" are a single case.
      cases: measures these instead.
    """
    parts = {part.case: part for part in _parts(name, quick, model)}
    asked = _asked(name, parts, only) if cases is None else list(cases)
    out.parent.mkdir(parents=True, exist_ok=True)
    facts, began = _facts(name, quick), time.perf_counter()
    result = _earlier(out, facts)
    records = [record for record in result["results"] if record["case"] in parts]
    held, seconds_before = {record["case"] for record in records}, result["seconds"]
    for case in asked:
        if case in held:
            continue
        for record in parts[case].measure(records):
            records.append(record)
            if report is not None:
                report(record)
            # after every record, so that an interrupted run keeps what it measured
            seconds = seconds_before + time.perf_counter() - began
            result = {**facts, "seconds": seconds, "results": records}
            out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _facts(name: str, quick: bool) -> dict[str, Any]:
    facts = provenance() | {"suite": name, "quick": quick}
    if name in ("hopper", "hopper-bias", "hopper-nsa", "hopper-rules"):
        facts["versions"] |= peers.versions()
    if name == "hopper-versions":
        facts["against_commit"] = hopper_versions.against_commit()
    return facts


def _asked(name: str, cases: Iterable[str], only: str) -> list[str]:
    """The cases with this text in their name, or one of several with | between them."""
    cases = list(cases)
    texts = [text for text in only.split("|") if text] or [""]
    asked = [case for case in cases if any(text in case for text in texts)]
    if not asked:
        raise ValueError(f"suite {name!r} has no case with {only!r} in its name: {cases}")
    return asked


def cases(name: str) -> list[str]:
    """The names of a suite's cases, among which `only` chooses."""
    return [name] if name in WHOLE else [part.case for part in _parts(name, False, None)]


def earlier(name: str, out: Path, quick: bool) -> dict[str, Any]:
    """What `run_suite` would resume from: the contents of `out`, or an empty result."""
    return _earlier(out, _facts(name, quick))


def groups(name: str, quick: bool, only: str = "") -> list[list[str]]:
    """The cases with `only` in their name; those that need each other's records are together."""
    parts = {part.case: part for part in _parts(name, quick, None)}
    found: dict[str, list[str]] = {}
    for case in _asked(name, parts, only):
        found.setdefault(parts[case].group or f"case {case}", []).append(case)
    return list(found.values())


def join(name: str, files: Sequence[Path], out: Path, command: str | None = None) -> dict[str, Any]:
    """Merges result files of the same commit, machine, versions, flags and `quick`, in suite order.

    `date` is the earliest, `seconds` the sum. `command` is that of a program that started the
    others; without it, the file lists the commands of all.
    """
    reports = [_read(file) for file in files]
    for file, report in zip(files, reports, strict=True):
        if report.get("suite") != name:
            raise ValueError(f"{file} {_suite_of(report)}; it cannot be joined as {name!r}")
    if name in WHOLE:
        raise ValueError(f"suite {name!r} is one case: its files cannot be joined")
    first = reports[0]
    for file, report in zip(files, reports, strict=True):
        for fact in MUST_MATCH:
            mine, its = report.get(fact), first.get(fact)
            if mine != its:
                raise ValueError(
                    f"{file} has {fact} {mine}, {files[0]} has {its}; join only "
                    "files with the same commits, machine, versions, XLA_FLAGS and --quick"
                )
    cases = [part.case for part in _parts(name, first["quick"], None)]
    held = [{record["case"] for record in report["results"]} for report in reports]
    for case in dict.fromkeys(case for found in held for case in found):
        if case not in cases:
            raise ValueError(f"suite {name!r} has no case {case!r}")
        if sum(case in found for found in held) > 1:
            raise ValueError(f"case {case!r} is in more than one of {list(map(str, files))}")
    records = [record for report in reports for record in report["results"]]
    whole = first | {
        "date": min(report["date"] for report in reports),
        "command": command or "; ".join(dict.fromkeys(x["command"] for x in reports)),
        "seconds": sum(report["seconds"] for report in reports),
        "results": sorted(records, key=lambda record: cases.index(record["case"])),
    }
    out.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def _parts(name: str, quick: bool, model: Path | None) -> Iterable[Part]:
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not one of {list(SUITES)}")
    return SUITES[name].parts(quick, model)


def _earlier(out: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The contents of `out` if its facts match, else an empty result."""
    empty = {**facts, "seconds": 0.0, "results": []}
    if not out.exists():
        return empty
    found = _read(out)  # raises, rather than replace a file of another kind
    if found.get("suite", facts["suite"]) != facts["suite"]:
        raise ValueError(f"{out} {_suite_of(found)}; name another file with --out")
    commits = [facts[x] for x in COMMITS if x in facts]
    if any(x == "unknown" or x.endswith("+") for x in commits):
        return empty
    return found if all(found.get(x) == facts.get(x) for x in MUST_MATCH) else empty


def _suite_of(report: dict[str, Any]) -> str:
    if "suite" in report:
        return f"has results of the suite {report['suite']!r}"
    return "was written by an earlier version, which did not note the suite"


def _read(path: Path) -> dict[str, Any]:
    """A result file, or an error that names it."""
    types: dict[str, Any] = dict.fromkeys(("commit", "date", "command"), str)
    types |= {"machine": dict, "versions": dict, "quick": bool}
    types |= {"seconds": (int, float), "results": list}
    found = _files.read_record(path, "a result file of `xsake bench`", types)
    for number, record in enumerate(found["results"]):
        if not isinstance(record, dict) or not isinstance(record.get("case"), str):
            raise ValueError(
                f"{path} is not a result file of `xsake bench`: result {number} has no case"
            )
    return found
