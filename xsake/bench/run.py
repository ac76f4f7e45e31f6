"""Suites by name: what `xsake bench --suite NAME` measures and writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xsake.bench import cpu, hopper
from xsake.bench.timing import provenance

Suite = Callable[[bool], Iterator[dict[str, Any]]]
SUITES: dict[str, Suite] = {
    "cpu": cpu.suite,
    "hopper": hopper.suite,
    "hopper-features": hopper.feature_suite,
}


def run_suite(
    name: str,
    out: Path,
    quick: bool = False,
    model: Path | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Runs a suite and writes its JSON: provenance and one row per measurement.

    `model` is the checkpoint that the suite "model" measures.
    """
    if name == "model":
        if model is None:
            raise ValueError("suite 'model' needs a checkpoint: --model PATH")
        from xsake.bench import model as checkpoint  # needs the extra `model`

        rows_of: Suite = lambda quick: checkpoint.suite(model, quick)  # noqa: E731
    elif name in SUITES:
        rows_of = SUITES[name]
    else:
        raise ValueError(f"suite {name!r} is not one of {[*SUITES, 'model']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    facts, began = provenance(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for row in rows_of(quick):
        rows.append(row)
        if tell is not None:
            tell(row)
        # after every row: a run that is cut off keeps what it measured
        report = {**facts, "seconds": time.perf_counter() - began, "results": rows}
        out.write_text(json.dumps(report, indent=1) + "\n")
    return report
