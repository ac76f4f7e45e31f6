"""The suite `hopper-rules`: causal masks, windows and packed documents on Hopper, beside peers.

    causal       every key before the query
    window       the last 1,024 keys
    documents    the keys of the query's own document; documents of 1,200 tokens in the mean

Our own call is measured with the BlockMask made before, and whole, as a user makes it with
`is_causal`, `local_window_size` or `q_segment_ids`. The whole call has a forward only: it saves the
BlockMask, so that its backward is the other one's. What peers prepare is made before. Every timed
result is compared with the float32 reference in the same process; a peer that is missing, fails or
is wrong has no time, and the record has the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.attention import dot_product_attention
from xsake.bench import programs, rule_peers
from xsake.bench.cases import RunCase
from xsake.bench.checks import checked
from xsake.bench.peers import wait_for_torch
from xsake.bench.suites import Part, Record
from xsake.bench.timing import alone, beside, compile_directions, time_queued
from xsake.block_mask import BlockMask

SHAPES = (  # B, N, K, T, H
    (1, 16, 16, 16384, 128),
    (2, 32, 8, 8192, 128),
    (1, 16, 16, 16384, 64),
    (4, 16, 16, 4096, 128),
)
# keys in the window, mean tokens of a document
RULES = {"causal": (None, None), "window": (1024, None), "documents": (None, 1200)}
DIRECTIONS = ("forward", "backward")
TURNS = 6  # of every call
MADE_BEFORE, WHOLE_CALL = "xsake, mask made before", "xsake, whole call"

Timed = tuple[Callable[[], Any], Callable[[Any], Any]]  # a call, and what waits for its result


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Every rule at every shape."""
    for shape in SHAPES[-1:] if quick else SHAPES:
        for rule in RULES:
            case = case_of(rule, *shape)
            yield Part(case.name, functools.partial(records, case))


def case_of(rule: str, B: int, N: int, K: int, T: int, H: int) -> RunCase:
    """A case; grouped heads are written N/K."""
    heads = str(N) if N == K else f"{N}/{K}"
    name = f"{rule}, {B}·{heads}·{T}·{H}"
    window, mean = RULES[rule]
    case = RunCase(name, B, T, N=N, K=K, H=H, dtype="bfloat16", seed=T)
    return dataclasses.replace(case, window=window, mean_document=mean)


def records(case: RunCase, done: list[Record]) -> Iterator[Record]:
    """A record for each direction and implementation."""
    missing: dict[str, str] = {}
    with beside():
        calls, errors = own_calls(case)
        for name, peer in rule_peers.PEERS.items():
            try:
                found = peer(case)
            except Exception as problem:  # any exception of another library, and WrongResultError
                missing[name] = f"{type(problem).__name__}: {problem}"[:300]
                continue
            for direction, call in found.items():
                calls[direction][name] = call, wait_for_torch
    for direction in DIRECTIONS:
        times = times_of(calls[direction])
        for name in (MADE_BEFORE, WHOLE_CALL, *rule_peers.PEERS):
            if name == WHOLE_CALL and direction == "backward":
                continue
            record = {
                "suite": "hopper-rules",
                "case": case.name,
                "direction": direction,
                "implementation": name,
                "T": case.T,
                "H": case.H,
            }
            if name in missing:
                yield record | {"missing": missing[name]}
                continue
            if name in errors:
                record["error"] = errors[name]["output" if direction == "forward" else "gradients"]
            yield record | {"median_seconds": times[name]}


def own_calls(case: RunCase) -> tuple[dict[str, dict[str, Timed]], dict[str, dict[str, float]]]:
    """Our calls by direction, and their errors."""
    given = case.arguments(on_device=True)
    inputs = [given[name] for name in ("query", "key", "value")]
    ids = jnp.asarray(case.ids())
    mask = BlockMask.from_rule(given["mask"], (case.T, case.T), batch=case.B)
    given = {name: x for name, x in given.items() if x is not None} | {"mask": mask}
    found = compile_directions(attend_made, inputs, mask)
    whole = jax.jit(functools.partial(attend_whole, case)).lower(*inputs, ids).compile()
    back, (_, d_out) = found["backward"]
    out, gradients = found["forward"][0](*found["forward"][1]), back(*found["backward"][1])
    errors = {
        MADE_BEFORE: checked(case, given, d_out, out, gradients),
        WHOLE_CALL: checked(case, given, d_out, whole(*inputs, ids), gradients),
    }
    calls: dict[str, dict[str, Timed]] = {
        direction: {MADE_BEFORE: (functools.partial(fn, *args), jax.block_until_ready)}
        for direction, (fn, args) in found.items()
    }
    calls["forward"][WHOLE_CALL] = functools.partial(whole, *inputs, ids), jax.block_until_ready
    return calls, errors


def attend_made(q: Array, k: Array, v: Array, mask: BlockMask) -> Array:
    """Attention by the hopper backend with a mask made before."""
    return dot_product_attention(q, k, v, mask=mask, implementation="hopper")


def attend_whole(case: RunCase, q: Array, k: Array, v: Array, ids: Array) -> Array:
    """The same, from what a user passes."""
    return dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=None if case.window is None else (case.window - 1, None),
        q_segment_ids=None if case.mean_document is None else ids,
        implementation="hopper",
    )


def times_of(calls: dict[str, Timed]) -> dict[str, float]:
    """Median seconds of each call; they take turns, each time from another one on, and back.

    The first round of a turn does not count: the GPU's clock still follows the call before it.
    """
    names, found = list(calls), {name: list[float]() for name in calls}
    with alone():
        for turn in range(TURNS):
            first = turn % len(names)
            for name in (names[first:] + names[:first])[:: -1 if turn % 2 else 1]:
                call, wait = calls[name]
                found[name] += time_queued(call, seconds=0.04, rounds=2, wait=wait).seconds[1:]
    return {name: statistics.median(seconds) for name, seconds in found.items()}


if __name__ == "__main__":
    programs.stop_for_suite("hopper-rules")
