"""The Hopper suites: speed beside peers, what density and skew cost, features, memory.

TFLOP/s count visited tokens only: forward 2·(H + Hv) per pair, backward two and a half times that;
a plain causal rule counts half of all pairs. Times are of whole calls, as a user makes them.

A suite is a list of parts, each named like its case: what a file holds is not measured again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xsake import masks
from xsake.attention import dot_product_attention
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import checked_calls
from xsake.bench.peers import Peer, cudnn, flash_attention_4, flex_attention, jax_seconds
from xsake.bench.timing import (
    Calls,
    compile_directions,
    time_by_turns,
    time_directions,
    time_queued,
)
from xsake.block_mask import BlockMask

Row = dict[str, Any]
Part = tuple[str, Callable[[list[Row]], Iterator[Row]]]  # its case; (rows so far) -> its own rows
CAUSAL = masks.causal()
SHAPES = ((4, 4096), (1, 16384))


def suite(quick: bool = False) -> Iterator[Part]:
    """Speed: dense, causal and block-sparse cells beside peers, skewed heads, transposed lists."""
    for H in (128, 64):
        for B, T in SHAPES[:1] if quick else SHAPES:
            dense = dense_case(B, T, H)
            for case in (
                dense,
                dataclasses.replace(dense, name=f"{B}·16·{T}·{H} causal", rule=CAUSAL),
            ):
                yield case.name, functools.partial(dense_cell, case)
            for density in (0.43,) if quick else (0.43, 0.20, 0.10):
                case = hopper_case(B, T, H, density)
                yield case.name, functools.partial(sparse_cell, case, dense)
    if not quick:
        yield skew(1, 16384, 128)
        yield transposing(1, 16384, 128)


def feature_suite(quick: bool = False) -> Iterator[Part]:
    """Every feature once, plain JAX on this card, and memory."""
    yield from features(1024 if quick else 4096)
    yield from plain_jax(1024 if quick else 4096)
    yield from memory(16384 if quick else 131072)


def dense_case(B: int, T: int, H: int) -> Case:
    """Sixteen heads that see everything."""
    return Case(f"{B}·16·{T}·{H} full", B, T, N=16, H=H, dtype="bfloat16", rule=masks.everything())


def _cell(case: Case, done: list[Row], backend: str = "hopper", **others: Peer) -> Iterator[Row]:
    return measure(case, others, backend)


def dense_cell(case: Case, done: list[Row]) -> Iterator[Row]:
    """A full or causal cell beside its peers."""
    return measure(case, {"cudnn": cudnn, "flash_attention_4": flash_attention_4})


def sparse_cell(case: Case, dense: Case, done: list[Row]) -> Iterator[Row]:
    """A block-sparse cell beside its peers, and against our own dense time."""
    peers: dict[str, Peer] = {
        "flex_attention": flex_attention,
        "flash_attention_4": flash_attention_4,
    }
    _rows_of(dense, done)  # so that it was checked
    for row in measure(case, peers):
        ratio = over(case, dense, row["direction"])
        yield row | {"over_density_times_dense": ratio / row["density_ratio"]}


def over(case: Case, other: Case, direction: str) -> float:
    """How many times the other's time; they take turns, for a card slows down as it grows warm."""
    calls = {x.name: compiled(x, "hopper")[1][direction] for x in (case, other)}
    times = time_by_turns(calls, rounds=5)
    return times[case.name].over(times[other.name])


def skew(B: int, T: int, H: int) -> Part:
    """Half of the heads at 0.05 and half at 0.81 against all at 0.43: time per visited block."""
    skewed, even = hopper_case(B, T, H, 0.43, (0.05, 0.81)), hopper_case(B, T, H, 0.43)

    def rows(done: list[Row]) -> Iterator[Row]:
        uniform = _rows_of(even, done)
        for row in measure(skewed, {}):
            direction = row["direction"]
            visits = row["density_ratio"] / uniform[direction]["density_ratio"]
            yield row | {"over_uniform_heads": over(skewed, even, direction) / visits}

    return skewed.name, rows


