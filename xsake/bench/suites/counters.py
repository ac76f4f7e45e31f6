r"""Hardware counters of the Hopper kernels, by Nsight Compute: metrics | launch | read.

    ncu --profile-from-start off --clock-control none --cache-control none -k regex:xsake \
        --section WarpStateStats \
        --metrics $(python -m xsake.bench.suites.counters metrics) \
        --csv --page raw --log-file case.csv \
        python -m xsake.bench.suites.counters launch 1 16384 128 0.43 --facts case.json
    python -m xsake.bench.suites.counters read case.json … --out benchmarks/results/counters.json

`launch` runs one forward and one backward of a block-sparse case in the profiler's range, each
alone on an idle GPU, and writes their provenance next to the counters. `read` merges cases.
"""

from __future__ import annotations

import csv
import ctypes
import json
from pathlib import Path
from typing import Any

from xsake import _files
from xsake.bench import programs
from xsake.bench.suites import Record

METRICS = {  # name in the result file: name in ncu
    "seconds": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "tensor_active_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "special_function_active_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue_active_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "registers_per_thread": "launch__registers_per_thread",
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
}
STALL = "smsp__average_warps_issue_stalled_"


def launch(B: int, T: int, H: int, density: float, facts: Path) -> None:
    """Runs one forward and one backward of a block-sparse case of the suite `hopper`."""
    import jax

    from xsake.bench.cases import hopper_case
    from xsake.bench.measure import attend_hopper
    from xsake.bench.timing import compile_directions, provenance

    case = hopper_case(B, T, H, density)
    given = case.arguments(on_device=True)
    inputs = [given[name] for name in ("query", "key", "value")]
    calls = compile_directions(attend_hopper, inputs, given["mask"])
    for fn, args in calls.values():
        jax.block_until_ready(fn(*args))
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuProfilerStart()
    for fn, args in calls.values():
        jax.block_until_ready(fn(*args))
    cuda.cuProfilerStop()
    facts.write_text(json.dumps({**provenance(), "case": case.name}, indent=1) + "\n")


def records_of(facts: dict[str, Any], table: Path) -> list[Record]:
    """One record per kernel: its counters and its five largest stall reasons."""
    if not table.is_file():
        raise FileNotFoundError(f"there is no file {table}, which ncu writes with --log-file")
    lines = [line for line in table.read_text().splitlines() if line.startswith('"')]
    if len(lines) < 3 or any(metric not in lines[0] for metric in METRICS.values()):
        raise ValueError(f"{table} has no kernel with these metrics; ncu printed it otherwise")
    units, *kernels = csv.DictReader(lines)

    def number(text: str) -> float:
        return float(text.replace(",", "") or 0)

    found = []
    for kernel in kernels:
        record: Record = {"case": facts["case"], "kernel": kernel["Kernel Name"]}
        for name, metric in METRICS.items():
            scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}.get(units[metric], 1)
            record[name] = scale * number(kernel[metric])
        stalls = {
            name.removeprefix(STALL).removesuffix("_per_issue_active.ratio"): number(value)
            for name, value in kernel.items()
            if name.startswith(STALL) and "selected" not in name
        }
        largest = sorted(stalls.items(), key=lambda stall: -stall[1])[:5]
        record["stalled_warps_per_issue"] = dict(largest)
        found.append(record)
    return found


def read(files: list[Path], out: Path) -> None:
    """Merges the counters of several launches, which are next to their provenance."""
    wanted = {"case": str, "machine": dict, "commit": str}
    cases = [(_files.read_record(x, "written by `launch`", wanted), x) for x in files]
    records = [x for facts, path in cases for x in records_of(facts, path.with_suffix(".csv"))]
    first = {name: x for name, x in cases[0][0].items() if name != "case"}
    out.write_text(json.dumps({**first, "results": records}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = programs.parser("xsake.bench.suites.counters", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("metrics", help="prints the metrics, as ncu takes them")
    one = kinds.add_parser("launch", help="runs one case in the profiler's range; for ncu")
    for name, kind, words in (
        ("B", int, "batch rows"),
        ("T", int, "tokens"),
        ("H", int, "head size"),
        ("density", float, "share of the blocks that are kept"),
    ):
        one.add_argument(name, type=kind, help=words)
    one.add_argument(
        "--facts",
        type=programs.output_file,
        required=True,
        metavar="FILE",
        help="the JSON file to write the provenance to",
    )
    several = kinds.add_parser("read", help="merges cases into a result file")
    several.add_argument(
        "facts", type=Path, nargs="+", help="written by launch, each next to its .csv"
    )
    programs.add_out(several)
    given = parser.parse_args(arguments)
    if given.kind == "metrics":
        print(",".join(METRICS.values()))
    elif given.kind == "launch":
        programs.stop_without("hopper", "counters launch")
        launch(given.B, given.T, given.H, given.density, given.facts)
    else:
        with programs.stopping():
            read(given.facts, given.out)


if __name__ == "__main__":
    main()
