"""The CPU suite: what a density costs, beside jax.nn; temporary memory; building masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench.cases import cpu_case
from xsake.bench.checks import error_of
from xsake.bench.timing import temporary_bytes, time_calls
from xsake.block_mask import BlockMask


def attend(q: Any, k: Any, v: Any, mask: Any, backend: str = "xla") -> Any:
    """A backend as a user calls it."""
    return dot_product_attention(q, k, v, mask=mask, implementation=backend)


def attend_gradients(q: Any, k: Any, v: Any, mask: Any, d_out: Any) -> Any:
    """Forward and backward: the output, and what d_out gives to q, k and v."""
    out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    return out, pull_back(d_out)


def densities(T: int, densities: tuple[float, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Time against density: ours dense and ours sparse in one round; `jax.nn` causal after them.

    Ratios to dense are of times of the same round, the median over all rounds. `jax.nn` has rounds
    of its own: what it frees, gigabytes, would slow down the calls that follow it.
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
        ("forward+backward", attend_gradients, (d_out,)),
    ):
        compiled = jax.jit(fn)
        calls: dict[str, Any] = {
            str(d): (compiled, (q, k, v, mask, *more)) for d, mask in block_masks.items()
        }
        times = time_calls(calls, repeats)
        for d, mask in block_masks.items():
            density, taken = float(mask.density()), times[str(d)]
            row = {
                "suite": "cpu",
                "case": cases[d].name,
                "direction": direction,
                "T": T,
                "density_ratio": density,
                "median_seconds": taken.median_seconds,
                "least_seconds": taken.least_seconds,
                "repeats": taken.repeats,
                "over_density_times_dense": taken.over(times["None"]) / density,
                "error": errors[d]["output" if direction == "forward" else "gradients"],
            }
            if d is None and direction == "forward":
                theirs = time_calls({"jax.nn": (jax.jit(peer), (q, k, v))}, repeats)["jax.nn"]
                row["jax_nn_seconds"] = theirs.median_seconds
                row["times_faster_than_jax_nn"] = theirs.median_seconds / taken.median_seconds
            yield row


def memory(T: int) -> Iterator[dict[str, Any]]:
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


def suite(quick: bool = False) -> Iterator[dict[str, Any]]:
    """What FEATURES promises of CPUs: time in proportion to density, little memory, quick masks."""
    for T, repeats in ((2048, 3),) if quick else ((4096, 31), (8192, 31)):
        yield from densities(T, (0.43, 0.25) if quick else (0.43, 0.25, 0.10), repeats)
    yield from memory(16384)
    yield from mask_building(3 if quick else 15)
