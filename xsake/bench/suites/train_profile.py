"""Where the time of a training step goes on a GPU: kernels of a trace, summed by what they do.

    python -m xsake.bench.suites.train_profile --out benchmarks/results/train-profile.json

The step is that of train_step. Kernels are classified by their name and by the metadata of their
HLO instruction: its source file, and whether it belongs to the forward or the backward. Every
variant runs in its own process, without CUDA graphs: a trace of those lacks the HLO instructions.
"""

from __future__ import annotations

import collections
import glob
import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from xsake.bench.suites import Record, train_step

CLASSES = (
    "attention forward",
    "attention backward",
    "selection",
    "matmuls",
    "optimizer",
    "loss",
    "other forward",
    "other backward",
    "copies",
    "not known",
)


class Origin(NamedTuple):
    """Where an HLO instruction comes from."""

    op_name: str = ""  # "jit(compiled_update)/transpose(jvp())/…/dot_general"
    file: str = ""  # "xsake/train/step.py"
    code: str = ""  # the instruction's text, without operands


def origins(hlo: str) -> dict[str, Origin]:
    """Every instruction of a compiled program by its name."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    found: dict[str, Origin] = {}
    for line in hlo.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (entry := re.match(r"(\d+) (.+)", line)):
            table[int(entry[1])] = entry[2].strip('"')
        elif match := re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line):
            table = None
            found[match[1]] = _origin(match[2], tables)
    return found


def _origin(text: str, tables: dict[str, dict[int, str]]) -> Origin:
    def number(pattern: str, within: str) -> int:
        match = re.search(pattern + r"=(\d+)", within)
        return int(match[1]) if match else 0

    op = re.search(r'op_name="([^"]*)"', text)
    file = re.search(r'source_file="([^"]*)"', text)
    name = file[1] if file else ""
    if frame := number("stack_frame_id", text):
        location = number("file_location_id", tables.get("StackFrames", {}).get(frame, ""))
        position = tables.get("FileLocations", {}).get(location, "")
        name = tables.get("FileNames", {}).get(number("file_name_id", position), "")
    return Origin(
        op[1] if op else "", name[max(name.rfind("xsake/"), 0) :], text.partition("metadata=")[0]
    )


def class_of(kernel: str, origin: Origin | None) -> str:
    """What a kernel does, one of CLASSES; the first condition that holds decides."""
    low = kernel.lower()
    if low.startswith(("memcpy", "memset")):
        return "copies"
    source = origin or Origin()
    backward = "transpose(" in source.op_name
    is_own = "backends/" in source.file or "mosaic" in low or "mosaic" in source.code
    if is_own or re.search(r"cudnn.*(sdpa|flash|fmha)|fmha", low + source.code.lower()):
        backward |= bool(re.search(r"bprop|bwd|backward", low + source.code.lower()))
        return "attention backward" if backward else "attention forward"
    if re.search(r"hads/|selection|block_scores|block_mask|masks/", source.file):
        return "selection"
    if re.search(r"gemm|nvjet|cutlass|xmma|cublas", low) or re.search(
        r" dot\(|cublas|gemm", source.code
    ):
        return "matmuls"
    if not source.op_name.startswith("jit("):
        return "not known"
    if "jvp" not in source.op_name:
        return "optimizer"
    if source.file.endswith(("train/step.py", "model/cross_entropy.py")):
        return "loss"
    return "other backward" if backward else "other forward"


def kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a trace's events, in the order of their start."""
    events = list(events)
    named = [e for e in events if e.get("ph") == "M"]
    gpus = {
        e["pid"]
        for e in named
        if e["name"] == "process_name" and "GPU" in e["args"]["name"].upper()
    }
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and "Stream" in e["args"]["name"] and e["pid"] in gpus
    }
    found = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]
    return sorted(found, key=lambda e: e["ts"])


def by_class_and_kernel(
    ran: Iterable[dict[str, Any]], instructions: dict[str, Origin], steps: int
) -> Record:
    """Seconds per step by class, and the 40 kernels that take most of it."""
    by_class: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    by_name: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for event in ran:
        name = event["name"]
        op = event.get("args", {}).get("hlo_op", name)
        origin = instructions.get(op) or instructions.get(name)
        kind = class_of(name, origin)
        seconds = event["dur"] * 1e-6 / steps
        by_class[kind] += seconds
        by_name[name[:120], kind, "" if origin is None else origin.op_name[-80:]].append(seconds)
    most = sorted(by_name.items(), key=lambda kernel: -sum(kernel[1]))[:40]
    return {
        "class_seconds": by_class,
        "kernel_seconds": sum(by_class.values()),
        "launches": sum(map(len, by_name.values())) / steps,
        "kernels": [
            {"name": name, "class": kind, "op": op, "seconds": sum(x), "launches": len(x) / steps}
            for (name, kind, op), x in most
        ],
    }


def measure(variant: str, length: int, tokens: int, block: int, steps: int) -> Record:
    """One record: step seconds without a trace, then kernel seconds by class with one."""
    import jax

    update, state, batch, plan, config = train_step.problem(variant, length, tokens, block)
    program = update.lower(state, batch, plan).compile()
    times = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        state, metrics = program(state, batch, plan)
        float(metrics.loss)
        times.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, metrics = program(state, batch, plan)
            float(metrics.loss)
        path = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    ran = kernels(events)
    if not ran:
        raise ValueError("the trace holds no GPU kernel: this profile needs a GPU")
    busy = ran[-1]["ts"] + ran[-1]["dur"] - ran[0]["ts"]
    return {
        "case": f"gpt2-small training step, {length} tokens, {variant}",
        "variant": variant,
        "length": length,
        "rows": config.data.rows,
        "block": block,
        "median_seconds": statistics.median(times[2:]),
        "traced_seconds": busy * 1e-6 / steps,
        **by_class_and_kernel(ran, origins(program.as_text() or ""), steps),
    }


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    module = "xsake.bench.suites.train_profile"
    given = train_step.parse_arguments(module, __doc__, [4096], 5, arguments)
    # no CUDA graphs: see above
    no_graphs = "--xla_gpu_enable_command_buffer="
    train_step.run(module, measure, given, no_graphs)


if __name__ == "__main__":
    main()
