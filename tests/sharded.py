"""Attention under shard_map over batch and heads on 8 devices: `python -m tests.sharded [--all]`.

A process of its own, because the number of devices is settled when JAX starts. Prints one line for
each case, and ends with 1 if any shard disagrees with the oracle. By default one case has all rules
with arrays at once; --all runs them one by one too.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xsake
from tests import oracle
from tests.specs import later_heads_look_further, rows_differ, shifted_by_table, to_rule
from xsake import BlockMask

B, T, S, N, K, H = 4, 40, 56, 4, 2, 8  # on 4 x 2 devices: one row, two query heads, one kv head
BLOCK = (16, 8)


def specs(with_single_rules=False):
    rng = np.random.default_rng(0)
    q_ids, kv_ids = (rng.integers(-1, 2, (B, n)).astype(np.int32) for n in (T, S))
    table = rng.integers(-9, 30, (B, N)).astype(np.int32)
    positions = rng.permuted(np.tile(np.arange(T), (B, 1)), axis=1).astype(np.int32)
    b_and_n = ("and", ("function", rows_differ), ("function", later_heads_look_further))
    b_and_n = ("and", b_and_n, ("random", 0.5, 7, 8))
    numbers = np.arange(B, dtype=np.int32), np.arange(N, dtype=np.int32)
    alone = {
        "causal, without data": ("causal",),
        "documents": ("documents", q_ids, kv_ids),
        "a table of b and n": ("function", shifted_by_table, (table,), "positions"),
        "an array": ("array", rng.random((B, N, T, S)) < 0.5),
        "positions": ("positions", ("causal",), positions, None),
    }
    causal, documents, by_table, array, at_positions = alone.values()
    every = ("or", ("and", documents, array), ("and", by_table, at_positions))
    return (alone if with_single_rules else {}) | {
        "documents, a table, an array and positions": ("and", causal, every),
        "numbered functions of b and n, random": ("numbered", b_and_n, *numbers),
        "functions of b and n, random, without masks.numbered": b_and_n,
    }


def run_case(spec, backend, mesh) -> float:
    """The largest error ÷ tolerance over outputs, logsumexp and gradients."""
    x = oracle.random_inputs(np.random.default_rng(1), B, T, S, N, K, H)
    see = oracle.allowed(spec, B, N, T, S)
    x["d_lse"] = np.where(see.any(-1).swapaxes(1, 2), x["d_lse"], 0)
    x = {name: np.float32(part) for name, part in x.items()}
    mask = BlockMask.from_rule(to_rule(spec), (T, S), batch=B, heads=N, block=BLOCK)
    tokens, rows = P("data", None, "model", None), P("data", None, "model")

    def attend(q, k, v, mask):
        return xsake.dot_product_attention(
            q, k, v, mask=mask, implementation=backend, return_residual=True
        )

    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, mask.partition_spec(batch="data", heads="model")),
        out_specs=(tokens, rows),
    )

    @jax.jit
    def forward_and_backward(q, k, v, d_out, d_lse, mask):
        both, pull_back = jax.vjp(lambda q, k, v: sharded(q, k, v, mask), q, k, v)
        return (*both, *pull_back((d_out, d_lse)))

    ours = forward_and_backward(*map(jnp.asarray, x.values()), mask)
    grads = oracle.attention_grads(**x, allowed=see)
    out, lse = oracle.attention(x["q"], x["k"], x["v"], allowed=see)
    theirs = (out, lse, grads["dq"], grads["dk"], grads["dv"])
    limits = (2e-6, 2e-6, 1e-5, 1e-5, 1e-5)
    return max(
        oracle.relative_error(a, b) / c for a, b, c in zip(ours, theirs, limits, strict=True)
    )


def main(flag: str = "") -> int:
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    worst = 0.0
    for name, spec in specs(with_single_rules=flag == "--all").items():
        # Backends share the mask's code and compiling is slow: one case covers the second backend.
        for backend in ("xla", "reference") if name.startswith("numbered") else ("xla",):
            try:
                error = run_case(spec, backend, mesh)
            except Exception as problem:  # go on with the other cases
                print(f"{type(problem).__name__}: {problem}")
                error = float("inf")
            worst = max(worst, error)
            verdict = "ok" if error <= 1 else f"WRONG: {error:.3g} times the limit"
            print(f"{name}, {backend}: {verdict}", flush=True)
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
