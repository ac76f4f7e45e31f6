"""Writes the tables of Markdown pages from result files: `python -m tools.tables PAGE.md…`.

Run it from the repository root. A page marks where a table goes, its kind and its result file:

    <!-- table hopper hopper-2026-11-17.json -->
    …
    <!-- end -->

Measured numbers belong in such tables only; tests/test_docs.py rejects times and speeds elsewhere.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools import (
    bias_tables,
    certificate_tables,
    claims_tables,
    first_call_tables,
    nsa_tables,
    parallel_tables,
    rule_tables,
    selection_tables,
    statistics_tables,
    task_tables,
    tpu_tables,
    training_tables,
    version_tables,
)

RESULTS = Path("benchmarks/results")
_TABLE = re.compile(r"(<!-- table (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Record = dict[str, Any]  # one measurement of a result file


def fill(text: str, results: Path = RESULTS) -> str:
    """The page with every table regenerated from its file."""

    def write(match: re.Match[str]) -> str:
        head, kind, name, _, end = match.groups()
        if kind not in TABLES:
            raise ValueError(f"table {kind!r} is not one of {list(TABLES)}")
        report = json.loads((results / name).read_text())
        table = TABLES[kind](report.get("results", report))
        return f"{head}\n{table}\n\n{_source(report, name)}\n\n{end}"

    return _TABLE.sub(write, text)


def without_tables(text: str) -> str:
    """The page without its tables."""
    return _TABLE.sub("", text)


LONGEST_COMMAND = 200  # characters; a longer one is read in the file


def _source(report: Record, name: str) -> str:
    """The line below a table: file, machine, versions, commit, date and command."""
    report = report.get("provenance", report)
    machine, versions = report["machine"], report["versions"]
    device = machine["device"]
    if device == "cpu":
        device = f"{machine['cores']} cores of {machine['processor']}"
    command = f"`{report['command']}`"
    if len(report["command"]) > LONGEST_COMMAND:
        command = "the commands are in the file"
    flags = f", `XLA_FLAGS={report['xla_flags']}`" if report.get("xla_flags") else ""
    return (
        f"`benchmarks/results/{name}`: {device}, JAX {versions['jax']}{flags}, "
        f"commit {_commit(report['commit'])}, {report['date'][:10]}, {command}."
    )


def _commit(commit: str) -> str:
    """The commits, shortened; one that ends with + had changes that were not committed."""
    return ", ".join(
        each[:12].rstrip("+") + ("+ (with changes)" if each.endswith("+") else "")
        for each in commit.split(", ")
    )


def _markdown(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _by_case(records: list[Record]) -> dict[str, dict[str, Record]]:
    """Records by case, then by direction."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record["case"], {})[record.get("direction", "")] = record
    return found


def hopper(records: list[Record]) -> str:
    """Columns: TFLOP/s forward / backward, the peers' in the same run, time ÷ (density × dense).

    FlashAttention-4 has its own columns if it is in the file.
    """

    def both(case: dict[str, Record], key: str, shape: str) -> str:
        values = [case[d][key] for d in ("forward", "backward") if key in case[d]]
        return " / ".join(format(x, shape) for x in values)

    def compared(case: dict[str, Record], peer: str, label: str = "") -> list[str]:
        speeds = both(case, f"{peer}_teraflops", ".0f")
        return [label + speeds, both(case, f"times_faster_than_{peer}", ".2f")]

    fourth = any("flash_attention_4_teraflops" in record for record in records)
    lines = []
    for name, case in _by_case(records).items():
        if "forward" not in case or "backward" not in case or "teraflops" not in case["forward"]:
            continue
        peer = next(
            (p for p in ("flex_attention", "cudnn") if f"{p}_teraflops" in case["forward"]), ""
        )
        label = {"flex_attention": "FlexAttention ", "cudnn": "cuDNN "}.get(peer, "")
        lines.append(
            [
                name,
                both(case, "teraflops", ".0f"),
                *compared(case, peer, label),
                *(compared(case, "flash_attention_4") if fourth else ()),
                both(case, "over_density_times_dense", ".2f"),
            ]
        )
    more = ("FlashAttention-4", "speedup over FlashAttention-4") if fourth else ()
    head = (
        "B·N·T·H",
        "XSAKE TFLOP/s",
        "peer",
        "speedup over peer",
        *more,
        "time ÷ (density × XSAKE's dense time)",
    )
    return _markdown(head, lines)


