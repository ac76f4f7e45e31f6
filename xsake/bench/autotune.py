"""`xsake bench --autotune`: times tilings of the Hopper kernels and writes the tiling table.

Each class of calls (backends.hopper.tilings.call_class) is measured on one or two cases of that
class. All candidate tilings are timed interleaved, so that drift of the GPU's clock affects them
equally, and the fastest by geometric mean wins. A candidate whose result differs from that of the
first one raises.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import _files, masks
from xsake.backends import Sizes, hopper
from xsake.backends.hopper import tilings as tiling_table
from xsake.backends.hopper.limits import TALL
from xsake.backends.options import BackwardTiling, ForwardTiling, Options
from xsake.bench.cases import Case, RunCase, hopper_case
from xsake.bench.checks import ERROR_LIMIT, WrongResultError
from xsake.bench.measure import CAUSAL, visited_pairs
from xsake.bench.timing import provenance, time_interleaved
from xsake.block_mask import BlockMask

Fields = dict[str, Any]  # of ForwardTiling or BackwardTiling; the others have their defaults
Tiling = ForwardTiling | BackwardTiling

# The candidates.
SECTIONS: Fields = {"order": "sections"}
FEWER_HEADS: Fields = {"l2_bytes": 8 << 20}  # smaller L2 groups: fewer heads run together
HEADS: Fields = {"order": "heads"}
NATURAL: Fields = {"order": "natural"}
LAZY_MAXIMUM: Fields = {"lazy_maximum": True}
FORWARD: tuple[Fields, ...] = (
    *(
        {**order, "alternate_products": alternate, "lazy_rescale": 8.0, **maximum}
        for order in (SECTIONS, FEWER_HEADS, NATURAL)
        for alternate in (True, False)
        for maximum in ({}, LAZY_MAXIMUM)
    ),
    {"persistent": False, "lazy_rescale": 8.0, "alternate_products": False},
    {**NATURAL, "schedule": "fixed", "lazy_rescale": 8.0},
    {"overlap": False, **NATURAL, "schedule": "fixed"},
    *({"overlap": False, **order} for order in (SECTIONS, FEWER_HEADS, NATURAL)),
    {"overlap": False, **FEWER_HEADS, "lazy_rescale": 8.0, **LAZY_MAXIMUM},
    *(
        {**order, "lazy_rescale": 8.0, "bias_in_shared": True, **maximum}
        for order in (FEWER_HEADS, NATURAL)
        for maximum in ({}, LAZY_MAXIMUM)
    ),
    *(
        {**FEWER_HEADS, "lazy_rescale": 8.0, "bias_in_shared": True, **maximum, name: False}
        for maximum in ({}, LAZY_MAXIMUM)
        for name in ("alternate_products", "overlap")
    ),
    *(
        {"rows": TALL, **order, "alternate_products": alternate, "lazy_rescale": 8.0}
        for order in (SECTIONS, FEWER_HEADS)
        for alternate in (True, False)
    ),
    {"rows": TALL, "alternate_products": False, "lazy_rescale": 8.0, **LAZY_MAXIMUM},
    {"rows": TALL, "overlap": False},
)
BACKWARD: tuple[Fields, ...] = tuple(
    {"fused": fused, "cast": cast, "persistent": persistent, **order}
    for fused, cast, persistent, order in (
        (True, "pass", True, SECTIONS),
        (True, "pass", True, HEADS),
        (True, "pass", True, NATURAL),
        (True, "pass", False, SECTIONS),
        (True, "pass", False, HEADS),
        (True, "pass", False, NATURAL),
        (True, "kernel", True, SECTIONS),
        (True, "kernel", True, HEADS),
        (True, "kernel", True, NATURAL),
        (False, "pass", True, HEADS),
        (False, "pass", True, NATURAL),
    )
)


def groups() -> Iterator[dict[str, list[Case]]]:
    """Classes with the cases that represent them; classes of a group share compiled kernels."""
    for H in (128, 64):
        for B, T in ((4, 4096), (1, 16384)):
            random = [[hopper_case(B, T, H, d) for d in ds] for ds in ((0.43, 0.20), (0.10,))]
            causal = Case(f"{B}·16·{T}·{H} causal", B, T, N=16, H=H, dtype="bfloat16", rule=CAUSAL)
            window = dataclasses.replace(
                causal, name=f"{B}·16·{T}·{H} window", rule=masks.sliding_window(1023, 0)
            )
            packed = RunCase("", B, T, seed=1, mean_document=1200).arguments()["mask"]
            documents = dataclasses.replace(causal, name=f"{B}·16·{T}·{H} documents", rule=packed)
            # Its list is sparse in a long sequence only.
            windows = [[window]] if T >= tiling_table.LONG else []
            biased = Case(
                f"1·16·{T}·{H} bias", 1, T, N=16, H=H, dtype="bfloat16", bias=(1, 0, 0, 0)
            )
            full = dataclasses.replace(causal, name=f"{B}·16·{T}·{H} full", rule=None)
            for classes in (random, [[causal]], [[full]], [[documents]], windows, [[biased]]):
                yield {_class_of(cases[0]): cases for cases in classes}


def _class_of(case: Case) -> str:
    bias = tiling_table.bias_kind(case.bias)  # 1: an axis that is shared, as in a shape
    return tiling_table.call_class(Sizes(*case.sizes), mask_of(case), bias)


def mask_of(case: Case, capacity: int | None = None) -> BlockMask:
    """The case's BlockMask; `capacity` defaults to the largest number of blocks of a head."""
    blocks = case.blocks()
    if blocks is None:
        rule = masks.everything() if case.rule is None else case.rule
        return BlockMask.from_rule(rule, (case.T, case.T))
    capacity = capacity or int(blocks.sum((2, 3)).max())
    return BlockMask.from_dense(blocks, case.rule, shape=(case.T, case.T), capacity=capacity)


