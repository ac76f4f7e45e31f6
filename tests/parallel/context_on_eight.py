"""context_attention on 8 CPU devices: `python -m tests.parallel.context_on_eight [TEXT]`.

A process of its own, because the number of devices is settled when JAX starts. Prints one line for
each claim, and ends with 1 if any does not hold; TEXT runs only those with it in their name.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import oracle
from tests.specs import to_rule
from xsake import BlockMask
from xsake.masks.rule import partition_spec
from xsake.parallel import context_attention, token_order

B, T, N, K, H, BLOCK = 2, 128, 4, 2, 8, 16
LIMIT = 1e-5

RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 4, (B, T)), axis=1).astype(np.int32)
IDS[:, -5:] = -1
BLOCKS = (RNG.random((B, N, T // BLOCK, T // BLOCK)) < 0.4) & np.tri(T // BLOCK, dtype=bool)
TOKENS = RNG.random((B, N, T, T)) < 0.3
POSITIONS = RNG.permuted(np.tile(np.arange(T, dtype=np.int32), (B, 1)), axis=1)
SINKS = np.float32([0.3, -0.5, 1.0, -np.inf])

CAUSAL = ("causal",)
WINDOW = ("sliding_window", 20, 0)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on one mesh; a spec is what tests/oracle.py evaluates."""

    name: str
    mesh: dict[str, int]
    spec: Any
    given: str = "rule"  # or "blocks" (a BlockMask), "local" (one of each device's queries)
    with_ids: bool = False
    with_positions: bool = False
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


C8, C4T2, D2C4, D2C2T2, C4 = (
    {"context": 8},
    {"context": 4, "tensor": 2},
    {"data": 2, "context": 4},
    {"data": 2, "context": 2, "tensor": 2},
    {"context": 4},
)
CASES = [
    Case("causal", C8, CAUSAL),
    Case("causal, zigzag, sinks", C4T2, CAUSAL, arguments={"layout": "zigzag", "sinks": SINKS}),
    Case("window, ring", D2C4, WINDOW, arguments={"method": "ring"}),
    Case("documents by ids, soft cap", D2C2T2, CAUSAL, with_ids=True,
         arguments={"logits_soft_cap": 3.0}),
    Case("documents by rule, zigzag", C4, ("and", CAUSAL, ("documents", IDS)),
         arguments={"layout": "zigzag"}),
    Case("blocks", D2C4, ("and", CAUSAL, ("blocks", BLOCKS, (BLOCK, BLOCK))), "blocks"),
    Case("blocks, zigzag, ids", C4T2, ("and", CAUSAL, ("blocks", BLOCKS, (BLOCK, BLOCK))),
         "blocks", with_ids=True, arguments={"layout": "zigzag"}),
    Case("positions", D2C4, CAUSAL, with_positions=True),
    Case("a token array, reference", C4, ("array", TOKENS),
         arguments={"implementation": "reference"}),
    Case("window, halo", D2C4, WINDOW, arguments={"method": "halo"}),
    Case("window on both sides, halo of two devices, ids", C8, ("sliding_window", 20, 18),
         with_ids=True, arguments={"method": "halo"}),
    Case("first tokens and a window, gather", C4T2, ("or", ("first", 5), WINDOW),
         arguments={"method": "gather"}),
    Case("blocks, gather", D2C4, ("and", CAUSAL, ("blocks", BLOCKS, (BLOCK, BLOCK))), "blocks",
         arguments={"method": "gather", "capacity": 2}),
    Case("blocks, balanced", {"context": 2, "tensor": 2, "data": 2},
         ("and", CAUSAL, ("blocks", BLOCKS, (BLOCK, BLOCK))), "blocks",
         arguments={"balance": True}),
    Case("documents, gather, balanced", {"data": 2, "context": 2},
         ("and", CAUSAL, ("documents", IDS)), with_ids=True,
         arguments={"method": "gather", "balance": True}),
    Case("lengths, zigzag", C4, ("lengths", np.int32([50, 100]), np.int32([120, 40])),
         arguments={"layout": "zigzag"}),
]  # fmt: skip