def hopper_costs(records: list[Record]) -> str:
    """The suite `hopper`: the cost of uneven heads and of transposing the block lists."""
    lines: list[list[str]] = []
    for name, case in _by_case(records).items():
        record = case.get("forward", case.get("", {}))
        if "over_uniform_heads" in record:
            ratios = " / ".join(f"{case[d]['over_uniform_heads']:.3f}" for d in case)
            lines.append([name, "time per visited block ÷ that of uniform heads", ratios])
        if "share_of_backward" in record:
            lines.append([name, "share of the backward", f"{record['share_of_backward']:.3f}"])
            count = record["compilations_for_two_masks"]
            lines.append([name, "compilations for two masks", str(count)])
    return _markdown(("B·N·T·H", "quantity", "forward / backward"), lines)


def features(records: list[Record]) -> str:
    """The suite `hopper-features`: one case per feature, checked and timed."""
    lines = []
    for name, case in _by_case(records).items():
        if "median_seconds" not in case.get("forward", {}):
            continue
        cells = [name]
        for direction in ("forward", "backward"):
            record = case[direction]
            theirs = record.get("jax_nn_teraflops")
            dense = "" if theirs is None else f" (jax.nn {theirs:.1f})"
            cells += [f"{1e3 * record['median_seconds']:.2f}", f"{record['teraflops']:.1f}{dense}"]
        lines.append([*cells, f"{max(record['error'] for record in case.values()):.1e}"])
    head = ("case", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "error")
    return _markdown(head, lines)


def memory(records: list[Record]) -> str:
    """The suite `hopper-features`: temporary memory."""
    lines = [
        [
            record["case"].removeprefix("memory "),
            record["direction"],
            f"{record['temporary_bytes'] / 2**20:,.1f}",
            f"{record['temporary_bytes_per_token']:,.0f}",
            f"{record['list_bytes'] / 2**20:.1f}",
        ]
        for record in records
        if "temporary_bytes" in record
    ]
    head = ("B·N·T·H", "direction", "MiB beyond inputs and outputs", "bytes per token", "lists MiB")
    return _markdown(head, lines)


def counters(records: list[Record]) -> str:
    """suites.counters: one column per kernel."""
    names = {
        "seconds": ("µs, one launch alone", 1e6, ".0f"),
        "tensor_active_percent": ("tensor cores active, %", 1, ".0f"),
        "special_function_active_percent": ("exp and log units active, %", 1, ".0f"),
        "issue_active_percent": ("instruction issue active, %", 1, ".0f"),
        "l2_hit_percent": ("L2 hits, %", 1, ".0f"),
        "dram_percent": ("memory bandwidth, %", 1, ".1f"),
        "registers_per_thread": ("registers per thread", 1, ".0f"),
        "local_loads": ("loads of spilled registers", 1, ".0f"),
    }
    lines = [
        [label, *(format(scale * record[key], shape) for record in records)]
        for key, (label, scale, shape) in names.items()
    ]
    clocks = [f"{record['cycles'] / record['seconds'] / 1e9:.2f}" for record in records]
    waits = [
        ", ".join(
            f"{name} {x:.1f}" for name, x in list(record["stalled_warps_per_issue"].items())[:4]
        )
        for record in records
    ]
    lines += [["clock, GHz", *clocks], ["stalled warps per issue", *waits]]
    short = {"xsake_forward": "forward", "xsake_backward": "backward"}
    head = [
        next(x for name, x in short.items() if record["kernel"].startswith(name))
        + f", {record['case']}"
        for record in records
    ]
    return _markdown(("", *head), lines)


