"""context_attention on 8 CPU devices: `python -m tests.parallel.context_on_eight [TEXT | --all]`.

A process of its own, because the number of devices is settled when JAX starts. Prints one line for
each claim, and ends with 1 if any does not hold. By default one case of each kind runs; TEXT runs
those with it in their name, --all runs all.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import oracle
from tests.parallel.claims import LIMIT, Claim, name_of, named, run_claims
from tests.specs import to_rule
from xsake import BlockMask
from xsake.hads import row_blocks
from xsake.hads.plan import Plan
from xsake.hads.terms import Terms
from xsake.masks.rule import partition_spec
from xsake.parallel import context_attention, context_mask, cost, explain_context, token_order
from xsake.parallel.collectives import collectives
from xsake.parallel.context import ring

B, T, N, K, H, BLOCK = 2, 128, 4, 2, 8, 16

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


ONE_OF_EACH = {
    "causal, zigzag, sinks",
    "window on both sides, halo of two devices, ids",
    "blocks, balanced",
}  # gathered blocks: a_plan_selects_as_on_one_device


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
    mesh = on_mesh(case.mesh)
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
    split = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    @jax.jit
    def forward_and_backward(q, k, v, d_out, d_lse, *rest):
        both, pull_back = jax.vjp(lambda q, k, v: split(q, k, v, *rest), q, k, v)
        return (*both, *pull_back((d_out, d_lse)))

    laid_out = (jnp.asarray(x[name][:, order]) for name in ("q", "k", "v", "d_out", "d_lse"))
    ours = forward_and_backward(*laid_out, mask, ids, positions, sinks)
    return max(
        oracle.relative_error(np.asarray(a)[:, np.argsort(order)], b)
        for a, b in zip(ours, expected, strict=True)
    )


# ------------------------------------------------------------------------- claims beyond the cases


def on_mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def sharded(mesh: Any, mask_spec: Any, **arguments: Any) -> Any:
    """context_attention(q, k, v, mask) over a mesh with the axis `context` alone."""
    tokens = P(None, "context")
    return jax.shard_map(
        lambda q, k, v, mask: context_attention(q, k, v, mask, **arguments),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, mask_spec),
        out_specs=tokens,
    )


def a_plan_selects_as_on_one_device() -> bool:
    """By context_mask inside shard_map, sharded over batch and sequence; every head has lists."""
    n = T // BLOCK
    counts = np.minimum(RNG.integers(2, 6, (1, N, n)), np.arange(1, n + 1)).astype(np.int32)
    counts = np.maximum(counts, row_blocks.floors(n))
    terms = Terms(density=0.5, policy="uniform", selector="mean_query", block=BLOCK, length=T)
    plan = Plan(jnp.asarray(counts), None, terms)
    x = {name: jnp.asarray(part) for name, part in inputs().items()}
    see = np.asarray(jax.jit(lambda q, k: plan.mask(0, q, k).to_dense())(x["q"], x["k"]))
    expected = oracle.attention(x["q"], x["k"], x["v"], allowed=see)
    grads = oracle.attention_grads(**x, allowed=see)
    expected += (grads["dq"], grads["dk"], grads["dv"])
    tokens = P("data", "context")

    def attend(q, k, v):
        mask = context_mask(plan, 0, q, k)
        return context_attention(q, k, v, mask, method="gather", capacity=2, return_residual=True)

    split = jax.shard_map(
        attend, mesh=on_mesh(D2C4), in_specs=(tokens,) * 3, out_specs=(tokens, tokens)
    )

    @jax.jit
    def both(q, k, v, d_out, d_lse):
        results, pull_back = jax.vjp(split, q, k, v)
        return (*results, *pull_back((d_out, d_lse)))

    ours = both(*(x[name] for name in ("q", "k", "v", "d_out", "d_lse")))
    return max(map(oracle.relative_error, ours, expected)) <= LIMIT


def random_mask(seed: int) -> BlockMask:
    n = T // BLOCK
    blocks = np.random.default_rng(seed).random((1, N, n, n)) < 0.5
    return BlockMask.from_dense(blocks | np.eye(n, dtype=bool), to_rule(CAUSAL), block=BLOCK)


def a_new_mask_compiles_nothing_and_stays_on_the_devices() -> bool:
    """Rebalanced row blocks and gathered blocks; gradients too; under a transfer guard."""
    mesh = on_mesh({"context": 2})
    here = NamedSharding(mesh, P())
    q, k, v = (jax.device_put(inputs()[name], NamedSharding(mesh, P(None, "context")))
               for name in "qkv")  # fmt: skip
    masks = [jax.device_put(random_mask(seed), here) for seed in range(3)]
    spec = jax.tree.map(lambda _: P(), masks[0])
    attend = sharded(mesh, spec, method="gather", balance=True)

    def loss(q, k, v, mask):
        return (attend(q, k, v, mask) ** 2).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    jax.block_until_ready(step(q, k, v, masks[0]))
    with jax.transfer_guard("disallow"):
        results = [jax.block_until_ready(step(q, k, v, mask)) for mask in masks]
    # the masks differ, so must the gradients
    return step._cache_size() == 1 and not np.array_equal(results[1][1], results[2][1])


def compiled(devices: int, mask: Any, gradient: bool = False, **arguments: Any) -> Any:
    mesh = on_mesh({"context": devices})
    q = jax.ShapeDtypeStruct((1, 2048, N, H), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 2048, K, H), jnp.float32)
    attend = sharded(mesh, jax.tree.map(lambda _: P(), mask), **arguments)
    run = attend
    if gradient:

        def run(q, k, v, mask):
            out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, mask), q, k, v)
            return pull_back(out)

    said = explain_context(q, k, k, mask, devices=devices, **arguments)
    return jax.jit(run).lower(q, k, k, mask).compile(), said


def a_window_sends_its_neighbours_blocks_only() -> bool:
    """Counted in the compiled modules: collectives, and bytes as explain_context says them."""
    window, causal = to_rule(("sliding_window", 100, 0)), to_rule(CAUSAL)
    found = {}
    for name, rule, method in (
        ("plain ring", causal, "ring"),
        ("window ring", window, "ring"),
        ("window halo", window, "halo"),
        ("window gather", window, "gather"),
    ):
        module, said = compiled(8, rule, method=method)
        sent = collectives(module)
        kind = "all-to-all" if method == "gather" else "collective-permute"
        found[name] = sent[kind]
        received = sent[kind].bytes
        if method == "gather":  # its own part, and the requests, are in the result too
            capacity = said.estimates["gather"].capacity
            request = 8 * capacity * 4
            received = (received - request) * 7 // 8
        if received != said.estimates[method].received_bytes:
            return False
    all_gather = said.all_gather_bytes
    ring, halo = found["window ring"], found["window halo"]
    print(f"  bytes: all-gather {all_gather}, { ({n: c.bytes for n, c in found.items()}) }")
    return (
        found["plain ring"].count == 2 * 7
        and ring.count == halo.count == 2
        and found["plain ring"].bytes == all_gather
        and 2 * halo.bytes == ring.bytes == all_gather // 7
    )


def the_cost_model_counts_what_modules_compute_and_send() -> bool:
    """Forward and backward: bytes of ring, halo and gather; operations of the dense reference."""
    shape = cost.Shape(2048, heads=N, kv_heads=K, head_size=H, window=101, itemsize=4)
    said = {(x.method, x.direction): x.received_bytes for x in cost.costs(shape, 8)}
    for method, kind in (
        ("ring", "collective-permute"), ("halo", "collective-permute"), ("gather", "all-to-all")
    ):  # fmt: skip
        rule = to_rule(("sliding_window", 100, 0))
        module, told = compiled(8, rule, gradient=True, method=method)
        received = collectives(module)[kind].bytes
        if method == "gather":  # without the requests, and without its own part
            received = (received - 8 * told.estimates["gather"].capacity * 4) * 7 // 8
        if received != said[method, "forward"] + said[method, "backward"]:
            return False
    # all pairs of every step, by products alone: softmax adds some operations for each pair
    wide = {"q": (1, 256, 2, 128), "k": (1, 256, 2, 128)}
    q, k = (jax.ShapeDtypeStruct(x, jnp.float32) for x in wide.values())
    attend = sharded(on_mesh({"context": 4}), None, implementation="reference")
    module = jax.jit(attend).lower(q, k, k, None).compile()
    counted = module.cost_analysis()["flops"]
    products = 4 * 2 * 128 * 256 * 256 / 4
    return products <= counted <= 1.15 * products


def a_traced_mask_skips_steps_when_it_runs() -> bool:
    """Executed sends, counted on every device: a mask of neighbours sends one step of three."""
    sends: list[int] = []
    n, count = T // BLOCK, 4
    diagonal = np.eye(n, dtype=bool) | np.eye(n, k=-1, dtype=bool)
    every = np.tri(n, dtype=bool)
    permuted = ring.permuted

    def counting(arrays, axis, pairs):
        jax.debug.callback(lambda: sends.append(1))
        return permuted(arrays, axis, pairs)

    ring.permuted = counting
    try:
        mesh = on_mesh({"context": count})
        masks = [BlockMask.from_dense(x, to_rule(CAUSAL), block=BLOCK) for x in (diagonal, every)]
        attend = jax.jit(sharded(mesh, jax.tree.map(lambda _: P(), masks[0]), method="ring"))
        q, k, v = (jnp.asarray(inputs()[name]) for name in "qkv")
        made = []
        for mask in masks:
            sends.clear()
            jax.block_until_ready(attend(q, k, v, mask))
            jax.effects_barrier()
            made.append(len(sends))
    finally:
        ring.permuted = permuted
    return made == [count * 1, count * 3] and attend._cache_size() == 1


def a_capacity_that_is_too_small_gives_nan() -> bool:
    mesh = on_mesh({"context": 2})
    mask = random_mask(3)
    q, k, v = (jnp.asarray(inputs()[name]) for name in "qkv")
    spec = jax.tree.map(lambda _: P(), mask)
    out = jax.jit(sharded(mesh, spec, method="gather", capacity=1))(q, k, v, mask)
    first, second = np.split(np.asarray(out), 2, axis=1)
    return bool(np.isfinite(first).all() and np.isnan(second).all())


CLAIMS = [
    a_plan_selects_as_on_one_device,
    a_new_mask_compiles_nothing_and_stays_on_the_devices,
    a_window_sends_its_neighbours_blocks_only,
    the_cost_model_counts_what_modules_compute_and_send,
    a_traced_mask_skips_steps_when_it_runs,
    a_capacity_that_is_too_small_gives_nan,
]


SLOW_CLAIMS = [the_cost_model_counts_what_modules_compute_and_send]


def main(only: str = "") -> int:
    claims: dict[str, Claim] = {name_of(case): functools.partial(run, case) for case in CASES}
    by_default = [name_of(case) for case in CASES if case.name in ONE_OF_EACH]
    by_default += named(*(claim for claim in CLAIMS if claim not in SLOW_CLAIMS))
    return run_claims(claims | named(*CLAIMS), only, by_default)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
