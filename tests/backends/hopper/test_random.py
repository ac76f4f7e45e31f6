"""Random calls of every kind that the Hopper kernels take, against the float64 oracle, on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import xsake
from tests import draws
from tests.conditions import needs_gpu
from tests.draws import Signature
from tests.fuzz import draw_contents, draw_signature
from tests.specs import fill

SIGNATURES, CONTENTS = 60, 5  # each signature is compiled once
# As in the other tests of these kernels: 16-bit results; the logsumexp is summed in float32.
LIMITS = {"out": 1e-2, "lse": 1e-4}
GRADIENT_LIMIT = 1e-2


def drawn(rng: np.random.Generator) -> Signature:
    """A random call of several blocks that the kernels take."""
    while True:
        some = draw_signature(rng)
        B, T, S, N, K, _, _ = some.sizes
        H, Hv = (int(x) for x in rng.choice([40, 64, 128, 192], 2))
        signature = dataclasses.replace(
            some,
            sizes=(B, 3 * T, 3 * S, N, K, H, Hv),
            block=tuple(int(x) for x in rng.choice([64, 128], 2)),
            dtype=str(rng.choice(["bfloat16", "float16"])),
        )
        if taken(signature):
            return signature


def taken(signature: Signature) -> bool:
    floats, arrays = draws.inputs(signature, draws.Contents())
    explanation = xsake.explain(
        *(floats[name] for name in ("q", "k", "v")),
        floats.get("bias"),
        draws.mask_of(signature, arrays),
        implementation="hopper",
        **{name: fill(value, arrays) for name, value in signature.keywords},
    )
    return explanation.chosen == "hopper"


@pytest.mark.parametrize("seed", range(SIGNATURES))
@pytest.mark.gpu
@needs_gpu
def test_random_calls_agree_with_the_oracle_on_a_gpu(seed):
    """Rules of every form, ids and positions in and out of order, lists, bias, sinks, soft caps."""
    rng = np.random.default_rng([28, seed])
    signature = drawn(rng)
    jax.clear_caches()
    for _ in range(CONTENTS):
        contents = draw_contents(rng)
        found = draws.errors(signature, contents, ["hopper"])["hopper"]
        wrong = {x: e for x, e in found.items() if not e <= LIMITS.get(x, GRADIENT_LIMIT)}
        assert not wrong, f"{wrong}: {draws.describe(signature)}, {contents}"
