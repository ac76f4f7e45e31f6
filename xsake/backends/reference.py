"""The definition: attention with all T x S logits in memory, in float32, for any mask.

logits = scale · q kᵀ ─ soft cap ─ + bias ─ masked ─ softmax ─ · v
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from xsake.backends import Call, Sizes, accumulator


def why_not(call: Call) -> str | None:
    """The reference takes everything."""
    return None


def forward(call: Call) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N]), differentiable to any order."""
    allowed = call.mask.to_dense(call.sizes.B, call.sizes.N)
    return attention(
        call.q, call.k, call.v, call.bias, allowed, scale=call.scale, soft_cap=call.soft_cap
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    bias: Float[Array, "#B #N #T #S"] | None,
    allowed: Bool[Array, "#B #N #T #S"],
    *,
    scale: float | Array,
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """The same with `allowed` saying for every token pair whether the query sees the key."""
    B, T, S, N, K, H, Hv = Sizes.of(q, k, v)
    dtype, given, group = accumulator(q.dtype), q.dtype, N // K
    allowed = jnp.broadcast_to(allowed, (B, N, T, S)).reshape(B, K, group, T, S)
    # 0 · NaN is NaN. So zeros take the place of vectors that are not finite, and the logits of the
    # token pairs that see them become NaN.
    sound = [jnp.isfinite(x).all(-1, keepdims=True) for x in (q, k, v)]
    q, k, v = (jnp.where(ok, x, 0).astype(dtype) for ok, x in zip(sound, (q, k, v), strict=True))
    q = q.reshape(B, T, K, group, H)
    q_flaw, k_flaw = (
        jnp.where(ok[..., 0], 0, jnp.nan).astype(dtype) for ok in (sound[0], sound[1] & sound[2])
    )
    q_flaw = jnp.moveaxis(q_flaw.reshape(B, T, K, group), 1, 3)[..., None]
    k_flaw = jnp.moveaxis(k_flaw, 1, 2)[:, :, None, None]

    exact = lax.Precision.HIGHEST
    logits = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, precision=exact)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias.astype(dtype), (B, N, T, S)).reshape(logits.shape)
    logits = logits + q_flaw + k_flaw
    allowed = allowed & (logits != -jnp.inf)  # a bias of -inf hides a key as the mask does
    logits = jnp.where(allowed, logits, -jnp.inf)

    # An empty row has no finite maximum; 0 in its place keeps every derivative finite.
    some = allowed.any(-1)
    m = lax.stop_gradient(jnp.where(some, logits.max(-1), 0))
    p = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0) - m[..., None]), 0)
    total = jnp.where(some, p.sum(-1), 1)
    out = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=exact)
    out = jnp.where(jnp.moveaxis(some, 3, 1)[..., None], out, 0)  # a cotangent there may be NaN
    out = out / jnp.moveaxis(total, 3, 1)[..., None]
    logsumexp = jnp.where(some, m + jnp.log(total), -jnp.inf)
    return (
        out.reshape(B, T, N, Hv).astype(given),
        jnp.moveaxis(logsumexp.reshape(B, N, T), 1, 2),
    )
