"""The suite `hopper-features`: one case per feature, the xla backend on this GPU, and memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xsake import masks
from xsake.bench import programs
from xsake.bench.cases import Case, hopper_case
from xsake.bench.measure import CAUSAL, attend_hopper, attend_hopper_and_gradients, measure
from xsake.bench.peers import Peer, jax_seconds
from xsake.bench.suites import Part, Record
from xsake.bench.timing import compile_directions, temporary_bytes
from xsake.block_mask import BlockMask


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Features, the xla backend, memory."""
    yield from features(1024 if quick else 4096)
    yield from xla_backend(1024 if quick else 4096)
    yield from memory(16384 if quick else 131072)


def features(T: int) -> Iterator[Part]:
    """One case per feature at a real size, forward and backward, checked and timed."""
    plain = Case("", 4, T, N=16, H=128, dtype="bfloat16", rule=CAUSAL)
    ids = jnp.searchsorted(jnp.array([T // 8, T // 2, T - T // 5]), jnp.arange(T), side="right")
    sparse = hopper_case(4, T, 128, 0.43)
    change = functools.partial(dataclasses.replace, plain)
    named = {
        "window of 1,024": change(rule=masks.sliding_window(1024) & CAUSAL),
        "packed documents": change(rule=masks.documents(ids) & CAUSAL),
        "GQA 32/8": change(B=2, N=32, K=8),
        "sinks": change(sinks=0),
        "soft cap 50": change(soft_cap=50.0),
        "heads of 256": change(B=2, H=256),
        "heads of 192, values of 128": change(B=2, H=192, Hv=128),
        "float16": change(dtype="float16"),
        "T=4,000": change(T=T - 96),
    }
    for block in ((64, 64), (64, 128), (128, 64)):
        name = f"blocks of {block[0]} × {block[1]}, density 0.43"
        named[name] = dataclasses.replace(sparse, block=block)
    for name, case in named.items():
        case = dataclasses.replace(case, name=f"feature: {name}")
        yield Part(case.name, functools.partial(_records, case, {}, "hopper"))


def xla_backend(T: int) -> Iterator[Part]:
    """The xla backend compared with jax.nn."""
    sparse = dataclasses.replace(hopper_case(1, T, 64, 0.43), N=8)
    dense = dataclasses.replace(sparse, head_densities=None)
    for name, case in {
        f"1·8·{T}·64 density=0.43": sparse,
        "bias": dataclasses.replace(dense, bias=(0, 0, 0, 0)),
        "token mask": dataclasses.replace(dense, token_mask=(0, 0, 0, 0)),
    }.items():
        case = dataclasses.replace(case, name=f"xla backend: {name}")
        yield Part(case.name, functools.partial(_records, case, {"jax_nn": jax_nn}, "xla"))


def _records(
    case: Case, peers: dict[str, Peer], backend: str, done: list[Record]
) -> Iterator[Record]:
    return measure(case, peers, backend)


def jax_nn(case: Case) -> dict[str, float]:
    """jax.nn by XLA, with the case's bias or token mask; dense if the case is block-sparse."""
    given = {name: x for name, x in case.arguments(on_device=True).items() if x is not None}
    if isinstance(given.get("mask"), BlockMask):
        del given["mask"]
    arrays = [given[name] for name in ("query", "key", "value")]
    more = {"bias": given.get("bias"), "mask": given.get("mask")}

    def attend(q: Any, k: Any, v: Any, more: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **more, implementation="xla")

    return jax_seconds(case, given, compile_directions(attend, arrays, more))


def memory(T: int) -> Iterator[Part]:
    """Bytes beyond inputs and outputs at two lengths, by the compiler; nothing is run."""
    for length in (T // 2, T):
        name = f"memory 1·16·{length}·128 density≤0.10"
        yield Part(name, functools.partial(_memory_records, name, length))


def _memory_records(name: str, length: int, done: list[Record]) -> Iterator[Record]:
    blocks = length // 128
    shape = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
    mask = jax.eval_shape(
        lambda x: BlockMask.from_dense(x, shape=(length, length), capacity=blocks * blocks // 10),
        jax.ShapeDtypeStruct((16, blocks, blocks), jnp.bool_),
    )

    def temporary(fn: Callable[..., Any]) -> int:
        return temporary_bytes(fn, shape, shape, shape, mask)

    directions: dict[str, Callable[..., Any]] = {
        "forward": attend_hopper,
        "forward+backward": attend_hopper_and_gradients,
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = dict(zip(directions, pool.map(temporary, directions.values()), strict=True))
    for direction, size in found.items():
        yield {
            "suite": "hopper",  # as `measure` writes
            "case": name,
            "direction": direction,
            "T": length,
            "temporary_bytes": size,
            "temporary_bytes_per_token": size / length,
            "list_bytes": 4 * mask.kv_index.size,
        }


if __name__ == "__main__":
    programs.stop_for_suite("hopper-features")