def cpu(records: list[Record]) -> str:
    """Milliseconds by density, forward and forward+backward."""
    lines = []
    for name, case in _by_case(records).items():
        if "forward" not in case:
            continue
        cells = [name.removeprefix("cpu ")]
        for direction in ("forward", "forward+backward"):
            record = case[direction]
            cells.append(f"{1e3 * record['median_seconds']:.0f}")
            cells.append(f"{record['over_density_times_dense']:.2f}")
        faster = case["forward"].get("times_faster_than_jax_nn")
        lines.append([*cells, "" if faster is None else f"{faster:.2f}"])
    head = (
        "case",
        "forward ms",
        "ms ÷ (density × dense ms)",
        "with backward ms",
        "ms ÷ (density × dense ms)",
        "speedup over jax.nn",
    )
    return _markdown(head, lines)


def model(records: list[Record]) -> str:
    """The suite `model`: loading, prefill and decode of a checkpoint."""
    lines = []
    for record in records:
        names = ("seconds_per_token", "median_seconds", "seconds")
        seconds = next(record[name] for name in names if name in record)
        first = record.get("first_call_seconds", record.get("compile_burst_seconds"))
        speed = record.get("tokens_per_second")
        lines.append(
            [
                record["case"],
                f"{1e3 * seconds:,.1f}" + (" each" if "seconds_per_token" in record else ""),
                "" if speed is None else f"{speed:,.0f}",
                "" if first is None else f"{first:.1f}",
            ]
        )
    head = ("case", "ms", "tokens/s", "first call with compilation, s")
    return _markdown(head, lines)


def head_roles(records: list[Record]) -> str:
    """For each role: the number of heads with a weight of 0.1 or more, and the strongest head."""
    lines = []
    for record in records:
        weights = {
            (layer, head): x
            for layer, heads in enumerate(record["weight_by_layer_and_head"])
            for head, x in enumerate(heads)
        }
        best = max(weights, key=lambda head: weights[head])
        count = sum(x >= 0.1 for x in weights.values())
        lines.append(
            [
                record["role"],
                f"{count} of {len(weights)}",
                "{}.{}".format(*best),
                f"{weights[best]:.2f}",
            ]
        )
    return _markdown(
        ("role", "heads with 0.1 or more", "strongest head (layer.head)", "its weight"), lines
    )


def hads(column: str, table: Record) -> str:
    """One metric of `xsake evaluate --table`: a row per method, a column per density."""
    scale, digits = (100, 2) if column == "perplexity_gap" else (1, 4)
    densities = sorted(table["densities"], key=float)
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for density in densities:
        for record in table["densities"][density]["rows"]:
            cells.setdefault((record["method"], record["kind"]), {})[density] = record

    def cell(record: Record | None) -> str:
        if record is None:
            return ""
        error = record[f"{column}_standard_error"]
        spread = "" if error is None else f" ± {scale * error:.{digits}f}"
        return f"{scale * record[column]:.{digits}f}{spread}"

    def rank(by_density: dict[str, Record]) -> float:
        values = [record[column] for record in by_density.values()]
        mean = sum(values) / len(values)
        return -mean if column == "recall" else mean

    lines = [
        [*name, *(cell(by_density.get(density)) for density in densities)]
        for name, by_density in sorted(cells.items(), key=lambda method: rank(method[1]))
    ]
    unit = ", %" if column == "perplexity_gap" else ""
    named = f"{column.replace('_', ' ')}{unit} at density"
    return _markdown(("method", "kind", *(f"{named} {d}" for d in densities)), lines)


def hads_speed(report: Record) -> str:
    """suites.hads_table speed: attention under a plan against dense, and decode."""
    attention, decode = [], []
    for record in report["rows"]:
        share = f"{record['density_ratio']:.3f}"
        if record["kind"] == "decode":
            kl = record.get("logit_kl")
            error = record.get("logit_kl_standard_error")
            decode.append(
                [
                    f"decode at {record['tokens']:,} tokens, batch {record['batch']}",
                    record.get("budget", ""),
                    share,
                    record.get("refresh", "") if record["density_ratio"] < 1 else "",
                    f"{record['tokens_per_second']:,.0f}",
                    "" if kl is None else f"{kl:.4f} ± {error:.4f}",
                ]
            )
            continue
        alone = record.get("selection_over_dense")
        attention.append(
            [
                record["shape"] + (", activations" if record["kind"] == "activations" else ""),
                record["selector"],
                record["budget"],
                share,
                f"{1e3 * record['dense_seconds']:.3f}",
                f"{1e3 * record['selection_and_sparse_seconds']:.3f}",
                f"{record['selection_and_sparse_over_dense']:.2f}",
                "" if alone is None else f"{alone:.3f}",
                f"{record['kl']:.4f} ± {record['kl_standard_error']:.4f}" if "kl" in record else "",
            ]
        )
    head = "B·N·T·H | selector | budget | density | dense ms | selection + sparse ms | ÷ dense"
    above = [*head.split(" | "), "selection ÷ dense", "attention KL"]
    below = ("case", "budget", "share of blocks", "tokens per selection", "tokens/s", "logit KL")
    return _markdown(above, attention) + "\n\n" + _markdown(below, decode)