def inputs() -> dict[str, np.ndarray]:
    x = oracle.random_inputs(np.random.default_rng(1), B, T, T, N, K, H)
    return {name: np.float32(part) for name, part in x.items()}


def truth(case: Case, x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
    """The inputs, without a gradient of logsumexp -inf, and (out, logsumexp, dq, dk, dv)."""
    where = {"q_positions": POSITIONS, "kv_positions": POSITIONS} if case.with_positions else {}
    see = oracle.allowed(case.spec, B, N, T, T, **where)
    if case.with_ids:
        see = see & oracle.allowed(("documents", IDS), B, N, T, T)
    x = {**x, "d_lse": np.where(see.any(-1).swapaxes(1, 2), x["d_lse"], 0)}
    given = {
        "allowed": see,
        "soft_cap": case.arguments.get("logits_soft_cap"),
        "sinks": case.arguments.get("sinks"),
    }
    out, lse = oracle.attention(x["q"], x["k"], x["v"], **given)
    grads = oracle.attention_grads(**x, **given)
    return x, (out, lse, grads["dq"], grads["dk"], grads["dv"])


def made_mask(case: Case) -> Any:
    if case.given == "rule":
        return to_rule(case.spec)
    blocks = jnp.asarray(BLOCKS)
    return BlockMask.from_dense(blocks, to_rule(CAUSAL), block=BLOCK)


def run(case: Case) -> float:
    """The largest relative error over outputs, logsumexp and gradients."""
    x, expected = truth(case, inputs())
    layout = case.arguments.get("layout", "contiguous")
    order = token_order(T, case.mesh["context"], layout)
    mesh = jax.make_mesh(
        tuple(case.mesh.values()), tuple(case.mesh), axis_types=(AxisType.Auto,) * len(case.mesh)
    )
    data, tensor = (name if name in case.mesh else None for name in ("data", "tensor"))
    tokens, per_token = P(data, "context", tensor, None), P(data, "context")
    mask = made_mask(case)
    if isinstance(mask, BlockMask):
        spec = mask.partition_spec(batch=data, heads=tensor)
    else:
        spec = partition_spec(mask, data, tensor)
    sinks = case.arguments.get("sinks")
    arguments = {name: x for name, x in case.arguments.items() if name != "sinks"}

    def attend(q, k, v, mask, ids, positions, sinks):
        return context_attention(
            q, k, v, mask, q_segment_ids=ids, q_positions=positions, kv_positions=positions,
            sinks=sinks, return_residual=True, **arguments,
        )  # fmt: skip

    ids = jnp.asarray(IDS[:, order]) if case.with_ids else None
    positions = jnp.asarray(POSITIONS[:, order]) if case.with_positions else None
    in_specs = (
        tokens, tokens, tokens, spec,
        None if ids is None else per_token,
        None if positions is None else per_token,
        None if sinks is None else P(tensor),
    )  # fmt: skip
    out_specs = (tokens, P(data, "context", tensor))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    @jax.jit
    def forward_and_backward(q, k, v, d_out, d_lse, *rest):
        both, pull_back = jax.vjp(lambda q, k, v: sharded(q, k, v, *rest), q, k, v)
        return (*both, *pull_back((d_out, d_lse)))

    laid_out = (jnp.asarray(x[name][:, order]) for name in ("q", "k", "v", "d_out", "d_lse"))
    ours = forward_and_backward(*laid_out, mask, ids, positions, sinks)
    return max(
        oracle.relative_error(np.asarray(a)[:, np.argsort(order)], b)
        for a, b in zip(ours, expected, strict=True)
    )


def main(only: str = "") -> int:
    assert len(jax.devices()) == 8
    wrong = 0
    claims = {case.name: case for case in CASES}
    for name, case in claims.items():
        if only not in name:
            continue
        error = run(case)
        wrong += not error <= LIMIT
        mesh = " × ".join(f"{axis} {size}" for axis, size in case.mesh.items())
        verdict = "ok" if error <= LIMIT else f"WRONG, {error:.1e}"
        print(f"{name}, {mesh}: {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
