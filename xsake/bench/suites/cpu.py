"""The suite `cpu`: time against density, temporary memory, mask construction; against jax.nn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench import programs
from xsake.bench.cases import cpu_case
from xsake.bench.checks import error_of
from xsake.bench.suites import Part, Record
from xsake.bench.timing import temporary_bytes, time_calls
from xsake.block_mask import BlockMask


def attend(q: Array, k: Array, v: Array, mask: BlockMask) -> Array:
    """Attention by the xla backend."""
    return dot_product_attention(q, k, v, mask=mask, implementation="xla")


def attend_and_gradients(q: Array, k: Array, v: Array, mask: BlockMask, d_out: Array) -> Any:
    """The output, and the gradients with respect to q, k and v."""
    out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return out, pull_back(d_out)


def densities(T: int, densities: tuple[float, ...], repeats: int) -> Iterator[Record]:
    """Time against density: our dense and sparse calls interleaved, then causal `jax.nn`.

    Ratios to dense are medians over rounds. `jax.nn` is timed separately: it frees gigabytes of
    temporary memory, which slows down the calls after it.
    """
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
        ("forward+backward", attend_and_gradients, (d_out,)),
    ):
        compiled = jax.jit(fn)
        calls: dict[str, Any] = {
            str(d): (compiled, (q, k, v, mask, *more)) for d, mask in block_masks.items()
        }
        times = time_calls(calls, repeats)
        for d, mask in block_masks.items():
            density, timing = float(mask.density()), times[str(d)]
            record = {
                "suite": "cpu",
                "case": cases[d].name,
                "direction": direction,
                "T": T,
                "density_ratio": density,
                "median_seconds": timing.median_seconds,
                "least_seconds": timing.least_seconds,
                "repeats": timing.repeats,
                "over_density_times_dense": timing.over(times["None"]) / density,
                "error": errors[d]["output" if direction == "forward" else "gradients"],
            }
            if d is None and direction == "forward":
                theirs = time_calls({"jax.nn": (jax.jit(peer), (q, k, v))}, repeats)["jax.nn"]
                record["jax_nn_seconds"] = theirs.median_seconds
                record["times_faster_than_jax_nn"] = theirs.median_seconds / timing.median_seconds
            yield record


def memory(T: int) -> Iterator[Record]:
    """Peak temporary memory, by the compiler; nothing is run."""
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


def mask_construction(repeats: int) -> Iterator[Record]:
    """Building masks for long sequences, compiled: seconds and temporary bytes."""
    window = masks.sliding_window(4096) & masks.causal()
    for rule, length in ((window, 1 << 20), (masks.causal(), 1 << 17)):

        def build(rule: Any = rule, length: int = length) -> BlockMask:
            return BlockMask.from_rule(rule, (length, length))

        compiled = jax.jit(build)
        timing = time_calls({"build": (compiled, ())}, repeats)["build"]
        mask = compiled()
        lists = sum(np.asarray(x).nbytes for x in (mask.kv_start, mask.kv_count, mask.kv_index))
        yield {
            "suite": "cpu",
            "case": f"build {rule}, {length} tokens",
            "T": length,
            "median_seconds": timing.median_seconds,
            "least_seconds": timing.least_seconds,
            "repeats": repeats,
            "temporary_bytes": temporary_bytes(build),
            "list_bytes": lists,
        }


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """The whole suite as one part."""
    yield Part("cpu", lambda done: _records(quick))


def _records(quick: bool) -> Iterator[Record]:
    for T, repeats in ((2048, 3),) if quick else ((4096, 31), (8192, 31)):
        yield from densities(T, (0.43, 0.25) if quick else (0.43, 0.25, 0.10), repeats)
    yield from memory(16384)
    yield from mask_construction(3 if quick else 15)


if __name__ == "__main__":
    programs.stop_for_suite("cpu")
