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
from xsake.bench.cases import Case, cpu_case
from xsake.bench.timing import provenance, temporary_bytes, time_calls
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
    """max|error| ÷ max|reference| of some heads, output and gradients, against float32."""
    given = case.arguments()
    static = {name: given.pop(name) for name in ("scale", "logits_soft_cap")}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(name: str, dtype: str, inputs: Any, d_out: Any, more: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return dot_product_attention(q, k, v, implementation=name, **more, **static)

        out, pull_back = jax.vjp(attend, *(x.astype(dtype) for x in inputs))
        return {"output": [out], "gradients": pull_back(d_out.astype(dtype))}

    worst = {"output": 0.0, "gradients": 0.0}
    for n in heads:
        one = _one_head(case, given, n % case.N)
        inputs = [one.pop(name) for name in ("query", "key", "value")]
        d_out = jnp.cos(jnp.arange(case.T * inputs[2].shape[-1]))
        d_out = d_out.reshape(1, case.T, 1, -1)
        got = results(backend, case.dtype, inputs, d_out, one)
        want = results("reference", "float32", inputs, d_out, one)
        for kind, error in worst.items():
            for x, y in zip(got[kind], want[kind], strict=True):
                error = max(error, float(jnp.abs(x - y).max() / jnp.abs(y).max()))
            worst[kind] = error
    limit = ERROR_LIMIT[case.dtype]
    if not all(error <= limit for error in worst.values()):
        raise WrongResultError(f"{case.name}: errors {worst} exceed {limit}; no time is reported")
    return worst


def _one_head(case: Case, given: dict[str, Any], n: int) -> dict[str, Any]:
    """The arguments of query head n alone, first batch row."""
    K, N = case.sizes[4], case.N
    out = {name: x for name, x in given.items() if x is not None}
    out["query"] = given["query"][:1, :, n : n + 1]
    for name in ("key", "value"):
        out[name] = given[name][:1, :, n * K // N : n * K // N + 1]
    if "sinks" in out:
        out["sinks"] = out["sinks"][n : n + 1]
    if isinstance(out.get("mask"), BlockMask):
        out["mask"] = out["mask"][0, n * out["mask"].kv_count.shape[1] // N]
    for name in ("bias", "mask"):  # arrays [B|1, N|1, T|1, S|1]
        if isinstance(out.get(name), jax.Array):
            out[name] = out[name][:1, min(n, out[name].shape[1] - 1)][:, None]
    return out


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


def run_suite(
    name: str, out: Path, quick: bool = False, tell: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Runs a suite and writes its JSON: provenance and one row per measurement."""
    from xsake.bench import hopper  # which measures with what stands here

    suites = {
        "cpu": cpu_suite,
        "hopper": hopper.suite,
        "hopper-features": hopper.feature_suite,
    }
    if name not in suites:
        raise ValueError(f"suite {name!r} is not one of {list(suites)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    facts, began = provenance(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for row in suites[name](quick):
        rows.append(row)
        if tell is not None:
            tell(row)
        # after every row: a run that is cut off keeps what it measured
        report = {**facts, "seconds": time.perf_counter() - began, "results": rows}
        out.write_text(json.dumps(report, indent=1) + "\n")
    return report
