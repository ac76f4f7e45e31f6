"""The Hopper suite: speed beside peers, what density and skew cost, features, memory.

TFLOP/s count visited tokens only: forward 2·(H + Hv) per pair, backward two and a half times that;
a plain causal rule counts half of all pairs. Times are of whole calls, as a user makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import error_of
from xsake.bench.peers import Peer, cudnn, flex_attention
from xsake.bench.timing import time_queued
from xsake.block_mask import BlockMask

Row = dict[str, Any]
CAUSAL = masks.causal()
SHAPES = ((4, 4096), (1, 16384))


def suite(quick: bool = False) -> Iterator[Row]:
    """Speed: dense, causal and block-sparse cells beside peers, skewed heads, transposed lists."""
    for H in (128, 64):
        for B, T in SHAPES[:1] if quick else SHAPES:
            yield from cells(B, T, H, (0.43,) if quick else (0.43, 0.20, 0.10))
    if not quick:
        yield from skew(1, 16384, 128)
        yield from transposing(1, 16384, 128)


def feature_suite(quick: bool = False) -> Iterator[Row]:
    """Every feature once, plain JAX on this card, and memory."""
    yield from features(1024 if quick else 4096)
    yield from plain_jax(1024 if quick else 4096)
    yield from memory(16384 if quick else 131072)


def cells(B: int, T: int, H: int, densities: tuple[float, ...]) -> Iterator[Row]:
    """Dense, causal and block-sparse at one shape; sparse times also against our own dense."""
    name = f"{B}·16·{T}·{H}"
    dense = Case(f"{name} full", B, T, N=16, H=H, dtype="bfloat16", rule=masks.everything())
    seconds = {}
    for row in measure(dense, {"cudnn": cudnn}):
        seconds[row["direction"]] = row["median_seconds"]
        yield row
    causal = dataclasses.replace(dense, name=f"{name} causal", rule=CAUSAL)
    yield from measure(causal, {"cudnn": cudnn})
    for density in densities:
        for row in measure(hopper_case(B, T, H, density), {"flex_attention": flex_attention}):
            ratio = row["median_seconds"] / (row["density_ratio"] * seconds[row["direction"]])
            yield row | {"over_density_times_dense": ratio}


def skew(B: int, T: int, H: int) -> Iterator[Row]:
    """Half of the heads at 0.05 and half at 0.81 against all at 0.43: time per visited block."""
    uniform = {r["direction"]: r for r in measure(hopper_case(B, T, H, 0.43), {})}
    for row in measure(hopper_case(B, T, H, 0.43, (0.05, 0.81)), {}):
        even = uniform[row["direction"]]
        yield row | {"over_uniform_heads": even["teraflops"] / row["teraflops"]}


def transposing(B: int, T: int, H: int) -> Iterator[Row]:
    """The lists by column, which the backward makes on the device; new contents, no recompile."""
    first, second = (hopper_case(B, T, H, d).arguments()["mask"] for d in (0.43, 0.42))
    second = BlockMask.from_dense(
        second.blocks() > 0, shape=(T, T), capacity=first.kv_index.shape[-1]
    )
    transpose = jax.jit(lambda mask: mask.transpose())
    taken = time_queued(transpose, first).median_seconds
    given = hopper_case(B, T, H, 0.43).arguments()
    arrays = tuple(given[name] for name in ("query", "key", "value"))

    gradients = jax.jit(_attend_and_back)
    jax.block_until_ready(gradients(*arrays, first))
    with jax.transfer_guard("disallow"):  # a transfer is what a host synchronisation needs
        jax.block_until_ready(gradients(*arrays, second))
    backward = next(
        r for r in measure(hopper_case(B, T, H, 0.43), {}) if r["direction"] == "backward"
    )
    yield {
        "suite": "hopper",
        "case": f"{B}·16·{T}·{H} density=0.43, transposed lists",
        "T": T,
        "median_seconds": taken,
        "share_of_backward": taken / backward["median_seconds"],
        "compilations_for_two_masks": gradients._cache_size(),  # type: ignore[attr-defined]
    }


def features(T: int) -> Iterator[Row]:
    """Every feature once at a real size, forward and backward, checked and timed."""
    plain = Case("", 4, T, N=16, H=128, dtype="bfloat16", rule=CAUSAL)
    ids = jnp.searchsorted(jnp.array([T // 8, T // 2, T - T // 5]), jnp.arange(T), side="right")
    sparse = hopper_case(4, T, 128, 0.43)
    named: dict[str, dict[str, Any]] = {
        "window of 1,024": {"rule": masks.sliding_window(1024) & CAUSAL},
        "packed documents": {"rule": masks.documents(ids) & CAUSAL},
        "GQA 32/8": {"B": 2, "N": 32, "K": 8},
        "sinks": {"sinks": 0},
        "soft cap 50": {"soft_cap": 50.0},
        "heads of 256": {"B": 2, "H": 256},
        "heads of 192, values of 128": {"B": 2, "H": 192, "Hv": 128},
        "float16": {"dtype": "float16"},
        "T=4,000": {"T": T - 96},
    }
    for name, changes in named.items():
        yield from measure(dataclasses.replace(plain, name=f"feature: {name}", **changes), {})
    for block in ((64, 64), (64, 128), (128, 64)):
        case = dataclasses.replace(
            sparse, name=f"feature: blocks of {block[0]} × {block[1]}, density 0.43", block=block
        )
        yield from measure(case, {})


def plain_jax(T: int) -> Iterator[Row]:
    """The `xla` backend on this card, which takes what the kernels do not, beside jax.nn."""
    sparse = dataclasses.replace(hopper_case(1, T, 64, 0.43), N=8)
    cases = (
        sparse,
        dataclasses.replace(sparse, name="bias", head_densities=None, bias=(0, 0, 0, 0)),
        dataclasses.replace(
            sparse, name="token mask", head_densities=None, token_mask=(0, 0, 0, 0)
        ),
    )
    for case in cases:
        case = dataclasses.replace(case, name=f"xla backend: {case.name}")
        yield from measure(case, {"jax_nn": _jax_nn}, backend="xla")


def _jax_nn(case: Case) -> dict[str, float]:
    """jax.nn's own XLA path, with the same bias or token mask; dense where the case is sparse."""
    given = case.arguments()
    arrays = tuple(given[name] for name in ("query", "key", "value"))
    mask = given.get("mask")
    mask = None if isinstance(mask, BlockMask) else mask

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, given.get("bias"), mask, implementation="xla")

    return _directions(attend, *arrays)