def autotune(out: Path, only: str = "", report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures the classes whose name ("backward 128 long mixed") contains `only`.

    The table's entries for other classes are left unchanged in `out`.
    """
    earlier = _read(out)["classes"] if only and out.exists() else {}
    table: dict[str, Any] = {
        **provenance(),
        "classes": {direction: earlier.get(direction, {}) for direction in ("forward", "backward")},
    }
    for group in groups():
        for direction, kind, candidates in _candidates():
            asked = {name: cases for name, cases in group.items() if only in f"{direction} {name}"}
            if not asked or (direction == "backward" and any(x.endswith(" bias") for x in asked)):
                continue  # classes with a bias are of the forward alone
            if not all(name.startswith("64 ") and name.endswith(" causal") for name in asked):
                candidates = tuple(fields for fields in candidates if "rows" not in fields)
            if not any(name.endswith(" bias") for name in asked):
                candidates = tuple(x for x in candidates if "bias_in_shared" not in x)
            tilings = [kind(**fields) for fields in candidates]
            speeds = _speeds(
                direction, tilings, [case for cases in asked.values() for case in cases]
            )
            for name, cases in asked.items():
                entry = _best(kind, candidates, {case.name: speeds[case.name] for case in cases})
                entry |= {"date": table["date"], "commit": table["commit"]}
                table["classes"][direction][name] = entry
                report(f"{direction:<9} {name:<18} {entry['teraflops']} {entry['tiling']}")
            out.write_text(_one_line_per_class(table))
    return table


def join(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Merges tables of one machine with one set of versions; the newest entry of a class wins.

    Entries that were not measured again keep their date. `command` lists the commands of all files;
    `date` and `commit` are those of the newest file.
    """
    tables = [_read(file) for file in files]
    last = max(tables, key=lambda table: table["date"])
    for file, table in zip(files, tables, strict=True):
        for fact in ("machine", "versions"):
            if table[fact] != last[fact]:
                raise ValueError(
                    f"{file} has {fact} {table[fact]}, another file has {last[fact]}; join only "
                    "tables of one machine with the same package versions"
                )
    merged: dict[str, Any] = {direction: {} for direction in last["classes"]}
    for table in sorted(tables, key=lambda table: table["date"]):
        for direction, classes in table["classes"].items():
            for name, entry in classes.items():
                held = merged[direction].setdefault(name, entry)
                if entry["date"] >= held["date"]:
                    merged[direction][name] = entry
    whole = last | {
        "command": "; ".join(dict.fromkeys(table["command"] for table in tables)),
        "classes": merged,
    }
    out.write_text(_one_line_per_class(whole))
    return whole


def _read(path: Path) -> dict[str, Any]:
    """A tiling table, or an error that names the file."""
    what = "a tiling table of `xsake bench --autotune`"
    types = {"date": str, "machine": object, "versions": object, "command": str, "classes": dict}
    found = _files.read_record(path, what, types)
    for direction, classes in found["classes"].items():
        entries = classes.values() if isinstance(classes, dict) else [None]
        if direction not in ("forward", "backward") or not all(
            isinstance(entry, dict) and isinstance(entry.get("date"), str) for entry in entries
        ):
            raise ValueError(f"{path} is not {what}: its classes {direction!r} are malformed")
    return found


def _best(
    kind: type[Tiling], candidates: Sequence[Fields], speeds: dict[str, list[float]]
) -> dict[str, Any]:
    """The table entry of the candidate with the largest geometric mean speed over some cases."""
    means = [math.prod(each) ** (1 / len(speeds)) for each in zip(*speeds.values(), strict=True)]
    best = max(range(len(means)), key=means.__getitem__)
    defaults = dataclasses.asdict(kind())
    return {
        "tiling": {f: x for f, x in candidates[best].items() if x != defaults[f]},
        "cases": list(speeds),
        "teraflops": [round(each[best], 1) for each in speeds.values()],
        "candidates": [[c, round(m, 1)] for c, m in zip(candidates, means, strict=True)],
    }


def _one_line_per_class(table: dict[str, Any]) -> str:
    """The table as JSON, with every class on its own line."""
    facts = [f" {json.dumps(key)}: {json.dumps(x)}" for key, x in table.items() if key != "classes"]
    directions = [
        f"  {json.dumps(direction)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(x)}" for name, x in entries.items())
        + "\n  }"
        for direction, entries in table["classes"].items()
    ]
    whole = [*facts, ' "classes": {\n' + ",\n".join(directions) + "\n }"]
    return "{\n" + ",\n".join(whole) + "\n}\n"


