"""`xsake bench --autotune`: times every tiling of the Hopper kernels and writes their table.

A class of calls (hopper_tilings.call_class) is measured on one or two calls that belong to it; all
candidates take turns, round by round, so that the card's drift hits them alike. The fastest by the
geometric mean wins. A candidate whose result differs from the first one's is an error, not a loss.
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

from xsake import masks
from xsake.backends import Sizes, hopper
from xsake.backends.hopper import tilings as hopper_tilings
from xsake.backends.options import Options
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import ERROR_LIMIT, WrongResultError
from xsake.bench.suites.hopper import CAUSAL, visited_pairs
from xsake.bench.timing import provenance, time_by_turns
from xsake.block_mask import BlockMask

# Fields of ForwardTiling and BackwardTiling that are tried.
SECTIONS: dict[str, Any] = {"order": "sections"}
SHORT: dict[str, Any] = {"l2_bytes": 8 << 20}  # sections of fewer heads
HEADS: dict[str, Any] = {"order": "heads"}
NATURAL: dict[str, Any] = {"order": "natural"}
FORWARD: tuple[dict[str, Any], ...] = (
    *(
        {**order, "alternate_products": turns, "lazy_rescale": 8.0}
        for order in (SECTIONS, SHORT, NATURAL)
        for turns in (True, False)
    ),
    {"persistent": False, "lazy_rescale": 8.0, "alternate_products": False},
    *({"overlap": False, **order} for order in (SECTIONS, SHORT, NATURAL)),
)
BACKWARD: tuple[dict[str, Any], ...] = tuple(
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
    """Classes with the calls that stand for them; those of a group are compiled once."""
    for H in (128, 64):
        for B, T in ((4, 4096), (1, 16384)):
            drawn = [[hopper_case(B, T, H, d) for d in ds] for ds in ((0.43, 0.20), (0.10,))]
            causal = Case(f"{B}·16·{T}·{H} causal", B, T, N=16, H=H, dtype="bfloat16", rule=CAUSAL)
            for classes in (drawn, [[causal]]):
                sizes = Sizes(B, T, T, 16, 16, H, H)
                yield {
                    hopper_tilings.call_class(sizes, mask_of(cases[0])): cases for cases in classes
                }


def mask_of(case: Case, room: int | None = None) -> BlockMask:
    """The lists of a case, with room for the drawn blocks only unless `room` says otherwise."""
    blocks = case.blocks()
    if blocks is None:
        return BlockMask.from_rule(case.rule or masks.everything(), (case.T, case.T))
    room = room or int(blocks.sum((2, 3)).max())
    return BlockMask.from_dense(blocks, case.rule, shape=(case.T, case.T), capacity=room)


def autotune(out: Path, only: str = "", tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures the rows whose name ("backward 128 long mixed") contains `only`, class by class.

    Other rows stay as they are in `out`.
    """
    from xsake.backends.options import BackwardTiling, ForwardTiling

    told = json.loads(out.read_text())["classes"] if only and out.exists() else {}
    report: dict[str, Any] = {
        **provenance(),
        "classes": {direction: told.get(direction, {}) for direction in ("forward", "backward")},
    }
    for whole in groups():
        for direction, kind, candidates in (
            ("forward", ForwardTiling, FORWARD),
            ("backward", BackwardTiling, BACKWARD),
        ):
            group = {name: cases for name, cases in whole.items() if only in f"{direction} {name}"}
            if not group:
                continue
            tilings = [kind(**fields) for fields in candidates]
            speeds = _speeds(
                direction, tilings, [case for cases in group.values() for case in cases]
            )
            for name, cases in group.items():
                row = _best(kind, candidates, {case.name: speeds[case.name] for case in cases})
                row |= {"date": report["date"], "commit": report["commit"]}
                report["classes"][direction][name] = row
                tell(f"{direction:<9} {name:<18} {row['teraflops']} {row['tiling']}")
            out.write_text(_one_line_a_class(report))
    return report


