"""Where the time of a training step goes on a GPU: kernels of a trace, summed by what they do.

    python benchmarks/train_profile.py --out benchmarks/results/train-profile.json

The step is that of train_step.py. A kernel is known by its name, and by the HLO instruction that it
is: the compiled program says which line of which file an instruction comes from, and whether it
belongs to the forward, the backward or neither. Every variant has a process of its own, without
CUDA graphs, since within those the trace does not say which instruction a kernel is.
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

from xsake.bench.suites import train_step

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
        elif table is not None and (row := re.match(r"(\d+) (.+)", line)):
            table[int(row[1])] = row[2].strip('"')
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
        place = tables.get("FileLocations", {}).get(location, "")
        name = tables.get("FileNames", {}).get(number("file_name_id", place), "")
    return Origin(
        op[1] if op else "", name[max(name.rfind("xsake/"), 0) :], text.partition("metadata=")[0]
    )


def class_of(kernel: str, origin: Origin | None) -> str:
    """What a kernel does, one of CLASSES; the first rule that fits decides."""
    low = kernel.lower()
    if low.startswith(("memcpy", "memset")):
        return "copies"
    said = origin or Origin()
    backward = "transpose(" in said.op_name
    is_own = "backends/" in said.file or "mosaic" in low or "mosaic" in said.code
    if is_own or re.search(r"cudnn.*(sdpa|flash|fmha)|fmha", low + said.code.lower()):
        backward |= bool(re.search(r"bprop|bwd|backward", low + said.code.lower()))
        return "attention backward" if backward else "attention forward"
    if re.search(r"hads/|train/attention|block_mask|block_lists|masks/", said.file):
        return "selection"
    if re.search(r"gemm|nvjet|cutlass|xmma|cublas", low) or re.search(
        r" dot\(|cublas|gemm", said.code
    ):
        return "matmuls"
    if not said.op_name.startswith("jit("):
        return "not known"
    if "jvp" not in said.op_name:
        return "optimizer"
    if said.file.endswith(("train/step.py", "train/cross_entropy.py")):
        return "loss"
    return "other backward" if backward else "other forward"


def kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a trace's events, in the order in which they began."""
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


def summed(ran: Iterable[dict[str, Any]], known: dict[str, Origin], steps: int) -> dict[str, Any]:
    """Seconds of a step by class, and the kernels that take most of it."""
    by_class: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    by_name: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for event in ran:
        name = event["name"]
        op = event.get("args", {}).get("hlo_op", name)
        origin = known.get(op) or known.get(name)
        kind = class_of(name, origin)
        seconds = event["dur"] * 1e-6 / steps
        by_class[kind] += seconds
        by_name[name[:120], kind, "" if origin is None else origin.op_name[-80:]].append(seconds)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "class_seconds": by_class,
        "kernel_seconds": sum(by_class.values()),
        "launches": sum(map(len, by_name.values())) / steps,
        "kernels": [
            {"name": name, "class": kind, "op": op, "seconds": sum(x), "launches": len(x) / steps}
            for (name, kind, op), x in most
        ],
    }


def measure(variant: str, length: int, tokens: int, block: int, steps: int) -> dict[str, Any]:
    """One row: step seconds without a trace, then kernel seconds by class within one."""
    import jax

    from xsake.train import step

    config, state, batch, plan = train_step.problem(variant, length, tokens, block)
    program = step.compiled_update.lower(state, batch, plan, config=config).compile()
    taken = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        state, said = program(state, batch, plan)
        float(said.loss)
        taken.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, said = program(state, batch, plan)
            float(said.loss)
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
        "median_seconds": statistics.median(taken[2:]),
        "traced_seconds": busy * 1e-6 / steps,
        **summed(ran, origins(program.as_text()), steps),
    }


if __name__ == "__main__":
    # within CUDA graphs the trace would not say which instruction a kernel is
    given = train_step.parsed(__doc__, [4096], 5)
    train_step.run(__file__, measure, given, "--xla_gpu_enable_command_buffer=")
