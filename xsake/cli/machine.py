"""xsake doctor, bench: what this machine can run, and how fast."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.table import Table

import xsake
from xsake import _extras, _jax
from xsake.backends.hopper import tilings
from xsake.bench import autotune as tuner
from xsake.bench import programs, run, side_by_side, timing
from xsake.bench.suites import Record, hopper_versions
from xsake.cli.model_path import checkpoint
from xsake.cli.progress import status
from xsake.cli.terminal import console, fast_dtype, reasons, writable_file

# A flag that accepts the names of run.SUITES.
SuiteName = Annotated[
    str, tyro.conf.arg(constructor=tyro.extras.literal_type_from_choices(tuple(run.SUITES)))
]
DEFAULT_SUITE = "cpu"


def doctor() -> None:
    """Prints versions and devices, and whether each backend can run a standard call."""
    facts = timing.provenance()
    table = Table("property", "value", title=f"xsake {xsake.__version__}")
    for name, value in {**facts["versions"], **facts["machine"]}.items():
        table.add_row(name, str(value))
    table.add_row("devices", ", ".join(map(str, jax.devices())))
    table.add_row("compilation cache", compilation_cache())
    console.print(table)
    dtype = fast_dtype()
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), dtype)
    console.print(reasons(xsake.explain(q, q, q, is_causal=True), f"4,096 tokens, {dtype}"))


def compilation_cache() -> str:
    """The folder in which JAX keeps compiled programs for later processes, or how to have one."""
    config = jax.config.values
    folder = config["jax_compilation_cache_dir"]
    if folder and config["jax_enable_compilation_cache"]:
        return f"on: {folder}"
    return "off; JAX_COMPILATION_CACHE_DIR=FOLDER keeps compiled programs for the next process"


def bench(
    suite: SuiteName | None = None,
    out: Path | None = None,
    quick: bool = False,
    model: Path | None = None,
    autotune: bool = False,
    only: str = "",
    join: tuple[Path, ...] | None = None,
    check: bool = False,
    jobs: int = 1,
    seconds: float | None = None,
    against: Path | None = None,
    cases: bool = False,
) -> None:
    """Measures a suite and writes JSON with machine, versions, commit and command.

    Rerun the same command to resume an interrupted Hopper suite, at the same commit and machine.
    With --check, a few ratios of times and of memory are compared with their limits instead; a
    ratio above its limit is an error.

    Args:
      suite: what to measure; default cpu.
      out: the JSON file; default benchmarks/results/SUITE-DATE.json in the current folder.
      quick: shorter sequences and fewer repeats, for a trial.
      model: the checkpoint that the suite "model" measures; "shipped" is the one in the package.
      autotune: time tilings of the Hopper kernels instead; `out` defaults to the package's table.
      only: measure the cases with this text, or one of several with |, in their name (autotune:
        "DIRECTION CLASS", one text).
      join: measure nothing; merge these result files (autotune: tables), written with --only.
      check: instead of a suite, measure the ratios that have limits; nothing is written.
      jobs: processes of a Hopper suite that compile side by side and take turns to time.
      seconds: with --jobs, stop and write what was measured then; the same command resumes.
      against: a checkout of another version, which the suite "hopper-versions" is measured beside.
      cases: print the suites, or with --suite the names of its cases; nothing is measured.
    """
    several = jobs != 1 or seconds is not None
    if cases:
        files = out, model, join, against
        if any(x is not None for x in files) or quick or autotune or only or check or several:
            raise ValueError("--cases measures nothing and takes no option but --suite")
        _print_cases(suite)
        return
    if check:
        others = suite, out, model, join, against
        if any(x is not None for x in others) or quick or autotune or only or several:
            raise ValueError("--check measures its own ratios and takes no other option")
        _check_ratios()
        return
    if join is not None and not join:
        raise ValueError("--join names no file; leave it out to measure")
    if join and (quick or model or only or several or against):
        raise ValueError(
            "--join measures nothing: give only --suite or --autotune, and --out, with it"
        )
    if autotune and suite is not None:
        raise ValueError(f"--autotune measures no suite; leave out --suite {suite}")
    suite = suite or DEFAULT_SUITE
    asked = "--autotune" if autotune else f"--suite {suite}"
    if against and asked != "--suite hopper-versions":
        raise ValueError(f"--against is for --suite hopper-versions; got {asked}")
    if model and asked != "--suite model":
        raise ValueError(f"--model is for --suite model; got {asked}")
    if several:
        _check_jobs(suite, jobs, seconds, autotune)
    if autotune:
        if quick:
            raise ValueError("--autotune has no shorter form; leave out --quick")
        _autotune(out, only, join)
        return
    if not join:
        _check_machine(suite, several)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out = writable_file(out or Path("benchmarks/results") / f"{suite}-{today}.json")
    if join:
        run.join(suite, join, out)
    else:
        with hopper_versions.comparing(against):
            _measure(suite, out, jobs, seconds, model, quick=quick, only=only)
    console.print(f"written: {out}", soft_wrap=True)


def _print_cases(suite: str | None) -> None:
    """The suites with what they measure, or the names of a suite's cases."""
    if suite is not None:
        for case in run.cases(suite):
            console.print(case, markup=False, soft_wrap=True)
        return
    table = Table("suite", "measures")
    for name, module in run.SUITES.items():
        first, _, _ = (module.__doc__ or "").partition("\n")
        table.add_row(name, first.partition(": ")[2])
    console.print(table)


