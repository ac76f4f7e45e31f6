"""The suite `hopper-statistics`: what entropy and block mass cost as by-products of the forward.

    plain       dot_product_attention
    blocks      observed_attention: the same output, mass and entropy of blocks
    observed    the same, and the entropy over keys

All are whole calls, timed in turns in one process; the mask is made before. Entropies and masses
of two heads are compared with plain JAX in float32 before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.attention import dot_product_attention, observed_attention
from xsake.backends import Call
from xsake.backends.options import Options
from xsake.backends.statistics import Statistics, measured
from xsake.bench import programs
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import ERROR_LIMIT, WrongResultError
from xsake.bench.measure import CAUSAL
from xsake.bench.suites import Part, Record
from xsake.bench.timing import Calls, beside, time_interleaved
from xsake.block_mask import BlockMask

DENSITY = 0.43
CHECKED = (0, 5)  # heads whose statistics are compared
LIMIT = 1e-3  # of entropies in nats and of masses
ROUNDS = 3


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Causal and block-sparse calls at two lengths and two head sizes."""
    for B, T in ((1, 1024),) if quick else ((1, 16384), (4, 4096)):
        for H in (128, 64):
            shape = f"{B}·16·{T}·{H}"
            causal = Case(f"{shape} causal", B, T, N=16, H=H, dtype="bfloat16", rule=CAUSAL)
            for case in (causal, hopper_case(B, T, H, DENSITY)):
                yield Part(case.name, functools.partial(records, case))


def records(case: Case, done: list[Record]) -> Iterator[Record]:
    """One record: seconds of the calls, ratios to the plain one, and errors of the statistics."""
    given = case.arguments(on_device=True)
    mask = given["mask"]
    if not isinstance(mask, BlockMask):
        mask = BlockMask.from_rule(mask, (case.T, case.T))
    arrays = given["query"], given["key"], given["value"], mask
    calls: Calls = {}
    sizes, errors = {}, {}
    with beside():
        for name in ("plain", "blocks", "observed"):
            run = jax.jit(functools.partial(_attend, name)).lower(*arrays).compile()
            calls[name] = run, arrays
            analysis: Any = run.memory_analysis()
            sizes[name] = int(analysis.temp_size_in_bytes)
            if name == "plain":
                plain = run(*arrays)
                continue
            out, found = run(*arrays)
            errors = errors_of(found, *arrays)
            if not all(x <= LIMIT for x in errors.values()):
                raise WrongResultError(f"{case.name}: errors {errors}, the limit is {LIMIT}")
            rounding = ERROR_LIMIT[case.dtype] * float(jnp.abs(plain).max())
            if not _largest(out, plain) <= rounding:
                raise WrongResultError(f"{case.name}: the output of {name} is not the plain one")
    times = time_interleaved(calls, ROUNDS)
    yield {
        "suite": "hopper-statistics",
        "case": case.name,
        "B": case.B,
        "T": case.T,
        "H": case.H,
        "density_ratio": float(mask.density()),
        **{f"{name}_seconds": time.median_seconds for name, time in times.items()},
        "median_seconds": times["observed"].median_seconds,
        "blocks_over_plain": times["blocks"].over(times["plain"]),
        "observed_over_plain": times["observed"].over(times["plain"]),
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "errors": errors,
    }


def _attend(name: str, q: Array, k: Array, v: Array, mask: BlockMask) -> Any:
    if name == "plain":
        return dot_product_attention(q, k, v, mask=mask, implementation="hopper")
    what: Any = "tokens" if name == "observed" else "blocks"
    return observed_attention(q, k, v, mask=mask, what=what, implementation="hopper")


def errors_of(found: Statistics, q: Array, k: Array, v: Array, mask: BlockMask) -> dict[str, float]:
    """The largest error of each statistic, over the checked heads of the first batch row."""
    worst = {name: 0.0 for name, x in found._asdict().items() if x is not None}
    heads = mask.kv_count.shape[1]
    for n in CHECKED:
        own = mask[0, n if heads > 1 else 0]
        one = [x[:1, :, n : n + 1] for x in (q, k, v)]
        want = _expected(*one, own)
        for name, error in worst.items():
            got, exact = getattr(found, name)[0, n], getattr(want, name)[0, 0]
            worst[name] = float(np.maximum(error, _largest(got, exact)))  # Python's max drops NaN
    return worst


def _largest(got: Array, exact: Array) -> float:
    """The largest difference; NaN if something is not finite, which XLA's max may drop."""
    difference = got.astype(jnp.float32) - exact.astype(jnp.float32)
    return float(jnp.where(jnp.isfinite(difference).all(), jnp.abs(difference).max(), jnp.nan))


@jax.jit
def _expected(q: Array, k: Array, v: Array, mask: BlockMask) -> Statistics:
    call = Call(q, k, v, None, mask, q.shape[-1] ** -0.5, None, Options())
    return measured(call, None, "tokens")


if __name__ == "__main__":
    programs.stop_for_suite("hopper-statistics")