def join(files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes tables of one machine and its versions as one: of every class, the row of last date.

    Rows that were only copied have their old date. `command` is that of all files, `date` and
    `commit` are the last file's.
    """
    reports = [json.loads(file.read_text()) for file in files]
    last = max(reports, key=lambda report: report["date"])
    for file, report in zip(files, reports, strict=True):
        for fact in ("machine", "versions"):
            if report[fact] != last[fact]:
                raise ValueError(
                    f"{file} has {fact} {report[fact]}, another file has {last[fact]}; join only "
                    "tables of one machine and its versions"
                )
    rows: dict[str, Any] = {direction: {} for direction in last["classes"]}
    for report in sorted(reports, key=lambda report: report["date"]):
        for direction, classes in report["classes"].items():
            for name, row in classes.items():
                held = rows[direction].setdefault(name, row)
                if row["date"] >= held["date"]:
                    rows[direction][name] = row
    whole = last | {
        "command": "; ".join(dict.fromkeys(report["command"] for report in reports)),
        "classes": rows,
    }
    out.write_text(_one_line_a_class(whole))
    return whole


def _best(kind: Any, candidates: Any, speeds: dict[str, list[float]]) -> dict[str, Any]:
    """The candidate with the largest geometric mean over some calls, as a row of the table."""
    means = [math.prod(taken) ** (1 / len(speeds)) for taken in zip(*speeds.values(), strict=True)]
    best = max(range(len(means)), key=means.__getitem__)
    plain = dataclasses.asdict(kind())
    return {
        "tiling": {f: x for f, x in candidates[best].items() if x != plain[f]},
        "cases": list(speeds),
        "teraflops": [round(taken[best], 1) for taken in speeds.values()],
        "candidates": [[c, round(m, 1)] for c, m in zip(candidates, means, strict=True)],
    }


def _one_line_a_class(report: dict[str, Any]) -> str:
    """JSON that a reader can look through: every class on a line of its own."""
    facts = [
        f" {json.dumps(key)}: {json.dumps(x)}" for key, x in report.items() if key != "classes"
    ]
    directions = [
        f"  {json.dumps(direction)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n  }"
        for direction, rows in report["classes"].items()
    ]
    whole = [*facts, ' "classes": {\n' + ",\n".join(directions) + "\n }"]
    return "{\n" + ",\n".join(whole) + "\n}\n"


def _speeds(direction: str, tilings: list[Any], cases: list[Case]) -> dict[str, list[float]]:
    """TFLOP/s of every tiling on calls of one shape, timed whole, as a user makes them.

    The masks are arguments with equal room: one executable per tiling serves all calls, and what is
    made of the lists on the device is timed with it.
    """
    given = cases[0].arguments(on_device=True)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    room = max(mask_of(case).kv_index.shape[-1] for case in cases)
    block_masks = [mask_of(case, room) for case in cases]
    scale = 1 / math.sqrt(cases[0].H)

    def call(tiling: Any) -> Callable[..., Any]:
        settings = hopper.Settings(scale, None, Options(**{f"hopper_{direction}": tiling}))
        return functools.partial(getattr(hopper, f"run_{direction}"), settings)

    def arguments(mask: BlockMask) -> tuple[Any, ...]:
        if direction == "forward":
            return (q, k, v, mask)
        out, lse = hopper.run_forward(hopper.Settings(scale, None, Options()), q, k, v, mask)
        d_out = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
        return (q, k, v, mask, out, lse), (d_out, jnp.zeros_like(lse))

    each = [arguments(mask) for mask in block_masks]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda x: jax.jit(call(x)).lower(*each[0]).compile(), tilings))
    speeds = {}
    for case, mask, args in zip(cases, block_masks, each, strict=True):
        _check_agreement(tilings, [run(*args) for run in runs], ERROR_LIMIT[str(q.dtype)])
        work = 2 * visited_pairs(case, mask) * (q.shape[-1] + v.shape[-1])
        work *= 1 if direction == "forward" else 2.5
        taken = time_by_turns({str(at): (run, args) for at, run in enumerate(runs)})
        speeds[case.name] = [work / x.median_seconds / 1e12 for x in taken.values()]
    return speeds


def _check_agreement(tilings: list[Any], results: list[Any], limit: float) -> None:
    first = [x.astype(jnp.float32) for x in jax.tree.leaves(results[0])]
    for tiling, result in zip(tilings, results, strict=True):
        error = max(
            float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())
            for x, y in zip(jax.tree.leaves(result), first, strict=True)
        )
        if not error <= limit:
            raise WrongResultError(f"{tiling} differs from the first tiling by {error}")