def transposing(B: int, T: int, H: int) -> Part:
    """The lists by column, which the backward makes on the device; new contents, no recompile."""
    case = hopper_case(B, T, H, 0.43)
    name = f"{case.name}, transposed lists"

    def rows(done: list[Row]) -> Iterator[Row]:
        from xsake.backends.hopper.transpose import transpose_lists  # needs a newer JAX

        given = case.arguments(on_device=True)
        arrays = tuple(given[name] for name in ("query", "key", "value"))
        first, second = given["mask"], hopper_case(B, T, H, 0.42).arguments()["mask"]
        second = BlockMask.from_dense(
            second.blocks() > 0, shape=(T, T), capacity=first.kv_index.shape[-1]
        )
        turned = jax.jit(lambda mask: transpose_lists(mask.lists, mask.grid.counts[1]))
        taken = time_queued(turned, first).median_seconds
        gradients = jax.jit(_attend_and_back)
        jax.block_until_ready(gradients(*arrays, first))
        with jax.transfer_guard("disallow"):  # a transfer is what a host synchronisation needs
            jax.block_until_ready(gradients(*arrays, second))
        backward = _rows_of(case, done)["backward"]
        yield {
            "suite": "hopper",
            "case": name,
            "T": T,
            "median_seconds": taken,
            "share_of_backward": taken / backward["median_seconds"],
            "compilations_for_two_masks": gradients._cache_size(),  # type: ignore[attr-defined]
        }

    return name, rows


def features(T: int) -> Iterator[Part]:
    """Every feature once at a real size, forward and backward, checked and timed."""
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
        yield case.name, functools.partial(_cell, case)


def plain_jax(T: int) -> Iterator[Part]:
    """The `xla` backend on this card, which takes what the kernels do not, beside jax.nn."""
    sparse = dataclasses.replace(hopper_case(1, T, 64, 0.43), N=8)
    dense = dataclasses.replace(sparse, head_densities=None)
    for name, case in {
        f"1·8·{T}·64 density=0.43": sparse,
        "bias": dataclasses.replace(dense, bias=(0, 0, 0, 0)),
        "token mask": dataclasses.replace(dense, token_mask=(0, 0, 0, 0)),
    }.items():
        case = dataclasses.replace(case, name=f"xla backend: {name}")
        yield case.name, functools.partial(_cell, case, backend="xla", jax_nn=_jax_nn)


def _jax_nn(case: Case) -> dict[str, float]:
    """jax.nn's own XLA path, with the same bias or token mask; dense where the case is sparse."""
    given = {name: x for name, x in case.arguments(on_device=True).items() if x is not None}
    if isinstance(given.get("mask"), BlockMask):
        del given["mask"]
    arrays = [given[name] for name in ("query", "key", "value")]
    more = {"bias": given.get("bias"), "mask": given.get("mask")}

    def attend(q: Any, k: Any, v: Any, more: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **more, implementation="xla")

    return jax_seconds(case, given, compile_directions(attend, arrays, more))


