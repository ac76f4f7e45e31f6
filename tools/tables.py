"""Tables in README and docs, written from result files: `python -m tools.tables FILE…`.

A page marks where a table goes, and which file it is made from:

    <!-- table hopper hopper-2026-11-17.json -->
    …
    <!-- end -->

Figures stand in such tables and nowhere else; tests/test_docs.py holds every page to it.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")
_TABLE = re.compile(r"(<!-- table (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Rows = list[dict[str, Any]]


def filled(text: str, results: Path = RESULTS) -> str:
    """The page with every table written anew from its file."""

    def write(match: re.Match[str]) -> str:
        head, kind, name, _, end = match.groups()
        if kind not in TABLES:
            raise ValueError(f"table {kind!r} is not one of {list(TABLES)}")
        report = json.loads((results / name).read_text())
        made = TABLES[kind](report.get("results", report))
        return f"{head}\n{made}\n\n{_source(report, name)}\n\n{end}"

    return _TABLE.sub(write, text)


def outside(text: str) -> str:
    """The page without its tables: prose, in which no figure may stand."""
    return _TABLE.sub("", text)


def _source(report: dict[str, Any], name: str) -> str:
    report = report.get("provenance", report)
    machine, versions = report["machine"], report["versions"]
    device = machine["device"]
    if device == "cpu":
        device = f"{machine['cores']} cores of {machine['processor']}"
    return (
        f"`benchmarks/results/{name}`: {device}, JAX {versions['jax']}, "
        f"commit {report['commit'][:12]}, {report['date'][:10]}, `{report['command']}`."
    )


def _markdown(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _pairs(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by case, then by direction."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row.get("direction", "")] = row
    return found


def hopper(rows: Rows) -> str:
    """Cells: TFLOP/s forward / backward, the peers' in the same run, time ÷ (density × dense).

    FlashAttention-4 has its columns where the file holds it, beside cuDNN or FlexAttention.
    """

    def both(case: dict[str, dict[str, Any]], key: str, shape: str) -> str:
        values = [case[d][key] for d in ("forward", "backward") if key in case[d]]
        return " / ".join(format(x, shape) for x in values)

    def beside(case: dict[str, dict[str, Any]], peer: str, label: str = "") -> list[str]:
        speeds = both(case, f"{peer}_teraflops", ".0f")
        return [label + speeds, both(case, f"times_faster_than_{peer}", ".2f")]

    fourth = any("flash_attention_4_teraflops" in row for row in rows)
    lines = []
    for name, case in _pairs(rows).items():
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
                *beside(case, peer, label),
                *(beside(case, "flash_attention_4") if fourth else ()),
                both(case, "over_density_times_dense", ".2f"),
            ]
        )
    more = ("FlashAttention-4", "× FlashAttention-4") if fourth else ()
    head = ("B·N·T·H", "XSAKE TFLOP/s", "peer", "× peer", *more, "÷ (density × own dense)")
    return _markdown(head, lines)


def hopper_costs(rows: Rows) -> str:
    """Of the same file: what uneven heads and new lists cost."""
    lines: list[list[str]] = []
    for name, case in _pairs(rows).items():
        row = case.get("forward", case.get("", {}))
        if "over_uniform_heads" in row:
            ratios = " / ".join(f"{case[d]['over_uniform_heads']:.3f}" for d in case)
            lines.append([name, "time of a visited block ÷ that of even heads", ratios])
        if "share_of_backward" in row:
            lines.append([name, "share of the backward", f"{row['share_of_backward']:.3f}"])
            count = row["compilations_for_two_masks"]
            lines.append([name, "compilations for two masks", str(count)])
    return _markdown(("B·N·T·H", "what", "forward / backward"), lines)


def features(rows: Rows) -> str:
    """The suite hopper-features: every feature once, checked and timed."""
    lines = []
    for name, case in _pairs(rows).items():
        if "median_seconds" not in case.get("forward", {}):
            continue
        cells = [name]
        for direction in ("forward", "backward"):
            row = case[direction]
            beside = row.get("jax_nn_teraflops")
            dense = "" if beside is None else f" (jax.nn {beside:.1f})"
            cells += [f"{1e3 * row['median_seconds']:.2f}", f"{row['teraflops']:.1f}{dense}"]
        lines.append([*cells, f"{max(row['error'] for row in case.values()):.1e}"])
    head = ("what", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "error")
    return _markdown(head, lines)


def memory(rows: Rows) -> str:
    """Of the same file: bytes beyond inputs and outputs."""
    lines = [
        [
            row["case"].removeprefix("memory "),
            row["direction"],
            f"{row['temporary_bytes'] / 2**20:,.1f}",
            f"{row['temporary_bytes_per_token']:,.0f}",
            f"{row['list_bytes'] / 2**20:.1f}",
        ]
        for row in rows
        if "temporary_bytes" in row
    ]
    head = ("B·N·T·H", "direction", "MiB beyond inputs and outputs", "bytes a token", "lists MiB")
    return _markdown(head, lines)


def counters(rows: Rows) -> str:
    """`benchmarks/counters.py`: one column a kernel."""
    names = {
        "seconds": ("µs, one launch alone", 1e6, ".0f"),
        "tensor_active_percent": ("tensor cores active, %", 1, ".0f"),
        "special_function_active_percent": ("exp and log units active, %", 1, ".0f"),
        "issue_active_percent": ("instruction issue active, %", 1, ".0f"),
        "l2_hit_percent": ("L2 hits, %", 1, ".0f"),
        "dram_percent": ("memory bandwidth, %", 1, ".1f"),
        "registers_per_thread": ("registers a thread", 1, ".0f"),
        "local_loads": ("loads of spilled registers", 1, ".0f"),
    }
    lines = [
        [label, *(format(scale * row[key], shape) for row in rows)]
        for key, (label, scale, shape) in names.items()
    ]
    clocks = [f"{row['cycles'] / row['seconds'] / 1e9:.2f}" for row in rows]
    waits = [
        ", ".join(f"{name} {x:.1f}" for name, x in list(row["stalled_warps_per_issue"].items())[:4])
        for row in rows
    ]
    lines += [["clock, GHz", *clocks], ["warps that wait, for each issue", *waits]]
    short = {"xsake_forward": "forward", "xsake_backward": "backward"}
    head = [
        next(x for name, x in short.items() if row["kernel"].startswith(name)) + f", {row['case']}"
        for row in rows
    ]
    return _markdown(("", *head), lines)


def cpu(rows: Rows) -> str:
    """Milliseconds by density, forward and forward+backward."""
    lines = []
    for name, case in _pairs(rows).items():
        if "forward" not in case:
            continue
        cells = [name.removeprefix("cpu ")]
        for direction in ("forward", "forward+backward"):
            row = case[direction]
            cells.append(f"{1e3 * row['median_seconds']:.0f}")
            cells.append(f"{row['over_density_times_dense']:.2f}")
        faster = case["forward"].get("times_faster_than_jax_nn")
        lines.append([*cells, "" if faster is None else f"{faster:.2f}"])
    head = ("case", "forward ms", "÷ (d × dense)", "with backward ms", "÷ (d × dense)", "× jax.nn")
    return _markdown(head, lines)


def model(rows: Rows) -> str:
    """A checkpoint's loading, prefill and decode."""
    lines = []
    for row in rows:
        names = ("seconds_per_token", "median_seconds", "seconds")
        seconds = next(row[name] for name in names if name in row)
        first = row.get("first_call_seconds", row.get("compile_burst_seconds"))
        speed = row.get("tokens_per_second")
        lines.append(
            [
                row["case"],
                f"{1e3 * seconds:,.1f}" + (" each" if "seconds_per_token" in row else ""),
                "" if speed is None else f"{speed:,.0f}",
                "" if first is None else f"{first:.1f}",
            ]
        )
    head = ("what", "ms", "tokens/s", "s, the first time, with compiling")
    return _markdown(head, lines)


