"""The Hopper forward with three compute warpgroups, interpreted: `python -m tests.tall_rows`.

A process of its own: the interpreter runs every warpgroup in a thread of XLA, and there are as many
of these as devices. Prints one line for each case, and ends with 1 if one disagrees or races.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import jax.numpy as jnp
import numpy as np

from tests import oracle
from xsake import BlockMask, _jax, masks
from xsake.backends import kernel_rule
from xsake.backends.hopper.limits import TALL
from xsake.backends.options import ForwardTiling

LENGTH, HEADS, SCALE = 330, 2, 0.125
DROPPED = 256  # rows before it drop the kv block that begins here; their work tile visits it
CASES = {
    "products overlap": ({}, False, None),
    "one after the other": ({"overlap": False}, False, None),
    "dropped keys are NaN": ({}, True, None),
    "statistics": ({"lazy_rescale": 8.0}, False, "blocks"),
}


def agrees(tiling, poisoned, statistics) -> bool:
    """Whether the results are those of the oracle, and no warpgroup races another.

    The first warpgroup of a work tile leaves out steps whose logarithms another work tile wrote.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import forward_kernel

    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, LENGTH, n, 64)), jnp.bfloat16) for n in (HEADS, 1, 1)
    )
    mask = BlockMask.from_rule(masks.causal(), (LENGTH, LENGTH), block=(TALL, 128))
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    compared = LENGTH
    if poisoned:
        k, v = (x.at[:, DROPPED:].set(jnp.nan) for x in (k, v))
        compared = DROPPED
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        out, lse, *found = forward_kernel.forward(
            q,
            k,
            v,
            mask.lists,
            block=mask.block,
            rule=kernel_rule.by_query(mask),
            scale=SCALE,
            tiling=ForwardTiling(**tiling),
            statistics=statistics,
            mass_block=128,  # not the rows of a work tile
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        out, lse = np.asarray(out, np.float64), np.asarray(lse)
    allowed = oracle.allowed(("causal",), 1, HEADS, LENGTH, LENGTH)
    want, want_lse = oracle.attention(*exact, allowed=allowed, scale=SCALE)
    out, want, lse, want_lse = (
        x[:, :compared] for x in (out, want, np.moveaxis(lse, 1, 2), want_lse)
    )
    _, *expected = oracle.statistics(*exact[:2], allowed=allowed, block=(128, 128), scale=SCALE)
    pairs = zip(map(np.asarray, found), expected[::-1], strict=False)
    if not all(np.abs(got - exact).max() <= 1e-3 for got, exact in pairs):  # not if NaN
        return False
    return (
        oracle.relative_error(out, want) <= 1e-2
        and oracle.relative_error(lse, want_lse) <= 1e-4
        and "RACE" not in printed.getvalue()
    )


def main() -> int:
    _jax.multiprocessors = lambda: 1
    found = {name: agrees(*case) for name, case in CASES.items()}
    for name, fine in found.items():
        print(f"{name}: {'ok' if fine else 'WRONG'}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
