"""xsake doctor, bench: what this machine can run, and how fast."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

import jax
from rich.table import Table

import xsake
from xsake.backends.hopper import tilings as hopper_tilings
from xsake.bench import autotune as _autotune
from xsake.bench import run, timing
from xsake.cli.terminal import console, fast_dtype, reasons


def doctor() -> None:
    """Prints versions and devices, and for a standard call every backend's reason."""
    facts = timing.provenance()
    table = Table("what", "is", title=f"xsake {xsake.__version__}")
    for name, value in {**facts["versions"], **facts["machine"]}.items():
        table.add_row(name, str(value))
    table.add_row("devices", ", ".join(map(str, jax.devices())))
    console.print(table)
    dtype = fast_dtype()
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), dtype)
    console.print(reasons(xsake.explain(q, q, q, is_causal=True), f"4,096 tokens, {dtype}"))


def bench(
    suite: Literal["cpu", "hopper", "hopper-features", "model"] = "cpu",
    out: Path | None = None,
    quick: bool = False,
    model: Path | None = None,
    autotune: bool = False,
    only: str = "",
    join: tuple[Path, ...] = (),
) -> None:
    """Measures a suite and writes JSON with machine, versions, commit and command.

    A Hopper suite that was cut off goes on where it stopped, if commit and machine are the same.

    Args:
      suite: what to measure.
      out: the file; default benchmarks/results/SUITE-DATE.json under the current folder.
      quick: shorter sequences and fewer repeats, to try it out.
      model: the checkpoint that the suite "model" measures.
      autotune: instead of a suite, time every tiling of the Hopper kernels on this card and write
        the table that they choose from; `out` defaults to the installed package's own.
      only: part of the names of the cases (autotune: of directions and classes); default all.
      join: measure nothing, but write these files of the suite (autotune: these tables), made with
        `only`, as one.
    """
    if join and (quick or model or only):
        raise ValueError(
            "--join measures nothing: it takes --suite or --autotune, and --out, no other option"
        )
    if autotune:
        table = out or hopper_tilings.H200
        if join:
            _autotune.join(join, table)
        else:
            _autotune.autotune(table, only, tell=console.print)
        console.print(f"written: {table}")
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = out or Path("benchmarks/results") / f"{suite}-{today}.json"
    if join:
        run.join(suite, join, out)
    else:
        run.run_suite(
            suite, out, quick, model, tell=lambda row: console.print(_one_line(row)), only=only
        )
    console.print(f"written: {out}")


def _one_line(row: dict[str, Any]) -> str:
    cells = [f"{row['case']:<44}", f"{row.get('direction', ''):<17}"]
    if "median_seconds" in row:
        cells.append(f"{1e3 * row['median_seconds']:9.1f} ms")
    if "over_density_times_dense" in row:
        cells.append(f"÷ (density × dense) {row['over_density_times_dense']:.3f}")
    if "teraflops" in row:
        cells.append(f"{row['teraflops']:.0f} TFLOP/s")
    faster = "times_faster_than_"
    cells += [
        f"{x:.2f}× {name[len(faster) :]}" for name, x in row.items() if name.startswith(faster)
    ]
    if "temporary_bytes" in row:
        cells.append(f"{row['temporary_bytes'] / 2**20:.1f} MiB temporary")
    if "share_of_jax_nn" in row:
        cells.append(f"{row['share_of_jax_nn']:.2%} of jax.nn")
    return "  ".join(cells)