def training(rows: Rows) -> str:
    """Runs side by side: perplexity of every file, and the gap to the first run."""
    lines = []
    for row in rows:
        attention = "dense" if row["density_ratio"] == 1 else f"HADS {row['density_ratio']:.2f}"
        cells = [row["run"], attention, row["seed"], f"{row['steps']:,}"]
        for file, value in row["perplexity"].items():
            cells.append(f"{value:.2f} ({row['perplexity_gap'][file]:+.2%})")
        lines.append(cells)
    head = ("run", "attention", "seed", "steps", *rows[0]["perplexity"])
    return _markdown(head, lines)


def train_step(rows: Rows) -> str:
    """Whole training steps: milliseconds, tokens/s, MFU and peak memory."""
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([f"{row['length']:,}", row["variant"], *["failed"] * 4])
            continue
        lines.append(
            [
                f"{row['length']:,}",
                row["variant"],
                f"{1e3 * row['median_seconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                "" if row["mfu_ratio"] is None else f"{row['mfu_ratio']:.1%}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    return _markdown(("T", "attention", "ms a step", "tokens/s", "MFU", "peak GiB"), lines)


def train_profile(rows: Rows) -> str:
    """Where a step's kernels spend their time, ms by class, one column a variant."""
    rows = [row for row in rows if "class_seconds" in row]
    lines = [
        [name, *(f"{1e3 * row['class_seconds'][name]:.2f}" for row in rows)]
        for name in rows[0]["class_seconds"]
    ]
    for label, key in (("all kernels", "kernel_seconds"), ("the step", "median_seconds")):
        lines.append([label, *(f"{1e3 * row[key]:.2f}" for row in rows)])
    return _markdown(("ms", *(f"{row['variant']}, T={row['length']:,}" for row in rows)), lines)


def head_roles(rows: Rows) -> str:
    """What heads attend to: how many give it a tenth of their weight, and which gives it most."""
    lines = []
    for row in rows:
        weights = {
            (layer, head): x
            for layer, heads in enumerate(row["weight_by_layer_and_head"])
            for head, x in enumerate(heads)
        }
        best = max(weights, key=lambda place: weights[place])
        count = sum(x >= 0.1 for x in weights.values())
        lines.append(
            [
                row["role"],
                f"{count} of {len(weights)}",
                "{}.{}".format(*best),
                f"{weights[best]:.2f}",
            ]
        )
    return _markdown(("role", "heads with 0.1 or more", "most, layer.head", "its weight"), lines)


def hads(column: str, table: dict[str, Any]) -> str:
    """One column of `xsake evaluate --table`: a row for each method, a cell for each density."""
    scale, digits = (100, 2) if column == "perplexity_gap" else (1, 4)
    densities = sorted(table["densities"], key=float)
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for density in densities:
        for row in table["densities"][density]["rows"]:
            cells.setdefault((row["method"], row["kind"]), {})[density] = row

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        error = row[f"{column}_standard_error"]
        spread = "" if error is None else f" ± {scale * error:.{digits}f}"
        return f"{scale * row[column]:.{digits}f}{spread}"

    def rank(by_density: dict[str, dict[str, Any]]) -> float:
        values = [row[column] for row in by_density.values()]
        mean = sum(values) / len(values)
        return -mean if column == "recall" else mean

    lines = [
        [*name, *(cell(by_density.get(density)) for density in densities)]
        for name, by_density in sorted(cells.items(), key=lambda item: rank(item[1]))
    ]
    unit = ", %" if column == "perplexity_gap" else ""
    named = f"{column.replace('_', ' ')}{unit} at density"
    return _markdown(("method", "knows", *(f"{named} {d}" for d in densities)), lines)


def hads_speed(report: dict[str, Any]) -> str:
    """`benchmarks/hads_table.py speed`: attention under a plan against dense, and decode."""
    attention, decode = [], []
    for row in report["rows"]:
        share = f"{row['density_ratio']:.3f}"
        if row["kind"] == "decode":
            kl = row.get("logit_kl")
            error = row.get("logit_kl_standard_error")
            decode.append(
                [
                    f"decode at {row['tokens']:,} tokens, batch {row['batch']}",
                    row.get("budget", ""),
                    share,
                    row.get("refresh", "") if row["density_ratio"] < 1 else "",
                    f"{row['tokens_per_second']:,.0f}",
                    "" if kl is None else f"{kl:.4f} ± {error:.4f}",
                ]
            )
            continue
        alone = row.get("selection_over_dense")
        attention.append(
            [
                row["shape"] + (", activations" if row["kind"] == "activations" else ""),
                row["selector"],
                row["budget"],
                share,
                f"{1e3 * row['dense_seconds']:.3f}",
                f"{1e3 * row['selection_and_sparse_seconds']:.3f}",
                f"{row['selection_and_sparse_over_dense']:.2f}",
                "" if alone is None else f"{alone:.3f}",
                f"{row['kl']:.4f} ± {row['kl_standard_error']:.4f}" if "kl" in row else "",
            ]
        )
    head = "B·N·T·H | selector | budget | density | dense ms | selection + sparse ms | ÷ dense"
    above = [*head.split(" | "), "selection ÷ dense", "attention KL"]
    below = ("what", "budget", "share of blocks", "chosen every", "tokens/s", "logit KL")
    return _markdown(above, attention) + "\n\n" + _markdown(below, decode)


def hads_profile(report: dict[str, Any]) -> str:
    """`benchmarks/hads_table.py profile`: how long a calibration takes."""
    rows = [
        [
            report["provenance"]["machine"]["device"],
            f"{row['documents']} × {row['length']:,} tokens",
            row["dtype"],
            len(row["curves"]),
            f"{row['seconds']:.1f}",
        ]
        for row in report["rows"]
    ]
    return _markdown(("device", "documents", "type", "curves", "seconds"), rows)


TABLES: dict[str, Callable[[Any], str]] = {
    "hopper": hopper,
    "hopper-costs": hopper_costs,
    "hopper-features": features,
    "hopper-memory": memory,
    "counters": counters,
    "cpu": cpu,
    "model": model,
    "head-roles": head_roles,
    "training": training,
    "train-step": train_step,
    "train-profile": train_profile,
    "hads-speed": hads_speed,
    "hads-profile": hads_profile,
    **{
        f"hads-{column.replace('_', '-')}": functools.partial(hads, column)
        for column in ("kl", "recall", "error", "logit_kl", "perplexity_gap")
    },
}


def main(paths: list[str]) -> None:
    """Rewrites the tables of the pages named."""
    for path in map(Path, paths):
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
