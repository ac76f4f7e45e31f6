"""Checks timed calls against the float32 reference. A wrong result raises; its time is discarded.

    out, dq, dk, dv of a whole call ─ first and last batch row, kv heads 0 and 5 % K ─┐
    q, k, v, d_out, mask ──────────── the same, in float32 ── backends/reference.py ──┴─ error

The reference takes a dense bool mask as an argument, so it is compiled once per shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake.attention import dot_product_attention
from xsake.backends import reference
from xsake.bench.cases import Case
from xsake.bench.timing import Calls
from xsake.block_mask import BlockMask
from xsake.masks import Rule

# As in the conformance tests. Sums are float32; in bfloat16 the output, p and ds are rounded.
ERROR_LIMIT = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


class WrongResultError(RuntimeError):
    """A timed function disagrees with the reference; its time is discarded."""


def error_of(case: Case, backend: str = "xla") -> dict[str, float]:
    """Runs a case on a backend, forward and backward, and checks it."""
    given = {name: x for name, x in case.arguments().items() if x is not None}
    inputs = [given[name] for name in ("query", "key", "value")]
    d_out = jnp.cos(jnp.arange(case.B * case.T * case.N * case.sizes[-1]))
    d_out = d_out.reshape(case.B, case.T, case.N, -1).astype(case.dtype)

    @jax.jit
    def results(inputs: Any, d_out: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            call = given | {"query": q, "key": k, "value": v}
            return dot_product_attention(**call, implementation=backend)

        out, pull_back = jax.vjp(attend, *inputs)
        return out, pull_back(d_out)

    return checked(case, given, d_out, *results(inputs, d_out))


def checked(
    case: Case, given: dict[str, Any], d_out: Array, out: Array, gradients: Iterable[Array]
) -> dict[str, float]:
    """max|error| ÷ max|reference| of the output and of the gradients; raises above ERROR_LIMIT.

    Args:
      case: the case that was run.
      given: its arguments; all masking must be in `mask`.
      d_out: the cotangent of out.
      out: [B, T, N, Hv].
      gradients: dq, dk, dv.
    """
    known = {"query", "key", "value", "mask", "bias", "sinks", "scale", "logits_soft_cap"}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"checked() does not support {unknown}; express them as `mask`")
    K = case.sizes[4]
    whole: dict[str, Any] = {
        name: given[name] for name in ("query", "key", "value", "bias") if name in given
    }
    whole |= {"d_out": d_out, "output": (out,), "gradients": tuple(gradients)}
    mask = given.get("mask")
    if isinstance(mask, Rule):
        mask = BlockMask.from_rule(mask, case.sizes[1:3])
    scale = given.get("scale") or 1 / math.sqrt(case.H)
    worst = {"output": 0.0, "gradients": 0.0}
    for row, j in itertools.product(sorted({0, case.B - 1}), sorted({0, 5 % K})):
        part = _of_kv_head(whole, row, j, K)
        if "sinks" in given:
            part["sinks"] = given["sinks"].reshape(K, case.N // K, -1)[j]
        visible = _dense_mask(mask, row, j, K, case.N)
        errors = _errors(part, visible, jnp.float32(scale), given.get("logits_soft_cap"))
        worst = {kind: max(error, float(errors[kind])) for kind, error in worst.items()}
        if any(math.isnan(float(x)) for x in errors.values()):
            worst = dict.fromkeys(worst, math.nan)
            break
    limit = ERROR_LIMIT[case.dtype]
    if not all(error <= limit for error in worst.values()):
        raise WrongResultError(f"{case.name}: errors {worst} exceed {limit}; no time is reported")
    return worst


def checked_calls(case: Case, given: dict[str, Any], calls: Calls) -> dict[str, float]:
    """Runs the calls of `compile_directions` and checks their results."""
    out, gradients = (calls[name][0](*calls[name][1]) for name in ("forward", "backward"))
    return checked(case, given, calls["backward"][1][1], out, gradients)


@functools.partial(jax.jit, static_argnums=3)
def _of_kv_head(whole: Any, row: Any, j: Any, K: int) -> Any:
    """Slices a batch row and kv head j with its query heads; a bias has heads on axis 1."""

    def part(x: Array, axis: int) -> Array:
        heads, one = x.shape[axis], x
        if x.shape[0] > 1:
            one = lax.dynamic_slice_in_dim(x, row, 1)
        if heads == 1:
            return one
        return lax.dynamic_slice_in_dim(one, j * (heads // K), heads // K, axis)

    axes = {name: 1 if name == "bias" else 2 for name in whole}
    return {
        name: jax.tree.map(lambda x, at=axes[name]: part(x, at), x) for name, x in whole.items()
    }


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _dense_mask(mask: Any, row: int, j: int, K: int, N: int) -> Array:
    """Dense mask of the query heads of kv head j, bool [1, N / K | 1, T|1, S|1]."""
    heads = range(j * N // K, (j + 1) * N // K)
    if mask is None:
        return jnp.ones((1, 1, 1, 1), bool)
    if not isinstance(mask, BlockMask):  # [B|1, N|1, T|1, S|1]
        own = mask[row : row + 1] if mask.shape[0] > 1 else mask
        return own if mask.shape[1] == 1 else own[:, heads.start : heads.stop]
    lists = mask.kv_count.shape[1]
    numbers = sorted({n * lists // N for n in heads})
    return jnp.concatenate([mask[row, n].to_dense() for n in numbers], axis=1)


@functools.partial(jax.jit, static_argnums=3)
def _errors(part: Any, visible: Array, scale: Any, soft_cap: float | None) -> dict[str, Array]:
    def attend(q: Array, k: Array, v: Array) -> Array:
        out, lse = reference.attention(
            q, k, v, part.get("bias"), visible, scale=scale, soft_cap=soft_cap
        )
        if "sinks" in part:  # one more term of the denominator
            sinks = jax.nn.logsumexp(part["sinks"].astype(jnp.float32), axis=-1)
            out = out * jax.nn.sigmoid(lse - sinks)[..., None]
        return out

    def exact(name: str) -> Array:
        return part[name].astype(jnp.float32)

    out, pull_back = jax.vjp(attend, exact("query"), exact("key"), exact("value"))
    want = {"output": (out,), "gradients": pull_back(exact("d_out"))}

    def error(x: Array, y: Array) -> Array:
        return jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max()

    def worst(pairs: list[tuple[Array, Array]]) -> Array:
        # XLA's max on a CPU drops NaN, and may drop the running maximum with it.
        finite = jnp.stack([jnp.isfinite(x).all() for pair in pairs for x in pair]).all()
        return jnp.where(finite, jnp.stack([error(*pair) for pair in pairs]).max(), jnp.nan)

    return {kind: worst(list(zip(part[kind], want[kind], strict=True))) for kind in want}
