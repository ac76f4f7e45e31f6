"""dot_product_attention(q, k, v, mask=mask): check, choose a backend, call it. Nothing else.

    q [B, T, N, H] ─┐
    k [B, S, K, H] ─┼─ check ─ choose ─┬─ backends/hopper/       Mosaic GPU, sm90
    v [B, S, K, Hv]─┤                  ├─ backends/xla/          any device, visits live blocks
    BlockMask ──────┘                  ├─ backends/dense.py      any device, T x S in memory
                                       ├─ backends/tpu/          Mosaic TPU, by name only
                                       └─ backends/reference.py  any device, the definition
                                               └─▶ out, logsumexp ─ sinks ─ out

Everything that limits which keys a query sees (mask, is_causal, windows, lengths, segments,
positions) becomes one BlockMask before a backend is asked. Sinks are applied to the result:
out · eᴸ / (eᴸ + Σ exp(sink)), with L the logsumexp.

>>> import jax, xsake
>>> q = k = v = jax.random.normal(jax.random.key(0), (1, 256, 4, 64))
>>> xsake.dot_product_attention(q, k, v, is_causal=True).shape
(1, 256, 4, 64)
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake import masks
from xsake.arguments import (
    Abstract,
    Mask,
    Tensor,
    Window,
    block_mask_of,
    check_bias,
    check_qkv,
    check_sinks,
    check_soft_cap,
    flag,
    lengths_rule,
    number,
    positions_of,
    segments_rule,
    window_rule,
)
from xsake.backends import (
    Call,
    Observing,
    Sizes,
    accumulator,
    run_forward,
    statistics,
    with_sinks,
)
from xsake.backends.choice import (
    BACKENDS,
    Explanation,
    choose,
    explain_calls,
    is_empty,
    report,
)
from xsake.backends.options import Options
from xsake.backends.statistics import Observed, Statistics
from xsake.masks.rule import combine

__all__ = [
    "Explanation",
    "Statistics",
    "dot_product_attention",
    "explain",
    "explain_calls",
    "observed_attention",
]


class Arguments(TypedDict, total=False):
    """Keyword arguments of `dot_product_attention`; the overloads spell out the other two."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Int[Tensor, ...] | None
    key_value_seq_lengths: Int[Tensor, ...] | None
    local_window_size: Window
    logits_soft_cap: float | None
    sinks: Float[Tensor, ...] | None
    q_segment_ids: Int[Tensor, ...] | None
    kv_segment_ids: Int[Tensor, ...] | None
    q_positions: Int[Tensor, ...] | None
    kv_positions: Int[Tensor, ...] | None
    options: Options | None


@overload
def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Float[Array, "*B T N Hv"]: ...


@overload
def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Tensor, ...] | None = None,
    key_value_seq_lengths: Int[Tensor, ...] | None = None,
    local_window_size: Window = None,
    implementation: str | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    sinks: Float[Tensor, ...] | None = None,
    q_segment_ids: Int[Tensor, ...] | None = None,
    kv_segment_ids: Int[Tensor, ...] | None = None,
    q_positions: Int[Tensor, ...] | None = None,
    kv_positions: Int[Tensor, ...] | None = None,
    options: Options | None = None,
) -> Any:
    """softmax(scale · q kᵀ + bias) v over the keys that each query may see.

    Accepts all arguments of `jax.nn.dot_product_attention`, and more. Blocks without allowed pairs
    are not computed. A query that sees no key gets zeros, logsumexp -inf and zero gradients.

    Args:
      query: [B, T, N, H], or [T, N, H].
      key: [B, S, K, H]; K divides N, and query head n uses kv head n // (N / K).
      value: [B, S, K, Hv].
      bias: added to the logits, after the soft cap; broadcastable to [B, N, T, S], differentiable.
      mask: which keys a query sees: a BlockMask, a rule of `xsake.masks`, a bool array
        broadcastable to [B, N, T, S] (True = attend), or None.
      scale: of the logits; default 1/sqrt(H).
      is_causal: a query sees keys at its own position and before.
      query_seq_lengths: int [B]; queries past it see nothing.
      key_value_seq_lengths: int [B]; keys past it are not seen.
      local_window_size: w or (left, right): keys q - left … q + right; None = no limit there.
      implementation: a backend by name, which runs or raises; default the fastest that can run.
      return_residual: also return the logsumexp [B, T, N] float32, sinks left out; differentiable.
      logits_soft_cap: cap · tanh(logits / cap).
      sinks: [N] or [N, M], learnable logits that join the softmax's denominator.
      q_segment_ids: int [B, T]; only equal ids see each other, negative ones see nothing.
      kv_segment_ids: int [B, S]; default q_segment_ids.
      q_positions: int [B, T], what causal and window rules compare; default arange.
      kv_positions: int [B, S].
      options: settings of the backends; they change the result by rounding at most.

    Returns:
      [B, T, N, Hv] in query's dtype; with return_residual, that and the logsumexp.
    """
    q, k, v, is_unbatched = check_qkv(query, key, value)
    sizes = Sizes.of(q, k, v)
    limits = [
        segments_rule(sizes, q_segment_ids, kv_segment_ids),
        lengths_rule(sizes, query_seq_lengths, key_value_seq_lengths),
        masks.causal() if flag("is_causal", is_causal) else masks.everything(),
        window_rule(local_window_size),
    ]
    positions = positions_of(sizes, q_positions, kv_positions)
    call = Call(
        q, k, v,
        bias=check_bias(sizes, bias),
        mask=block_mask_of(sizes, mask, combine(limits), positions),
        scale=1 / math.sqrt(sizes.H) if scale is None else number("scale", scale),
        soft_cap=check_soft_cap(logits_soft_cap),
        options=Options.of(options),
    )  # fmt: skip
    sinks = check_sinks(sizes, sinks)
    if isinstance(implementation, _Question | _Observer):
        return implementation.take(call, sinks)
    out, logsumexp = _run(implementation, call)
    out = out if sinks is None else with_sinks(out, logsumexp, sinks)
    if is_unbatched:
        out, logsumexp = out[0], logsumexp[0]
    return (out, logsumexp) if return_residual else out