def memory(T: int) -> Iterator[Row]:
    """Bytes beyond inputs and outputs, from the compiler, at two lengths; nothing is run."""
    for length in (T // 2, T):
        case = Case(f"memory 1·16·{length}·128 density≤0.10", 1, length, N=16, H=128)
        blocks = length // 128
        shape = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
        mask = jax.eval_shape(
            lambda x, length=length, blocks=blocks: BlockMask.from_dense(
                x, shape=(length, length), capacity=blocks * blocks // 10
            ),
            jax.ShapeDtypeStruct((16, blocks, blocks), jnp.bool_),
        )

        for direction, fn in (("forward", _attend), ("forward+backward", _attend_and_back)):
            analysis: Any = jax.jit(fn).lower(shape, shape, shape, mask).compile().memory_analysis()
            temporary = int(analysis.temp_size_in_bytes)
            yield {
                "suite": "hopper",
                "case": case.name,
                "direction": direction,
                "T": length,
                "temporary_bytes": temporary,
                "temporary_bytes_per_token": temporary / length,
                "list_bytes": 4 * mask.kv_index.size,
            }


def _attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return dot_product_attention(q, k, v, mask=mask, implementation="hopper")


def _attend_and_back(q: Any, k: Any, v: Any, mask: Any) -> Any:
    out, pull_back = jax.vjp(lambda q, k, v: _attend(q, k, v, mask), q, k, v)
    return out, pull_back(out)


def measure(case: Case, others: dict[str, Peer], backend: str = "hopper") -> Iterator[Row]:
    """One call, forward and backward, checked, timed, and beside its peers in this run."""
    errors = error_of(case, backend)
    given = {name: x for name, x in case.arguments().items() if x is not None}
    q, k, v = (given.pop(name) for name in ("query", "key", "value"))
    mask = given.pop("mask", None)
    if not isinstance(mask, BlockMask) and not isinstance(mask, jax.Array):
        mask = BlockMask.from_rule(mask or masks.everything(), (case.T, case.T))

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return dot_product_attention(q, k, v, mask=mask, implementation=backend, **given)

    ours = _directions(attend, q, k, v, mask)
    B, T, S, N, _, H, Hv = case.sizes
    pairs = visited_pairs(case, mask)
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        work = 2 * pairs * (H + Hv) * factor
        row = {
            "suite": "hopper",
            "backend": backend,
            "case": case.name,
            "direction": direction,
            "T": T,
            "H": H,
            "density_ratio": pairs / (B * N * T * S),
            "median_seconds": ours[direction],
            "teraflops": work / ours[direction] / 1e12,
            "error": errors["output" if direction == "forward" else "gradients"],
        }
        for name, peer in others.items():
            try:
                taken = peer(case)[direction]
            except ImportError as error:
                row[f"{name}_missing"] = str(error)
                continue
            row[f"{name}_teraflops"] = work / taken / 1e12
            row[f"times_faster_than_{name}"] = taken / ours[direction]
        yield row


def visited_pairs(case: Case, mask: Any) -> float:
    """Pairs of tokens in visited blocks; half of all under a plain causal rule."""
    B, T, S, N, *_ = case.sizes
    if case.rule is CAUSAL and case.head_densities is None:
        return B * N * T * S / 2
    if not isinstance(mask, BlockMask):
        return B * N * T * S
    lists = mask.kv_count.shape[0] * mask.kv_count.shape[1]
    return float(mask.kv_count.sum()) / lists * B * N * mask.block[0] * mask.block[1]


def _directions(attend: Any, q: Any, k: Any, v: Any, *more: Any) -> dict[str, float]:
    """Median seconds of attend(q, k, v, *more) and of its pull-back alone."""
    _, pull_back = jax.jit(lambda q, k, v, *more: jax.vjp(lambda *x: attend(*x, *more), q, k, v))(
        q, k, v, *more
    )
    d_out = jax.random.normal(jax.random.key(0), (*q.shape[:3], v.shape[-1]), q.dtype)
    return {
        "forward": time_queued(jax.jit(attend), q, k, v, *more).median_seconds,
        "backward": time_queued(jax.jit(lambda f, x: f(x)), pull_back, d_out).median_seconds,
    }