def memory(T: int) -> Iterator[Part]:
    """Bytes beyond inputs and outputs, from the compiler, at two lengths; nothing is run."""
    for length in (T // 2, T):
        name = f"memory 1·16·{length}·128 density≤0.10"
        yield name, functools.partial(_memory_rows, name, length)


def _memory_rows(name: str, length: int, done: list[Row]) -> Iterator[Row]:
    blocks = length // 128
    shape = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
    mask = jax.eval_shape(
        lambda x: BlockMask.from_dense(x, shape=(length, length), capacity=blocks * blocks // 10),
        jax.ShapeDtypeStruct((16, blocks, blocks), jnp.bool_),
    )

    def temporary(fn: Any) -> int:
        analysis: Any = jax.jit(fn).lower(shape, shape, shape, mask).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    directions = {"forward": attend_hopper, "forward+backward": _attend_and_back}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = dict(zip(directions, pool.map(temporary, directions.values()), strict=True))
    for direction, size in found.items():
        yield {
            "suite": "hopper",
            "case": name,
            "direction": direction,
            "T": length,
            "temporary_bytes": size,
            "temporary_bytes_per_token": size / length,
            "list_bytes": 4 * mask.kv_index.size,
        }


def attend_hopper(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """A call under a mask, by the kernels."""
    return dot_product_attention(q, k, v, mask=mask, implementation="hopper")


def _attend_and_back(q: Any, k: Any, v: Any, mask: Any) -> Any:
    out, pull_back = jax.vjp(lambda q, k, v: attend_hopper(q, k, v, mask), q, k, v)
    return out, pull_back(out)


def _rows_of(case: Case, done: list[Row]) -> dict[str, Row]:
    """A case's rows by direction: those that were measured already, or measured now."""
    found = [row for row in done if row["case"] == case.name] or _alone(case)
    return {row["direction"]: row for row in found}


@functools.lru_cache(maxsize=1)
def _alone(case: Case) -> list[Row]:
    return list(measure(case, {}))


@functools.lru_cache(maxsize=4)  # a dense cell stays for the sparse ones that follow it
def compiled(case: Case, backend: str) -> tuple[dict[str, Any], Calls]:
    """What a case gives, and its forward and backward."""
    given = {name: x for name, x in case.arguments(on_device=True).items() if x is not None}
    if not isinstance(given.get("mask"), (BlockMask, jax.Array)):
        rule = given.get("mask") or masks.everything()
        given["mask"] = BlockMask.from_rule(rule, (case.T, case.T), block=case.block)
    inputs = [given[name] for name in ("query", "key", "value")]
    static = {name: given[name] for name in ("scale", "logits_soft_cap") if name in given}
    more = {name: given[name] for name in ("mask", "bias", "sinks") if name in given}

    def attend(q: Any, k: Any, v: Any, more: Any) -> Any:
        return dot_product_attention(q, k, v, implementation=backend, **more, **static)

    return given, compile_directions(attend, inputs, more)


def measure(case: Case, others: dict[str, Peer], backend: str = "hopper") -> Iterator[Row]:
    """One call, forward and backward, checked, timed, and beside its peers in this run."""
    given, calls = compiled(case, backend)
    errors = checked_calls(case, given, calls)
    seconds = time_directions(calls)
    beside = {name: _peer_seconds(peer, case) for name, peer in others.items()}
    B, T, S, N, _, H, Hv = case.sizes
    pairs = visited_pairs(case, given["mask"])
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
            "median_seconds": seconds[direction],
            "teraflops": work / seconds[direction] / 1e12,
            "error": errors["output" if direction == "forward" else "gradients"],
        }
        for name, taken in beside.items():
            if isinstance(taken, str):
                row[f"{name}_missing"] = taken
                continue
            row[f"{name}_teraflops"] = work / taken[direction] / 1e12
            row[f"times_faster_than_{name}"] = taken[direction] / seconds[direction]
        yield row


def _peer_seconds(peer: Peer, case: Case) -> dict[str, float] | str:
    """Its seconds, or why there are none: our own time stands without them."""
    try:
        return peer(case)
    except ImportError as error:
        return str(error)
    except Exception as error:  # whatever a foreign library raises, and WrongResultError
        return f"{type(error).__name__}: {error}"


def visited_pairs(case: Case, mask: Any) -> float:
    """Pairs of tokens in visited blocks; half of all under a plain causal rule."""
    B, T, S, N, *_ = case.sizes
    if case.rule is CAUSAL and case.head_densities is None:
        return B * N * T * S / 2
    if not isinstance(mask, BlockMask):
        return float(B * N * T * S)
    lists = mask.kv_count.shape[0] * mask.kv_count.shape[1]
    return float(mask.kv_count.sum()) / lists * B * N * mask.block[0] * mask.block[1]