def explain(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Mask | None = None,
    *,
    implementation: str | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> Explanation:
    """Returns the backend that `dot_product_attention` would take, and every backend's reason.

    Takes the same arguments; q, k, v and bias may be shapes.

    >>> import jax, xsake
    >>> q = jax.ShapeDtypeStruct((1, 256, 4, 64), "float32")
    >>> xsake.explain(q, q, q, is_causal=True).reasons["reference"] is None
    True
    """
    question = _Question(implementation or "")

    def ask(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return dot_product_attention(
            query, key, value, bias, mask, implementation=question, **arguments
        )

    jax.eval_shape(ask, query, key, value, bias)
    return question.answer


def observed_attention(
    query: Float[Tensor, "*B T N H"],
    key: Float[Tensor, "*B S K H"],
    value: Float[Tensor, "*B S K Hv"],
    bias: Float[Tensor, ...] | None = None,
    mask: Mask | None = None,
    *,
    what: Observed = "blocks",
    implementation: str | None = None,
    **arguments: Unpack[Arguments],
) -> tuple[Float[Array, "*B T N Hv"], Statistics]:
    """`dot_product_attention` and what it looked at: (out, statistics).

    Takes the same arguments, and `what`: "blocks", or "tokens" for the entropy over keys, too. The
    statistics have no gradient; their blocks are those of a BlockMask that is given as the mask,
    else of 128 tokens, or fewer for short sequences. The `hopper` backend has them as by-products
    of its forward; with others they cost as much as dense attention, once more.

    >>> import jax, xsake
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 256, 4, 64))
    >>> out, seen = xsake.observed_attention(q, k, v, is_causal=True)
    >>> seen.block_entropy.shape, seen.mass.shape
    ((1, 4, 256), (1, 4, 2, 2))
    """
    if "return_residual" in arguments:
        raise TypeError(
            "observed_attention takes no return_residual: it returns (out, statistics); call "
            "dot_product_attention for the logsumexp"
        )
    observer: Any = _Observer(implementation or "")
    observer.what = statistics.checked(what)
    found: Any = dot_product_attention(
        query, key, value, bias, mask, implementation=observer, **arguments
    )
    return jax.tree.map(lambda x: x[0], found) if jnp.ndim(query) == 3 else found


# ------------------------------------------------------------------------------------------- choose


class _Question(str):
    """A name, or "", passed as `implementation` to store an Explanation instead of computing."""

    answer: Explanation

    def take(self, call: Call, sinks: Array | None) -> int:
        """Keeps the answer, and returns something that `jax.eval_shape` takes."""
        self.answer = choose(str(self) or None, call)
        return 0


class _Observer(str):
    """A name, or "", passed as `implementation` for statistics beside the output."""

    what: Observed

    def take(self, call: Call, sinks: Array | None) -> tuple[Array, Statistics]:
        """(out, statistics) by the chosen backend; plain JAX where it has no statistics."""
        asked, total = str(self) or None, statistics.total(sinks)
        explanation = choose(asked, call)
        backend = BACKENDS.get(explanation.chosen or "")
        if isinstance(backend, Observing):
            why = backend.why_not_observed(call)
            if why is None:
                report(explanation)
                out, more = run_forward(lambda call: backend.observed(call, total, self.what), call)
                return out if sinks is None else with_sinks(out, more[0], sinks), more[1]
            if asked is not None:
                raise ValueError(
                    f"implementation {asked!r} cannot observe this call: it {why}; leave the name "
                    "out, or name another"
                )
        out, logsumexp = _run(asked, call)
        out = out if sinks is None else with_sinks(out, logsumexp, sinks)
        return out, statistics.measured(call, total, self.what)


def _run(asked: str | None, call: Call) -> tuple[Array, Array]:
    """(out, logsumexp) by the chosen backend."""
    explanation = report(choose(asked, call))
    if is_empty(call):
        B, T, _, N, _, _, Hv = call.sizes
        out = jnp.zeros((B, T, N, Hv), call.q.dtype)
        return out, jnp.full((B, T, N), -jnp.inf, accumulator(call.q.dtype))
    if explanation.chosen is None:
        raise ValueError(
            f"implementation {asked!r} cannot run this call: it {explanation.reasons[str(asked)]}"
        )
    return run_forward(BACKENDS[explanation.chosen].forward, call)
