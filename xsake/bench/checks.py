"""No time without a right result: a case's error against float32, in the run that times it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from xsake.attention import dot_product_attention
from xsake.bench.cases import Case
from xsake.block_mask import BlockMask

# As the conformance tests have it: float32 sums; bfloat16 rounds the output, p and ds.
ERROR_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


class WrongResultError(RuntimeError):
    """A timed function disagreed with the reference: its time is worth nothing."""


def error_of(case: Case, backend: str = "xla", heads: tuple[int, ...] = (0, 5)) -> dict[str, float]:
    """max|error| ÷ max|reference| of some heads, output and gradients, against float32."""
    given = case.arguments()
    static = {name: given.pop(name) for name in ("scale", "logits_soft_cap")}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def results(name: str, dtype: str, inputs: Any, d_out: Any, more: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return dot_product_attention(q, k, v, implementation=name, **more, **static)

        out, pull_back = jax.vjp(attend, *(x.astype(dtype) for x in inputs))
        return {"output": [out], "gradients": pull_back(d_out.astype(dtype))}

    worst = {"output": 0.0, "gradients": 0.0}
    for n in heads:
        one = _one_head(case, given, n % case.N)
        inputs = [one.pop(name) for name in ("query", "key", "value")]
        d_out = jnp.cos(jnp.arange(case.T * inputs[2].shape[-1]))
        d_out = d_out.reshape(1, case.T, 1, -1)
        got = results(backend, case.dtype, inputs, d_out, one)
        want = results("reference", "float32", inputs, d_out, one)
        for kind, error in worst.items():
            for x, y in zip(got[kind], want[kind], strict=True):
                error = max(error, float(jnp.abs(x - y).max() / jnp.abs(y).max()))
            worst[kind] = error
    limit = ERROR_LIMIT[case.dtype]
    if not all(error <= limit for error in worst.values()):
        raise WrongResultError(f"{case.name}: errors {worst} exceed {limit}; no time is reported")
    return worst


def _one_head(case: Case, given: dict[str, Any], n: int) -> dict[str, Any]:
    """The arguments of query head n alone, first batch row."""
    K, N = case.sizes[4], case.N
    out = {name: x for name, x in given.items() if x is not None}
    out["query"] = given["query"][:1, :, n : n + 1]
    for name in ("key", "value"):
        out[name] = given[name][:1, :, n * K // N : n * K // N + 1]
    if "sinks" in out:
        out["sinks"] = out["sinks"][n : n + 1]
    if isinstance(out.get("mask"), BlockMask):
        out["mask"] = out["mask"][0, n * out["mask"].kv_count.shape[1] // N]
    for name in ("bias", "mask"):  # arrays [B|1, N|1, T|1, S|1]
        if isinstance(out.get(name), jax.Array):
            out[name] = out[name][:1, min(n, out[name].shape[1] - 1)][:, None]
    return out
