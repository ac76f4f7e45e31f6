"""xsake doctor, demo, bench: what this machine can run, and how fast."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.table import Table

import xsake
from xsake import BlockMask, _jax, masks
from xsake.backends import hopper_tilings
from xsake.bench import autotune as _autotune
from xsake.bench import cpu, run, timing
from xsake.bench.cases import cpu_case
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


def demo(length: int = 2048) -> None:
    """Draws some masks, then times dense against three densities on this machine.

    Args:
      length: tokens of the timed problem, a multiple of 128.
    """
    if length < 512 or length % 128:
        raise ValueError(f"length must be a multiple of 128 and at least 512, got {length}")
    drawn = {
        "a window that no block is aligned with": masks.sliding_window(200) & masks.causal(),
        "the first keys and a window": masks.causal()
        & (masks.first(16) | masks.sliding_window(256)),
        "three documents in one row": masks.documents(jnp.arange(1536) // 600) & masks.causal(),
    }
    for title, rule in drawn.items():
        console.print(f"\n[bold]{title}[/]")
        console.print(str(BlockMask.from_rule(rule, (1536, 1536))))

    console.print(f"\n[bold]{length:,} tokens, 8 heads of 64, causal, {_jax.device_kind()}[/]")
    densities = (0.60, 0.43, 0.25)
    table = Table(
        "", "density", "forward ms", "÷ (density × dense)", "error", "forward+backward ms"
    )
    rows: dict[str, list[str]] = {}
    for row in cpu.densities(length, densities, repeats=3):
        if row["direction"] == "forward":
            rows[row["case"]] = [
                "dense" if row["case"].endswith("dense") else "sparse",
                f"{row['density_ratio']:.2f}",
                f"{1e3 * row['median_seconds']:.1f}",
                f"{row['over_density_times_dense']:.2f}",
                f"{row['error']:.1e}",
            ]
            if "jax_nn_seconds" in row:
                rows["jax.nn"] = ["jax.nn", "", f"{1e3 * row['jax_nn_seconds']:.1f}", "", "", ""]
        else:
            rows[row["case"]].append(f"{1e3 * row['median_seconds']:.1f}")
    for cells in rows.values():
        table.add_row(*cells)
    console.print(table)
    mask = cpu_case(length, 0.25).arguments()["mask"]
    console.print("the mask of density 0.25, its second head:")
    console.print(str(mask[0, 1]))


def bench(
    suite: Literal["cpu", "hopper", "hopper-features", "model"] = "cpu",
    out: Path | None = None,
    quick: bool = False,
    model: Path | None = None,
    autotune: bool = False,
    only: str = "",
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
      only: part of the names of the cases (autotune: classes) to measure; default all.
    """
    if autotune:
        table = out or hopper_tilings.TABLE
        _autotune.autotune(table, only, tell=console.print)
        console.print(f"written: {table}")
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = out or Path("benchmarks/results") / f"{suite}-{today}.json"
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
