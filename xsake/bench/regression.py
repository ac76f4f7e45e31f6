"""`xsake bench --check`: ratios that must not grow, measured on this machine in some seconds.

    time of sparse attention ÷ (density × time of dense attention)    forward, with backward
    time of certified sparse attention ÷ time of dense attention
    temporary memory ÷ that of jax.nn                                 by the compiler

A ratio compares two calls of one run, so that it hardly depends on the machine. The limits allow
for the noise of a busy machine; a ratio above its limit is measured twice more, and the smallest
counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xsake import masks
from xsake.bench.cases import cpu_case
from xsake.bench.suites import cpu
from xsake.bench.timing import time_calls
from xsake.block_mask import BlockMask
from xsake.hads import certified_attention

T, DENSITY, REPEATS = 1024, 0.25, 5
LONG = 16384  # tokens of the comparison of memory, which runs nothing
ATTEMPTS = 3

FORWARD = "forward: sparse ÷ (density × dense)"
BACKWARD = "forward and backward: sparse ÷ (density × dense)"
CERTIFIED = "certified sparse ÷ dense"
MEMORY = "temporary memory ÷ jax.nn's"
# At 4,096 tokens, benchmarks/results/cpu-2026-11-16.json has 1.04 and 1.06 for the first two and
# 0.003 at most for the last; short texts and busy machines have more.
LIMITS = {FORWARD: 1.6, BACKWARD: 1.6, CERTIFIED: 0.8, MEMORY: 0.05}


class Ratio(NamedTuple):
    """A measured ratio and the largest that is allowed."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the ratio is within its limit."""
        return self.value <= self.limit


def check() -> Iterator[Ratio]:
    """Measures all ratios, one after another."""
    for measure in (_memory, _times):
        found = measure()
        for _ in range(ATTEMPTS - 1):
            if all(value <= LIMITS[name] for name, value in found.items()):
                break
            again = measure()
            found = {name: min(value, again[name]) for name, value in found.items()}
        yield from (Ratio(name, value, LIMITS[name]) for name, value in found.items())


def _memory() -> dict[str, float]:
    (record,) = cpu.memory(LONG)
    return {MEMORY: record["share_of_jax_nn"]}


def _times() -> dict[str, float]:
    given = cpu_case(T, DENSITY).arguments()
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "mask"))
    dense = BlockMask.from_rule(masks.causal(), (T, T))
    d_out = jnp.cos(jnp.arange(q.size, dtype=q.dtype)).reshape(q.shape)
    certified = functools.partial(certified_attention, bound=False, implementation="xla")
    forward, backward = jax.jit(cpu.attend), jax.jit(cpu.attend_and_gradients)
    times = time_calls(
        {
            "dense": (forward, (q, k, v, dense)),
            "sparse": (forward, (q, k, v, mask)),
            "dense, backward": (backward, (q, k, v, dense, d_out)),
            "sparse, backward": (backward, (q, k, v, mask, d_out)),
            "certified": (jax.jit(certified), (q, k, v, mask, jax.random.key(0))),
        },
        REPEATS,
    )
    density = float(mask.density())
    return {
        FORWARD: times["sparse"].over(times["dense"]) / density,
        BACKWARD: times["sparse, backward"].over(times["dense, backward"]) / density,
        CERTIFIED: times["certified"].over(times["dense"]),
    }