def _speeds(direction: str, tilings: list[Tiling], cases: list[Case]) -> dict[str, list[float]]:
    """TFLOP/s of whole calls, for every tiling, on cases of one shape.

    Masks are arguments and share one capacity: each tiling compiles once for all cases, and the
    preparation of the lists on the device is timed too.
    """
    given = cases[0].arguments(on_device=True)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    bias = (given["bias"],) if "bias" in given else ()
    capacity = max(mask_of(case).kv_index.shape[-1] for case in cases)
    block_masks = [mask_of(case, capacity) for case in cases]
    arguments = [(*_arguments(direction, q, k, v, mask), *bias) for mask in block_masks]

    def compiled(tiling: Tiling) -> Callable[..., Any]:
        return jax.jit(_kernel(direction, q, tiling)).lower(*arguments[0]).compile()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(compiled, tilings))
    speeds = {}
    for case, mask, args in zip(cases, block_masks, arguments, strict=True):
        _check_agreement(tilings, [run(*args) for run in runs], ERROR_LIMIT[str(q.dtype)])
        work = 2 * visited_pairs(case, mask) * (q.shape[-1] + v.shape[-1])
        work *= 1 if direction == "forward" else 2.5
        times = time_interleaved({str(i): (run, args) for i, run in enumerate(runs)})
        speeds[case.name] = [work / x.median_seconds / 1e12 for x in times.values()]
    return speeds


# How autotuning calls the backend: forward and backward separately, each with its own tiling class.


def _candidates() -> tuple[tuple[str, type[Tiling], tuple[Fields, ...]], ...]:
    """(direction, class of its tilings, candidates)."""
    return ("forward", ForwardTiling, FORWARD), ("backward", BackwardTiling, BACKWARD)


def _kernel(direction: str, q: Array, tiling: Tiling | None = None) -> Callable[..., Any]:
    """The backend's forward (q, k, v, mask) -> out, lse or its backward, with a tiling."""
    match tiling:
        case ForwardTiling():
            options = Options(hopper_forward=tiling)
        case BackwardTiling():
            options = Options(hopper_backward=tiling)
        case None:
            options = Options()
    settings = hopper.Settings(1 / math.sqrt(q.shape[-1]), None, options)
    run = {"forward": hopper.run_forward, "backward": hopper.run_backward}[direction]
    return functools.partial(run, settings)


def _arguments(direction: str, q: Array, k: Array, v: Array, mask: BlockMask) -> tuple[Any, ...]:
    """What the function of `_kernel` is called with; for the backward, residuals and cotangents."""
    if direction == "forward":
        return (q, k, v, mask)
    out, lse = _kernel("forward", q)(q, k, v, mask)
    d_out = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
    return (q, k, v, mask, out, lse, None), (d_out, jnp.zeros_like(lse))


def _check_agreement(tilings: list[Tiling], results: list[Any], limit: float) -> None:
    first = [x.astype(jnp.float32) for x in jax.tree.leaves(results[0])]
    for tiling, result in zip(tilings, results, strict=True):
        error = max(
            float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())
            for x, y in zip(jax.tree.leaves(result), first, strict=True)
        )
        if not error <= limit:
            raise WrongResultError(f"{tiling} differs from the first tiling by {error}")
