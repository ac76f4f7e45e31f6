"""The rows of the tables of certified attention; `tables` writes them as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.task_tables import Cells

Record = dict[str, Any]

ESTIMATED = ("dropped_mass", "relative_error")  # of the output, beside its time


def speed(report: Record) -> Cells:
    """suites.certificate speed, or model: times ÷ that of dense attention in the same run.

    The last form has the bound with random inputs, and a threshold with a model's activations. A
    file without times of the certificate alone has no column for them. Times of the kernels alone,
    where the file has them, come after a slash.
    """
    rows = [row for row in report["rows"] if row["kind"] == "speed"]
    limits = dict.fromkeys(row["threshold"] for row in rows if "threshold" in row)
    last = "threshold" if limits else "bound"
    shown = f"threshold {' or '.join(f'{x:g}' for x in limits)}" if limits else "bound"
    names = ["selection", "selection_and_sparse", f"certificate_with_{last}"]
    alone = any("certificate_over_dense" in row for row in rows)
    if alone:
        names.insert(2, "certificate")
    head = (
        "B·N·T·H | block | selector | density | dense ms | selection ÷ dense | selection + sparse"
    )
    more = ["+ certificate"] if alone else []
    estimated = [name for name in ESTIMATED if all(name in row for row in rows)]
    shown_estimates = [name.replace("_", " ") for name in estimated]
    return [*head.split(" | "), *more, f"+ certificate with {shown}", *shown_estimates], (
        [
            row["shape"],
            str(row["block"]),
            row["selector"],
            f"{row['density']:g}",
            _both(row, "dense_{}seconds", "{:.3f}", 1e3),
            *(_both(row, f"{name}_{{}}over_dense", "{:.2f}") for name in names),
            *(f"{row[name]:.3f}" for name in estimated),
        ]
        for row in rows
    )


def _both(row: Record, field: str, shown: str, unit: float = 1) -> str:
    """A time in a queue of calls, and that of the kernels alone if the record has it."""
    fields = (field.format(kind) for kind in ("", "device_"))
    return " / ".join(shown.format(unit * row[x]) for x in fields if x in row)


def coverage(report: Record) -> Cells:
    """suites.certificate coverage: how often intervals hold the true means."""

    def lines() -> Iterator[list[str]]:
        for row in report["rows"]:
            for name, what in (("mass", "dropped mass"), ("error", "squared output error")):
                for where in ("window", "head"):
                    key = f"{name}_by_{where}"
                    yield [
                        f"{row['density']:g}",
                        what,
                        "head × 1,024 queries" if where == "window" else "head",
                        f"{100 * row[f'{key}_covered']:.1f}",
                        f"{row[f'{key}_bias']:+.4f}",
                        f"{row[f'{key}_standard_error']:.4f}",
                    ]

    head = "density | mean of | over | covered, % | mean error of the estimate | standard error"
    return head.split(" | "), lines()


def limits(report: Record) -> Cells:
    """suites.certificate coverage: the bound, the Delta correction, and what thresholds do."""

    def lines() -> Iterator[list[str]]:
        for row in report["rows"]:
            density = f"{row['density']:g}"
            yield [density, "none", "0.0", f"{row['relative_squared_error']:.4f}"]
            corrected = row["relative_squared_error_corrected"]
            yield [density, "Delta correction", "0.0", f"{corrected:.4f}"]
            for key in row:
                if key.startswith("dense_rows_at_"):
                    name = key.removeprefix("dense_rows_at_")
                    error = row[f"relative_squared_error_at_{name}"]
                    criterion, threshold = name.split("_")
                    yield [
                        density,
                        f"{criterion} ≥ {threshold} done densely",
                        f"{100 * row[key]:.1f}",
                        f"{error:.4f}",
                    ]

    return ["density", "repair", "row blocks done densely, %", "squared error left"], lines()


def bound(report: Record) -> Cells:
    """suites.certificate coverage: how tight the bound is."""
    head = "density | mean dropped mass | mean bound | queries with a bound < 0.1, % | violated, %"
    return head.split(" | "), (
        [
            f"{row['density']:g}",
            f"{row['dropped_mass']:.3f}",
            f"{row['bound']:.3f}",
            f"{100 * row['bound_below_0.1']:.1f}",
            f"{100 * row['bound_violated']:.1f}",
        ]
        for row in report["rows"]
    )


def one_key(report: Record) -> Cells:
    """suites.certificate one_key: one query that wants one dropped key."""
    head = "logit | dropped mass of the query | caught by the sample, % | largest bound"
    return [*head.split(" | "), "done densely by guarantee 0.1", "row blocks it does densely, %"], (
        [
            f"{row['logit']:g}",
            f"{row['dropped_mass']:.3f}",
            f"{100 * row['caught_by_sample']:.1f} ({row['samples']} samples)",
            f"{row['largest_bound']:.3f}",
            "yes" if row["done_densely_by_guarantee"] else "no",
            f"{100 * row['dense_rows_by_guarantee']:.1f}",
        ]
        for row in report["rows"]
    )


ALL = (speed, coverage, limits, bound, one_key)
