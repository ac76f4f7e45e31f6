"""Measures one case on one backend: compiled, checked, timed, and compared with peers.

TFLOP/s count visited token pairs only: 2·(H + Hv) per pair forward, 2.5 times that backward; a
plain causal rule counts half of all pairs. Times are of whole calls of `dot_product_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax import Array

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench.cases import Case
from xsake.bench.checks import checked_calls
from xsake.bench.peers import Peer
from xsake.bench.suites import Record
from xsake.bench.timing import (
    Calls,
    beside,
    compile_directions,
    time_directions,
    time_interleaved,
)
from xsake.block_mask import BlockMask

CAUSAL = masks.causal()


def attend_hopper(q: Array, k: Array, v: Array, mask: BlockMask) -> Array:
    """Attention by the hopper backend."""
    return dot_product_attention(q, k, v, mask=mask, implementation="hopper")


def attend_hopper_and_gradients(q: Array, k: Array, v: Array, mask: BlockMask) -> Any:
    """The output, and its gradients for d_out = out."""
    out, pull_back = jax.vjp(lambda q, k, v: attend_hopper(q, k, v, mask), q, k, v)
    return out, pull_back(out)


def measure(case: Case, peers: dict[str, Peer], backend: str = "hopper") -> Iterator[Record]:
    """One record for the forward and one for the backward, with the peers' times in them."""
    with beside():
        given, calls = compiled(case, backend)
        errors = checked_calls(case, given, calls)
    seconds = time_directions(calls)
    peer_seconds = {name: _peer_seconds(peer, case) for name, peer in peers.items()}
    B, T, S, N, _, H, Hv = case.sizes
    pairs = visited_pairs(case, given["mask"])
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        work = 2 * pairs * (H + Hv) * factor
        record = {
            "suite": "hopper",  # also for hopper-features
            "backend": backend,
            "case": case.name,
            "direction": direction,
            "T": T,
            "H": H,
            "density_ratio": pairs / (B * N * T * S),
            "median_seconds": seconds[direction],
            "teraflops": work / seconds[direction] / 1e12,
            "error": errors["output" if direction == "forward" else "gradients"],
        }
        for name, found in peer_seconds.items():
            if isinstance(found, str):
                record[f"{name}_missing"] = found
                continue
            record[f"{name}_teraflops"] = work / found[direction] / 1e12
            record[f"times_faster_than_{name}"] = found[direction] / seconds[direction]
        yield record


def time_ratio(case: Case, other: Case, direction: str) -> float:
    """Time of a case ÷ time of another; interleaved, because the GPU's clock drops as it heats."""
    with beside():
        calls = {x.name: compiled(x, "hopper")[1][direction] for x in (case, other)}
    times = time_interleaved(calls, rounds=5)
    return times[case.name].over(times[other.name])


@functools.lru_cache(maxsize=4)  # the dense case stays compiled for the sparse ones after it
def compiled(case: Case, backend: str) -> tuple[dict[str, Any], Calls]:
    """A case's arguments, and its compiled forward and backward."""
    given = {name: x for name, x in case.arguments(on_device=True).items() if x is not None}
    if not isinstance(given.get("mask"), (BlockMask, jax.Array)):
        rule = given.get("mask", masks.everything())
        given["mask"] = BlockMask.from_rule(rule, (case.T, case.T), block=case.block)
    inputs = [given[name] for name in ("query", "key", "value")]
    static = {name: given[name] for name in ("scale", "logits_soft_cap") if name in given}
    more = {name: given[name] for name in ("mask", "bias", "sinks") if name in given}

    def attend(q: Array, k: Array, v: Array, more: dict[str, Any]) -> Array:
        return dot_product_attention(q, k, v, implementation=backend, **more, **static)

    return given, compile_directions(attend, inputs, more)


def records_of(case: Case, done: list[Record]) -> dict[str, Record]:
    """A case's records by direction: those in `done`, or measured now."""
    found = [record for record in done if record["case"] == case.name] or _without_peers(case)
    return {record["direction"]: record for record in found}


@functools.lru_cache(maxsize=1)
def _without_peers(case: Case) -> list[Record]:
    return list(measure(case, {}))


def _peer_seconds(peer: Peer, case: Case) -> dict[str, float] | str:
    """The peer's seconds, or why it failed: our own record is kept without it."""
    try:
        return peer(case)
    except ImportError as error:
        return str(error)
    except Exception as error:  # any exception of another library, and WrongResultError
        return f"{type(error).__name__}: {error}"


def visited_pairs(case: Case, mask: BlockMask | Array) -> float:
    """Token pairs in visited blocks; half of all under a plain causal rule."""
    B, T, S, N, *_ = case.sizes
    if case.rule is CAUSAL and case.head_densities is None:
        return B * N * T * S / 2
    if not isinstance(mask, BlockMask):
        return float(B * N * T * S)
    lists = mask.kv_count.shape[0] * mask.kv_count.shape[1]
    return float(mask.kv_count.sum()) / lists * B * N * mask.block[0] * mask.block[1]