def hads_profile(report: Record) -> str:
    """suites.hads_table profile: how long a calibration takes."""
    records = [
        [
            report["provenance"]["machine"]["device"],
            f"{record['documents']} × {record['length']:,} tokens",
            record["dtype"],
            len(record["curves"]),
            f"{record['seconds']:.1f}",
        ]
        for record in report["rows"]
    ]
    return _markdown(("device", "documents", "dtype", "cost curves", "seconds"), records)


def of_cells(cells: Callable[[Any], Any], report: Any) -> str:
    """A table from a function that returns its head and rows."""
    return _markdown(*cells(report))


TABLES: dict[str, Callable[[Any], str]] = {
    "hopper": hopper,
    "hopper-bias": functools.partial(of_cells, bias_tables.hopper_bias),
    "hopper-rules": functools.partial(of_cells, rule_tables.hopper_rules),
    "hopper-costs": hopper_costs,
    "hopper-features": features,
    "hopper-memory": memory,
    "hopper-statistics": functools.partial(of_cells, statistics_tables.hopper_statistics),
    "hopper-versions": functools.partial(of_cells, version_tables.hopper_versions),
    "selection": functools.partial(of_cells, selection_tables.selection),
    "counters": counters,
    "cpu": cpu,
    "model": model,
    "nsa": functools.partial(of_cells, nsa_tables.nsa),
    "hopper-nsa": functools.partial(of_cells, nsa_tables.hopper_nsa),
    "head-roles": head_roles,
    "training": functools.partial(of_cells, training_tables.training),
    "sparse-training": functools.partial(of_cells, training_tables.sparse_training),
    "train-step": functools.partial(of_cells, training_tables.train_step),
    "train-profile": functools.partial(of_cells, training_tables.train_profile),
    "hads-speed": hads_speed,
    "hads-profile": hads_profile,
    "costs": functools.partial(of_cells, first_call_tables.costs),
    "claims-speed": functools.partial(of_cells, claims_tables.speed),
    "claims-baselines": functools.partial(of_cells, claims_tables.baselines),
    "first-call": functools.partial(of_cells, first_call_tables.first_call),
    "cost": functools.partial(of_cells, parallel_tables.cost),
    "parallel-rows": functools.partial(of_cells, parallel_tables.rows),
    "parallel-heads": functools.partial(of_cells, parallel_tables.heads),
    "parallel-share": functools.partial(of_cells, parallel_tables.share),
    "parallel-traffic": functools.partial(of_cells, parallel_tables.traffic),
    "tpu-estimate": functools.partial(of_cells, tpu_tables.estimate),
    "tasks": functools.partial(of_cells, task_tables.accuracy),
    **{
        f"tasks-{cells.__name__}": functools.partial(of_cells, cells)
        for cells in (
            *(task_tables.loss, task_tables.depth, task_tables.perplexity),
            *(task_tables.tuning, task_tables.ranking, task_tables.heads, task_tables.floors),
            *(task_tables.certified, task_tables.pairs, task_tables.ends),
        )
    },
    **{
        f"certificate-{cells.__name__.replace('_', '-')}": functools.partial(of_cells, cells)
        for cells in certificate_tables.ALL
    },
    **{
        f"hads-{column.replace('_', '-')}": functools.partial(hads, column)
        for column in ("kl", "recall", "error", "logit_kl", "perplexity_gap")
    },
}


def main(paths: list[str]) -> None:
    """Regenerates the tables of these pages."""
    for path in map(Path, paths):
        path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
