"""The suite `nsa`: Native Sparse Attention: time, memory, and the error against `reference`."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import nsa
from xsake.bench import programs
from xsake.bench.suites import Part, Record
from xsake.bench.timing import temporary_bytes, time_calls

SIZES = {"B": 1, "N": 8, "K": 8, "H": 64}
BLOCK, SELECTED, WINDOW = 64, 16, 512
CHECKED = 512  # tokens at which results are compared with `reference`, which needs T × S

Attend = Callable[..., Array]


def inputs(T: int) -> dict[str, Array]:
    """q, k, v, three gates, and blocks of each query chosen at random among those it can see."""
    B, N, K, H = (SIZES[name] for name in ("B", "N", "K", "H"))
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H), "gates": (3, B, T, N)}
    arrays = {name: np.float32(rng.standard_normal(shape)) for name, shape in shapes.items()}
    own = np.arange(T)[None, :, None, None] // BLOCK
    scores = rng.random((B, T, K, -(-T // BLOCK)))
    scores = np.where(np.arange(scores.shape[-1]) <= own, scores, -1)
    blocks = np.argsort(-scores, axis=-1)[..., :SELECTED]
    blocks = np.where(np.take_along_axis(scores, blocks, axis=-1) < 0, -1, blocks)
    return {name: jnp.asarray(x) for name, x in arrays.items()} | {"blocks": jnp.asarray(blocks)}


def selected(q: Array, k: Array, v: Array, blocks: Array, implementation: str | None) -> Array:
    """The selected branch with given blocks."""
    return nsa.apply_native_sparse_attention(
        q, k, v, blocks, block_size=BLOCK, implementation=implementation
    )


def all_branches(q: Array, k: Array, v: Array, gates: Array, implementation: str | None) -> Array:
    """The three branches with their gates; blocks are selected from the input."""
    return nsa.native_sparse_attention(
        q,
        k,
        v,
        g_cmp=gates[0],
        g_slc=gates[1],
        g_swa=gates[2],
        block_size=BLOCK,
        num_selected=SELECTED,
        window_size=WINDOW,
        implementation=implementation,
    )


CASES: dict[str, tuple[Attend, str]] = {
    "selected": (selected, "blocks"),
    "all branches": (all_branches, "gates"),
}


def measure(name: str, T: int, repeats: int) -> Iterator[Record]:
    """Forward, and forward with backward."""
    attend, _ = CASES[name]
    q, k, v, extra = _arguments(name, T)

    def forward(q: Array, k: Array, v: Array, extra: Array, how: str | None = None) -> Array:
        return attend(q, k, v, extra, how)

    def both(q: Array, k: Array, v: Array, extra: Array, how: str | None = None) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, extra, how), q, k, v)
        return out, pull_back(out)

    for direction, fn in (("forward", forward), ("forward+backward", both)):
        compiled = jax.jit(fn)
        timing = time_calls({name: (compiled, (q, k, v, extra))}, repeats)[name]
        yield {
            "suite": "nsa",
            "case": _case(name, T),
            "direction": direction,
            "T": T,
            **SIZES,
            "block_size": BLOCK,
            "num_selected": SELECTED,
            "median_seconds": timing.median_seconds,
            "least_seconds": timing.least_seconds,
            "repeats": timing.repeats,
            "temporary_bytes": temporary_bytes(fn, q, k, v, extra),
            "peak_resident_bytes": _peak_resident_bytes(),
            "load_average": os.getloadavg()[0],
            "error": _error(fn, name, min(T, CHECKED)),
        }


def _case(name: str, T: int) -> str:
    return f"{name} T={T}"


def _arguments(name: str, T: int) -> tuple[Array, ...]:
    given = inputs(T)
    return tuple(given[x] for x in ("q", "k", "v", CASES[name][1]))


def _error(fn: Callable[..., Any], name: str, T: int) -> float:
    """The largest error of any array, relative to the largest value of that array."""
    compiled, given = jax.jit(fn, static_argnames="how"), _arguments(name, T)
    found, expected = compiled(*given), compiled(*given, how="reference")
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(abs(a - e).max() / abs(e).max()) for a, e in pairs)


def _peak_resident_bytes() -> int:
    """Of this process so far, compiling included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """One part for each case and length."""
    for T in (256,) if quick else (2048,):
        for name in CASES:
            yield Part(_case(name, T), _measured(name, T, 2 if quick else 9))


def _measured(name: str, T: int, repeats: int) -> Callable[[list[Record]], Iterator[Record]]:
    return lambda done: measure(name, T, repeats)


if __name__ == "__main__":
    programs.stop_for_suite("nsa")
