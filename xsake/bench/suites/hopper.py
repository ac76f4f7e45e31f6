"""The suite `hopper`: speed compared with peers, cost of uneven heads and transposed lists."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax

from xsake import masks
from xsake.bench import programs
from xsake.bench.cases import Case, hopper_case
from xsake.bench.measure import (
    CAUSAL,
    attend_hopper_and_gradients,
    measure,
    records_of,
    time_ratio,
)
from xsake.bench.peers import Peer, cudnn, flash_attention_4, flex_attention
from xsake.bench.suites import Part, Record
from xsake.bench.timing import beside, time_queued
from xsake.block_mask import BlockMask

SHAPES = ((4, 4096), (1, 16384))  # (B, T), sixteen heads
SKEWED = (0.05, 0.1, 0.15, 0.3, 0.9)  # densities of the query heads of one kv head
SPARSE_PEERS: dict[str, Peer] = {
    "flex_attention": flex_attention,
    "flash_attention_4": flash_attention_4,
}


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Dense, causal and block-sparse cases, then uneven heads and transposed lists."""
    for H in (128, 64):
        for B, T in SHAPES[:1] if quick else SHAPES:
            dense = dense_case(B, T, H)
            causal = dataclasses.replace(dense, name=f"{B}·16·{T}·{H} causal", rule=CAUSAL)
            group = f"{B}·16·{T}·{H}"
            for case in (dense, causal):
                yield Part(case.name, functools.partial(dense_records, case), group)
            for density in (0.43,) if quick else (0.43, 0.20, 0.10):
                case = hopper_case(B, T, H, density)
                yield Part(case.name, functools.partial(sparse_records, case, dense), group)
    if not quick:
        yield skewed_groups(2, 6144, 64)
        yield uneven_heads(1, 16384, 128)
        yield transposed_lists(1, 16384, 128)


def dense_case(B: int, T: int, H: int) -> Case:
    """Sixteen heads without a mask."""
    return Case(f"{B}·16·{T}·{H} full", B, T, N=16, H=H, dtype="bfloat16", rule=masks.everything())


def skewed_groups(B: int, T: int, H: int) -> Part:
    """Twenty query heads of four kv heads, of very different densities: autotuning never saw it."""
    name = f"{B}·20/4·{T}·{H} heads {SKEWED}"
    case = hopper_case(B, T, H, statistics.mean(SKEWED), SKEWED)
    case = dataclasses.replace(case, name=name, N=20, K=4)
    return Part(name, lambda done: measure(case, SPARSE_PEERS), name)


def dense_records(case: Case, done: list[Record]) -> Iterator[Record]:
    """Measures a full or causal case and its peers."""
    return measure(case, {"cudnn": cudnn, "flash_attention_4": flash_attention_4})


def sparse_records(case: Case, dense: Case, done: list[Record]) -> Iterator[Record]:
    """Measures a block-sparse case and its peers, and its time relative to our own dense time."""
    records_of(dense, done)  # the dense case must have passed its check
    for record in measure(case, SPARSE_PEERS):
        ratio = time_ratio(case, dense, record["direction"])
        yield record | {"over_density_times_dense": ratio / record["density_ratio"]}


def uneven_heads(B: int, T: int, H: int) -> Part:
    """Time per visited block: half of the heads at 0.05 and half at 0.81, against all at 0.43."""
    uneven, even = hopper_case(B, T, H, 0.43, (0.05, 0.81)), hopper_case(B, T, H, 0.43)

    def records(done: list[Record]) -> Iterator[Record]:
        uniform = records_of(even, done)
        for record in measure(uneven, {}):
            direction = record["direction"]
            visits = record["density_ratio"] / uniform[direction]["density_ratio"]
            yield record | {"over_uniform_heads": time_ratio(uneven, even, direction) / visits}

    return Part(uneven.name, records, f"{B}·16·{T}·{H}")


def transposed_lists(B: int, T: int, H: int) -> Part:
    """Time to transpose the block lists for the backward; a new mask must not recompile."""
    case = hopper_case(B, T, H, 0.43)
    name = f"{case.name}, transposed lists"

    def records(done: list[Record]) -> Iterator[Record]:
        # the kernels need a newer JAX than the package
        from xsake.backends.hopper.transpose import transpose_lists

        given = case.arguments(on_device=True)
        arrays = tuple(given[name] for name in ("query", "key", "value"))
        first, second = given["mask"], hopper_case(B, T, H, 0.42).arguments()["mask"]
        second = BlockMask.from_dense(
            second.blocks() > 0, shape=(T, T), capacity=first.kv_index.shape[-1]
        )
        transpose = jax.jit(lambda mask: transpose_lists(mask.lists, mask.grid.counts[1]))
        seconds = time_queued(transpose, first).median_seconds
        gradients = jax.jit(attend_hopper_and_gradients)
        with beside():
            jax.block_until_ready(gradients(*arrays, first))
            with jax.transfer_guard("disallow"):  # a host synchronisation would need a transfer
                jax.block_until_ready(gradients(*arrays, second))
        backward = records_of(case, done)["backward"]
        yield {
            "suite": "hopper",
            "case": name,
            "T": T,
            "median_seconds": seconds,
            "share_of_backward": seconds / backward["median_seconds"],
            "compilations_for_two_masks": gradients._cache_size(),  # type: ignore[attr-defined]
        }

    return Part(name, records, f"{B}·16·{T}·{H}")


if __name__ == "__main__":
    programs.stop_for_suite("hopper")