def _autotune(out: Path | None, only: str, join: tuple[Path, ...] | None) -> None:
    """Writes a tiling table: `out`, or that of this machine's GPU in the installed package."""
    if (not join or out is None) and (reason := programs.why_not("hopper")):
        given = "--autotune --join without --out" if join else "--autotune"
        raise ValueError(f"{given} {reason}")
    table = writable_file(out or tilings.path_of(_jax.device_kind()))
    if join:
        tuner.join(join, table)
    else:
        with status("timing tilings"):
            tuner.autotune(table, only, report=console.print)
    console.print(f"written: {table}", soft_wrap=True)


def _check_machine(suite: str, several: bool) -> None:
    """Raises if the suite needs a GPU that is not here."""
    if not suite.startswith("hopper"):
        return
    if several:  # this process must not take the GPU memory of those that will measure
        os.environ |= side_by_side.OWN_MEMORY
    if reason := programs.why_not("hopper"):
        raise ValueError(f"--suite {suite} {reason}")


def _measure(
    suite: str, out: Path, jobs: int, seconds: float | None, model: Path | None, **how: Any
) -> None:
    """Measures a suite, in this process or by several."""
    if jobs != 1 or seconds is not None:
        _run_jobs(suite, out, jobs, seconds=seconds, **how)
        return
    if suite == "model":
        _extras.require("xsake bench --suite model", "model")
    with status(f"measuring suite {suite}"):
        run.run_suite(
            suite,
            out,
            model=None if model is None else checkpoint(model),
            report=lambda record: console.print(_one_line(record)),
            **how,
        )


def _check_jobs(suite: str, jobs: int, seconds: float | None, autotune: bool) -> None:
    if jobs < 1 or (seconds is not None and not seconds > 0):
        raise ValueError(f"--jobs and --seconds must be positive, got {jobs} and {seconds}")
    if autotune or not suite.startswith("hopper"):
        raise ValueError(
            "--jobs and --seconds are for the hopper suites, whose processes compile side by side "
            f"and take turns on the GPU; leave them out for {'--autotune' if autotune else suite}"
        )


def _run_jobs(suite: str, out: Path, jobs: int, **how: Any) -> None:
    """Raises if cases are missing, after what was measured is written."""
    with status(f"measuring suite {suite} by {jobs} processes"):
        found = side_by_side.run_jobs(
            suite, out, jobs, report=lambda x: console.print(x, soft_wrap=True), **how
        )
    if found.missing:
        written = f"the others are in {out}" if found.result else "nothing was written"
        reasons = "; ".join(f"{case}: {why}" for case, why in found.missing.items())
        count = len(found.missing)
        cases = "1 case is" if count == 1 else f"{count} cases are"
        raise ValueError(f"{cases} missing, {written}: {reasons}")


def _check_ratios() -> None:
    """Prints every ratio with its limit; raises if one is above it."""
    from xsake.bench import regression

    above = []
    for ratio in regression.check():
        sign = "≤" if ratio.holds else ">"
        console.print(f"{ratio.name:<52} {ratio.value:.3f} {sign} {ratio.limit:g}")
        above += [] if ratio.holds else [ratio.name]
    if above:
        raise ValueError(
            f"above the limit: {'; '.join(above)}; measure again on an idle machine, then look for "
            "what became slower since the last commit that passed"
        )


def _one_line(record: Record) -> str:
    cells = [f"{record['case']:<44}", f"{record.get('direction', ''):<17}"]
    if "median_seconds" in record:
        cells.append(f"{1e3 * record['median_seconds']:9.1f} ms")
    if "over_density_times_dense" in record:
        cells.append(f"time ÷ (density × dense time) {record['over_density_times_dense']:.3f}")
    if "teraflops" in record:
        cells.append(f"{record['teraflops']:.0f} TFLOP/s")
    faster = "times_faster_than_"
    cells += [
        f"{x:.2f}× {name[len(faster) :]}" for name, x in record.items() if name.startswith(faster)
    ]
    if "temporary_bytes" in record:
        cells.append(f"{record['temporary_bytes'] / 2**20:.1f} MiB temporary")
    if "share_of_jax_nn" in record:
        cells.append(f"{record['share_of_jax_nn']:.2%} of jax.nn")
    return "  ".join(cells)
