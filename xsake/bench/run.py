"""Suites: what `xsake bench --suite NAME` measures. Every time stands beside its result's error."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench.cases import Case, cpu_case, hopper_case
from xsake.bench.peers import Peer, cudnn, flex_attention
from xsake.bench.timing import provenance, temporary_bytes, time_calls, time_queued
from xsake.block_mask import BlockMask

# As the conformance tests have it: float32 sums; bfloat16 rounds the output, p and ds.
ERROR_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


class WrongResultError(RuntimeError):
    """A timed function disagreed with the reference: its time is worth nothing."""


def attend(q: Any, k: Any, v: Any, mask: Any, backend: str = "xla") -> Any:
    """A backend as a user calls it."""
    return dot_product_attention(q, k, v, mask=mask, implementation=backend)


def attend_gradients(q: Any, k: Any, v: Any, mask: Any, d_out: Any) -> Any:
    """Forward and backward: the output, and what d_out gives to q, k and v."""
    out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return out, pull_back(d_out)


def error_of(case: Case, backend: str = "xla", heads: tuple[int, ...] = (0, 5)) -> dict[str, float]:
    """max|error| ÷ max|reference| of some heads, output and gradients, in float32."""
    given = case.arguments()
    worst = {"output": 0.0, "gradients": 0.0}
    for n in heads:
        head = [given[name][:1, :, n : n + 1] for name in ("query", "key", "value")]
        mask = given.get("mask")
        mask = mask[0, n] if isinstance(mask, BlockMask) else mask
        d_out = jnp.cos(jnp.arange(head[2].size)).reshape(head[2].shape).astype(case.dtype)

        def results(name: str, dtype: Any, head: Any = head, mask: Any = mask) -> Any:
            def run(*arrays: Any) -> Any:
                out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask, name), *arrays[:3])
                return {"output": [out], "gradients": pull_back(arrays[3])}

            return jax.jit(run)(*(x.astype(dtype) for x in (*head, d_out)))  # noqa: B023

        got, want = results(backend, case.dtype), results("reference", jnp.float32)
        for kind, error in worst.items():
            for x, y in zip(got[kind], want[kind], strict=True):
                error = max(error, float(jnp.abs(x - y).max() / jnp.abs(y).max()))
            worst[kind] = error
    limit = ERROR_LIMIT[case.dtype]
    if not all(error <= limit for error in worst.values()):
        raise WrongResultError(f"{case.name}: errors {worst} exceed {limit}; no time is reported")
    return worst


def cpu_densities(T: int, densities: tuple[float, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Time against density: ours dense, ours sparse, and `jax.nn` causal, in one round."""
    cases = {None: cpu_case(T, None)} | {d: cpu_case(T, d) for d in densities}
    q, k, v = (cases[None].arguments()[name] for name in ("query", "key", "value"))
    block_masks = {
        d: BlockMask.from_rule(masks.causal(), (T, T)) if d is None else case.arguments()["mask"]
        for d, case in cases.items()
    }
    errors = {d: error_of(case) for d, case in cases.items()}

    def peer(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    d_out = jnp.cos(jnp.arange(q.size, dtype=q.dtype)).reshape(q.shape)
    for direction, fn, more in (
        ("forward", attend, ()),
        ("forward+backward", attend_gradients, (d_out,)),
    ):
        compiled = jax.jit(fn)
        calls: dict[str, Any] = {
            str(d): (compiled, (q, k, v, mask, *more)) for d, mask in block_masks.items()
        }
        if direction == "forward":
            calls["jax.nn"] = (jax.jit(peer), (q, k, v))
        times = time_calls(calls, repeats)
        dense = times["None"].median_seconds
        for d, mask in block_masks.items():
            density, taken = float(mask.density()), times[str(d)].median_seconds
            row = {
                "suite": "cpu",
                "case": cases[d].name,
                "direction": direction,
                "T": T,
                "density_ratio": density,
                "median_seconds": taken,
                "least_seconds": times[str(d)].least_seconds,
                "repeats": repeats,
                "over_density_times_dense": taken / (density * dense),
                "error": errors[d]["output" if direction == "forward" else "gradients"],
            }
            if d is None and "jax.nn" in times:
                row["jax_nn_seconds"] = times["jax.nn"].median_seconds
                row["times_faster_than_jax_nn"] = times["jax.nn"].median_seconds / taken
            yield row


def cpu_memory(T: int) -> Iterator[dict[str, Any]]:
    """Peak temporary memory, from the compiler; nothing of this size is run."""
    shape = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.float32)
    mask = jax.eval_shape(lambda: BlockMask.from_rule(masks.causal(), (T, T)))

    def peer(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    ours, theirs = temporary_bytes(attend, *[shape] * 3, mask), temporary_bytes(peer, *[shape] * 3)
    yield {
        "suite": "cpu",
        "case": f"memory T={T}",
        "T": T,
        "temporary_bytes": ours,
        "jax_nn_temporary_bytes": theirs,
        "share_of_jax_nn": ours / theirs,
    }


def mask_building(repeats: int) -> Iterator[dict[str, Any]]:
    """Building masks for long sequences, compiled: seconds and temporary bytes."""
    window = masks.sliding_window(4096) & masks.causal()
    for rule, length in ((window, 1 << 20), (masks.causal(), 1 << 17)):

        def build(rule: Any = rule, length: int = length) -> BlockMask:
            return BlockMask.from_rule(rule, (length, length))

        compiled = jax.jit(build)
        taken = time_calls({"build": (compiled, ())}, repeats)["build"]
        mask = compiled()
        lists = sum(np.asarray(x).nbytes for x in (mask.kv_start, mask.kv_count, mask.kv_index))
        yield {
            "suite": "cpu",
            "case": f"build {rule}, {length} tokens",
            "T": length,
            "median_seconds": taken.median_seconds,
            "least_seconds": taken.least_seconds,
            "repeats": repeats,
            "temporary_bytes": temporary_bytes(build),
            "list_bytes": lists,
        }


def cpu_suite(quick: bool = False) -> Iterator[dict[str, Any]]:
    """What FEATURES promises of CPUs: time in proportion to density, little memory, quick masks."""
    repeats = 3 if quick else 15
    for T in (2048,) if quick else (4096, 8192):
        yield from cpu_densities(T, (0.43, 0.25) if quick else (0.43, 0.25, 0.10), repeats)
    yield from cpu_memory(16384)
    yield from mask_building(repeats)


def hopper_cell(case: Case, visited: float, others: dict[str, Peer]) -> Iterator[dict[str, Any]]:
    """One shape and mask on the Hopper kernels, forward and backward, beside peers in one run."""
    errors = error_of(case, "hopper")
    given = case.arguments()
    q, k, v, mask = (given.get(name) for name in ("query", "key", "value", "mask"))
    if mask is None or not isinstance(mask, BlockMask):
        mask = BlockMask.from_rule(mask or masks.everything(), (case.T, case.T))
    attention = functools.partial(attend, backend="hopper")
    _, pull_back = jax.jit(lambda *x: jax.vjp(lambda q, k, v: attention(q, k, v, mask), *x))(
        q, k, v
    )
    ours = {
        "forward": time_queued(jax.jit(attention), q, k, v, mask),
        "backward": time_queued(jax.jit(lambda pull_back, x: pull_back(x)), pull_back, q),
    }
    flops = 4 * case.B * case.N * case.H * case.T**2 * visited
    for direction, work in (("forward", flops), ("backward", 2.5 * flops)):
        row = {
            "suite": "hopper",
            "case": case.name,
            "direction": direction,
            "T": case.T,
            "H": case.H,
            "density_ratio": float(mask.density()),
            "median_seconds": ours[direction].median_seconds,
            "teraflops": work / ours[direction].median_seconds / 1e12,
            "error": errors["output" if direction == "forward" else "gradients"],
        }
        for name, peer in others.items():
            try:
                taken = peer(case)[direction]
            except ImportError as error:
                row[f"{name}_missing"] = str(error)
                continue
            row[f"{name}_teraflops"] = work / taken / 1e12
            row[f"times_faster_than_{name}"] = taken / ours[direction].median_seconds
        yield row


def hopper_suite(quick: bool = False) -> Iterator[dict[str, Any]]:
    """Block-sparse and causal cells of the Hopper kernels, beside FlexAttention and cuDNN."""
    shapes = ((4, 4096), (1, 16384))
    for H in (128, 64):
        for B, T in shapes[:1] if quick else shapes:
            for density in (0.43,) if quick else (0.43, 0.20, 0.10):
                case = hopper_case(B, T, H, density)
                visited = float(case.arguments()["mask"].density())
                yield from hopper_cell(case, visited, {"flex_attention": flex_attention})
            causal = Case(f"{B}·16·{T}·{H} causal", B, T, N=16, H=H, dtype="bfloat16", rule=_CAUSAL)
            yield from hopper_cell(causal, 0.5, {"cudnn": cudnn})


_CAUSAL = masks.causal()

SUITES: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {
    "cpu": cpu_suite,
    "hopper": hopper_suite,
}


def run_suite(
    name: str, out: Path, quick: bool = False, tell: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Runs a suite and writes its JSON: provenance and one row per measurement."""
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is not one of {list(SUITES)}")
    began, rows = time.perf_counter(), []
    for row in SUITES[name](quick):
        rows.append(row)
        if tell is not None:
            tell(row)
    report = {**provenance(), "seconds": time.perf_counter() - began, "results": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    return report
