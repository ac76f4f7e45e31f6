"""Sparse attention of split sequences: `python -m tests.parallel.nsa_on_eight [TEXT | --all]`.

A process of its own, because the number of devices is settled when JAX starts. Prints one line for
each claim, and ends with 1 if any does not hold. By default one case runs; TEXT runs those with it
in their name, --all runs all.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests import oracle
from tests.draws import FAST_COMPILATION
from tests.parallel.claims import Claim, name_of, named, run_claims
from tests.parallel.context_on_eight import on_mesh
from xsake import nsa
from xsake.parallel.context import pages

B, N, K, H = 2, 4, 2, 8
SIZES = {"block_size": 16, "num_selected": 4, "compression_block": 8, "compression_stride": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call on one mesh."""

    name: str
    mesh: dict[str, int]
    tokens: int = 128
    packed: bool = False
    pooling: str = "mean"
    loss: bool = False  # add the loss of the indexer
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


C8, C4T2, D2C4 = {"context": 8}, {"context": 4, "tensor": 2}, {"data": 2, "context": 4}
CASES = [
    Case("nsa", C4T2, arguments={"window_size": 20}),
    Case("nsa, packed, learned pooling", C8, packed=True, pooling="weights",
         arguments={"window_size": 20}),
    Case("nsa, odd lengths", D2C4, tokens=120, arguments={"window_size": 7}),
    Case("nsa, packed, odd lengths, blocks of three devices", C8, tokens=104, packed=True,
         arguments={"block_size": 32, "compression_block": 32}),
    Case("nsa, reference", {"context": 2}, tokens=64, packed=True,
         arguments={"implementation": "reference"}),
    Case("moba, packed", D2C4, packed=True, arguments={"score": "moba", "window_size": 9}),
    Case("msa, packed, with its loss", C4T2, packed=True, loss=True, arguments={"score": "msa"}),
]  # fmt: skip
DEFAULT = "nsa, packed, learned pooling"


def ids_of(tokens: int) -> np.ndarray:
    """Four sequences in each batch row, and padding at the end."""
    found = np.sort(np.random.default_rng(2).integers(0, 4, (B, tokens)), axis=1)
    found[:, -5:] = -1
    return found.astype(np.int32)


def inputs(case: Case) -> dict[str, Any]:
    rng, T = np.random.default_rng(1), case.tokens
    shapes = {"q": (N, H), "k": (K, H), "v": (K, H), "gates": (3, N)}
    if case.arguments.get("score") == "msa":
        shapes |= {"iq": (K, H), "ik": (1, H)}
    found: dict[str, Any] = {
        name: jnp.float32(rng.standard_normal((B, T, *shape))) for name, shape in shapes.items()
    }
    block = (SIZES | case.arguments)["compression_block"]
    found["pool"] = jnp.float32(rng.standard_normal((block, K)) / block)
    return found


def attend(case: Case, x: dict[str, Any], ids: Any, axis: str | None) -> tuple[Any, Any]:
    """(output, the indexer's loss or 0) of what one device has."""
    score, pool = case.arguments.get("score", "nsa"), x["pool"]
    how = SIZES | case.arguments | {"segment_ids": ids, "axis": axis}
    branches = ["g_cmp"] * (score == "nsa") + ["g_slc"] + ["g_swa"] * ("window_size" in how)
    gates = {name: x["gates"][:, :, i] for i, name in enumerate(branches)}
    if case.pooling == "weights":
        how["compression"] = nsa.weighted_pooling(pool)
    if not case.loss:
        return nsa.native_sparse_attention(x["q"], x["k"], x["v"], **gates, **how), jnp.zeros(())
    blocks = nsa.select_blocks(x["q"], x["k"], index_query=x["iq"], index_key=x["ik"], **how)
    out = nsa.native_sparse_attention(x["q"], x["k"], x["v"], **gates, **how, block_indices=blocks)
    shared = {name: how[name] for name in ("block_size", "segment_ids", "axis")}
    return out, nsa.indexer_loss(x["q"], x["k"], x["iq"], x["ik"], blocks, **shared)


def run(case: Case) -> float:
    """The largest relative error over outputs, loss and gradients."""
    x, ids = inputs(case), ids_of(case.tokens) if case.packed else None
    d_out = jnp.float32(np.random.default_rng(3).standard_normal((B, case.tokens, N, H)))
    data, tensor = (name if name in case.mesh else None for name in ("data", "tensor"))
    heads = P(data, "context", tensor)
    specs = dict.fromkeys(x, heads) | {"gates": P(data, "context", None, tensor)}
    specs |= {"pool": P(None, tensor)} | ({"ik": P(data, "context")} if "ik" in x else {})
    others = tuple(name for name in case.mesh if name != "context")

    def on_device(x: Any, ids: Any) -> Any:
        out, loss = attend(case, x, ids, "context")
        return out, jax.lax.pmean(loss, others) if case.loss and others else loss

    split = jax.shard_map(
        on_device,
        mesh=on_mesh(case.mesh),
        in_specs=(specs, None if ids is None else P(data, "context")),
        out_specs=(heads, P()),
    )

    def both(function: Any) -> Any:
        @functools.partial(jax.jit, compiler_options=FAST_COMPILATION)
        def forward_and_backward(x: Any, ids: Any, d_out: Any) -> Any:
            found, pull_back = jax.vjp(lambda x: function(x, ids), x)
            return found, pull_back((d_out, jnp.ones(())))[0]

        return jax.device_get(forward_and_backward(x, ids, d_out))

    found, expected = both(split), both(lambda x, ids: attend(case, x, ids, None))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(oracle.relative_error(a, b) for a, b in pairs if np.any(b))


def only_needed_pages_arrive() -> bool:
    """In as many rounds as the neediest device has, and their transpose goes home."""
    mesh, T, n = on_mesh(C4T2), 32, 16  # pages of two tokens
    needed = np.random.default_rng(0).random((4, 4 * n)) < 0.2
    needed[2, :] = False
    x = jnp.arange(4 * T * 3, dtype=jnp.float32).reshape(1, 4 * T, 3) + 1

    def on_device(x: Any, needed: Any) -> Any:
        asked = pages.Pages.request(needed, "context")
        text = asked.fetched(x)
        return text, asked.returned(text), jnp.full((1,), asked.rounds)

    tokens = P(None, "context")
    split = jax.shard_map(
        on_device, mesh=mesh, in_specs=(tokens, P("context")),
        out_specs=(P("context"), tokens, P("context")), check_vma=False,
    )  # fmt: skip
    text, home, rounds = jax.device_get(jax.jit(split)(x, needed))
    device = np.arange(4 * n) // n
    held = needed | (device == np.arange(4)[:, None])  # [device, page]
    wanted = np.where(np.repeat(held, 2, 1)[..., None], np.asarray(x), 0)
    most = (needed & (device != np.arange(4)[:, None])).reshape(4, 4, n).sum(-1).max()
    return bool(
        np.array_equal(text, wanted)
        and np.array_equal(home[0], np.asarray(x)[0] * np.repeat(held.sum(0), 2)[:, None])
        and (rounds == -(-most // (n // pages.ROUNDS))).all()
        and most < n
    )


def main(only: str = "") -> int:
    claims: dict[str, Claim] = {name_of(case): functools.partial(run, case) for case in CASES}
    pages_claim = named(only_needed_pages_arrive)
    one = [name_of(case) for case in CASES if case.name == DEFAULT]
    return run_claims(claims | pages_claim, only, [*one, *pages_claim])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
