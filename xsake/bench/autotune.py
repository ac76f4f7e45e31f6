"""`xsake bench --autotune`: times every tiling of the Hopper kernels and writes their table.

A class of calls (hopper_tilings.call_class) is measured on one or two calls that belong to it; all
candidates take turns, round by round, so that the card's drift hits them alike. The fastest by the
geometric mean wins. A candidate whose result differs from the first one's is an error, not a loss.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention import dot_product_attention
from xsake.backends import Options, Sizes, hopper_tilings
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import ERROR_LIMIT, WrongResultError
from xsake.bench.hopper import CAUSAL, visited_pairs
from xsake.bench.timing import provenance
from xsake.block_mask import BlockMask

ROUNDS = 7
SECONDS = 0.01  # of queued calls in one round

# Fields of ForwardTiling and BackwardTiling that are tried.
FORWARD: tuple[dict[str, Any], ...] = (
    *(
        {"order": order, "q_stages": 1 + across, "across": across, "take_turns": turns}
        | {"lazy_rescale": 8.0}
        for order in ("sections", "natural")
        for across in (False, True)
        for turns in (True, False)
    ),
    {"persistent": False, "lazy_rescale": 8.0, "take_turns": False},
    {"overlap": False},
)
BACKWARD: tuple[dict[str, Any], ...] = tuple(
    {"fused": fused, "persistent": persistent, "order": order}
    for fused, persistent, order in (
        (True, True, "sections"),
        (True, True, "natural"),
        (True, False, "sections"),
        (True, False, "natural"),
        (False, True, "sections"),
        (False, True, "natural"),
    )
)


def classes() -> Iterator[tuple[str, list[Case]]]:
    """Every class that is measured, with the calls that stand for it."""
    for H in (128, 64):
        for B, T in ((4, 4096), (1, 16384)):
            groups = (
                [hopper_case(B, T, H, 0.43), hopper_case(B, T, H, 0.20)],
                [hopper_case(B, T, H, 0.10)],
                [Case(f"{B}·16·{T}·{H} causal", B, T, N=16, H=H, dtype="bfloat16", rule=CAUSAL)],
            )
            for cases in groups:
                q, k, v, mask = _inputs(cases[0])
                yield hopper_tilings.call_class(Sizes.of(q, k, v), mask), cases


def autotune(out: Path, only: str = "", tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Measures the classes whose name contains `only` and writes the table, class by class.

    Rows of other classes stay as they are in `out`.
    """
    from xsake.backends.hopper_backward import BackwardTiling
    from xsake.backends.hopper_forward import ForwardTiling

    told = json.loads(out.read_text())["classes"] if only and out.exists() else {}
    report: dict[str, Any] = {
        **provenance(),
        "classes": {direction: told.get(direction, {}) for direction in ("forward", "backward")},
    }
    for name, cases in classes():
        if only not in name:
            continue
        for direction, kind, candidates in (
            ("forward", ForwardTiling, FORWARD),
            ("backward", BackwardTiling, BACKWARD),
        ):
            tilings = [kind(**fields) for fields in candidates]
            speeds = [_speeds(direction, tilings, case) for case in cases]
            means = [
                math.prod(s[i] for s in speeds) ** (1 / len(speeds)) for i in range(len(tilings))
            ]
            best = max(range(len(tilings)), key=means.__getitem__)
            plain = dataclasses.asdict(kind())
            report["classes"][direction][name] = {
                "tiling": {f: x for f, x in candidates[best].items() if x != plain[f]},
                "date": report["date"],
                "commit": report["commit"],
                "cases": [case.name for case in cases],
                "teraflops": [round(s[best], 1) for s in speeds],
                "candidates": [[c, round(m, 1)] for c, m in zip(candidates, means, strict=True)],
            }
            row = report["classes"][direction][name]
            tell(f"{direction:<9} {name:<18} {row['teraflops']} {row['tiling']}")
            out.write_text(_one_line_a_class(report))
    return report


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


def _inputs(case: Case) -> tuple[Any, Any, Any, BlockMask]:
    given = case.arguments(on_device=True)
    mask = given["mask"]
    if not isinstance(mask, BlockMask):
        mask = BlockMask.from_rule(mask, (case.T, case.T))
    return given["query"], given["key"], given["value"], mask


def _speeds(direction: str, tilings: list[Any], case: Case) -> list[float]:
    """TFLOP/s of every tiling on one call, timed whole, as a user makes it."""
    q, k, v, mask = _inputs(case)
    cotangent = jnp.cos(jnp.arange(v.size)).reshape(v.shape).astype(v.dtype)

    def compiled(tiling: Any) -> Any:
        options = Options(**{f"hopper_{direction}": tiling})

        def attend(q: Any, k: Any, v: Any) -> Any:
            return dot_product_attention(
                q, k, v, mask=mask, implementation="hopper", options=options
            )

        if direction == "forward":
            return jax.jit(attend).lower(q, k, v).compile(), (q, k, v)
        _, pull_back = jax.jit(lambda *x: jax.vjp(attend, *x))(q, k, v)
        run = jax.jit(lambda pull_back, x: pull_back(x))
        return run.lower(pull_back, cotangent).compile(), (pull_back, cotangent)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = list(pool.map(compiled, tilings))
    first: Any = None
    for tiling, (run, args) in zip(tilings, runs, strict=True):
        got = [x.astype(jnp.float32) for x in jax.tree.leaves(run(*args))]
        first = got if first is None else first
        error = max(
            float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(got, first, strict=True)
        )
        if not error <= ERROR_LIMIT[str(q.dtype)]:
            raise WrongResultError(f"{tiling} differs from the first tiling by {error}")
    work = 2 * visited_pairs(case, mask) * (q.shape[-1] + v.shape[-1])
    work *= 1 if direction == "forward" else 2.5
    calls = max(3, round(SECONDS / (work / 4e14)))
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(ROUNDS):
        for at in range(len(runs)):
            at = (at + turn) % len(runs)
            run, args = runs[at]
            jax.block_until_ready(run(*args))
            began = time.perf_counter()
            for _ in range(calls):
                result = run(*args)
            jax.block_until_ready(result)
            seconds[at].append((time.perf_counter() - began) / calls)
    return [work / statistics.median(taken) / 1e12 for taken in seconds]
