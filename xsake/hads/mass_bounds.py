"""An upper bound on the attention mass that each query loses by dropped blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float

from xsake import _jax
from xsake.backends import unaliased
from xsake.backends.hopper.limits import BLOCKS, HEAD_SIZES, NEEDS_JAX
from xsake.hads.chunks import PLAIN, Softmax
from xsake.masks.rule import cut

MOST_SOFT_CAP = 1000  # of the kernel, whose tanh errs by 1e-7 of it
LOGITS_AT_ONCE = 1 << 24  # upper bounds of logits in memory at a time


def bounds(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    logsumexp: Float[Array, "B T N"],
    dropped: Bool[Array, "B N nq nk"],
    block: tuple[int, int],
    softmax: Softmax = PLAIN,
) -> Float[Array, "B N T"]:
    """An upper bound on the dropped mass of every query, float32.

        logit of query q and any key of block j <= u_j = Σ_d max(q_d min_j k_d, q_d max_j k_d) / √H
        dropped mass <= D / (D + exp(logsumexp)),   D = Σ over dropped blocks of tokens_j · exp(u_j)

    with the minimum and maximum over a block's keys as in Quest. It is tight where the keys of a
    block are alike in every channel, and far too large where they are not. The cost is 2/block_k of
    that of q·kᵀ. A soft cap rises with the logit, so that the capped bound is one of the capped.

    A query that drops a block where u_j is inf or NaN has the bound 1; u_j is NaN by 0 · inf where
    a logit may be inf. One that drops a block and whose logsumexp is inf or NaN has the bound NaN.
    """
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    bq, bk = block
    extremes = [cut(key, bk, 1, fill) for fill in (-jnp.inf, jnp.inf)]
    most, least = extremes[0].max(2), extremes[1].min(2)  # [B, nk, K, H]
    log_tokens = np.log(np.minimum(S - np.arange(0, S, bk), bk)).astype(np.float32)
    if why_no_kernel(query, key, block, softmax) is None:
        of_dropped = jnp.where(dropped, log_tokens, -jnp.inf)
        kept = jnp.moveaxis(logsumexp, 2, 1).astype(jnp.float32)
        return _by_kernel(bq, softmax.soft_cap)(query, most, least, kept, of_dropped)
    keys = jnp.concatenate([most, least], -1)  # [B, nk, K, 2H]
    precision = lax.Precision.HIGHEST if key.dtype == jnp.float32 else None

    def of_row_block(row: tuple[Array, Array, Array]) -> Array:
        q, L, drops = row  # [B, bq, N, H], [B, bq, N], [B, N, nk]
        both = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], -1)
        both = both.reshape(B, bq, K, N // K, 2 * H)
        upper = jnp.einsum(
            "btkgh,bjkh->bkgtj", both, keys,
            preferred_element_type=jnp.float32, precision=precision,
        )  # fmt: skip
        upper = upper.reshape(B, N, bq, -1) / np.sqrt(H).astype(np.float32)
        upper = jnp.where(jnp.isfinite(upper), softmax.capped(upper) + log_tokens, jnp.inf)
        total = jax.nn.logsumexp(jnp.where(drops[:, :, None], upper, -jnp.inf), axis=-1)
        L = jnp.swapaxes(L, 1, 2).astype(jnp.float32)
        L = jnp.where(jnp.isposinf(L), jnp.nan, L)  # then the sparse softmax is NaN
        some = total > -jnp.inf  # it is never NaN
        return jnp.where(some, jax.nn.sigmoid(jnp.where(some, total, 0) - L), 0)

    rows = tuple(jnp.moveaxis(cut(x, bq, 1, 0.0), 1, 0) for x in (query, logsumexp))
    per_row = B * N * bq * dropped.shape[-1]
    found = lax.map(
        of_row_block,
        (*rows, jnp.moveaxis(dropped, 2, 0)),
        batch_size=max(1, LOGITS_AT_ONCE // per_row),
    )  # [nq, B, N, bq]
    return jnp.moveaxis(found, 0, 2).reshape(B, N, -1)[..., :T]


def why_no_kernel(
    query: Array, key: Array, block: tuple[int, int], softmax: Softmax = PLAIN
) -> str | None:
    """The first reason why the kernel for Hopper GPUs does not compute the bounds."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if query.dtype not in (jnp.bfloat16, jnp.float16) or query.dtype != key.dtype:
        return f"supports bfloat16 and float16; these are {query.dtype} and {key.dtype}"
    if query.shape[-1] not in HEAD_SIZES:
        return f"supports heads of {', '.join(map(str, HEAD_SIZES))}; these are {query.shape[-1]}"
    if block[0] % BLOCKS[0]:
        return f"supports row blocks of a multiple of {BLOCKS[0]} tokens; these are of {block[0]}"
    if softmax.soft_cap is None:
        return None
    if not isinstance(softmax.soft_cap, (int, float)):
        return "supports a soft cap that is known before the program is compiled"
    if softmax.soft_cap > MOST_SOFT_CAP:
        return f"supports soft caps of up to {MOST_SOFT_CAP}; this is {softmax.soft_cap}"
    return None


@functools.lru_cache(maxsize=32)
def _by_kernel(row_block: int, soft_cap: float | None) -> Callable[..., Array]:
    """(q, most, least [B, nk, K, H], logsumexp [B, N, T], log_tokens) -> bounds [B, N, T].

    `jax.vmap` folds the mapped axis into the batch. There is no derivative.
    """

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def found(*given: Array) -> Array:
        from xsake.backends.hopper.mass_bounds import mass_bounds

        q, most, least, kept, log_tokens = unaliased(*given)
        how: Any = {"scale": q.shape[-1] ** -0.5, "soft_cap": soft_cap}
        limits = mass_bounds(q, most, least, kept, log_tokens, row_block, **how)
        return _jax.vary(limits, _jax.varying_axes(*given))

    @found.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Array, bool]:
        wide = _jax.folded(_jax.mapped(size, is_mapped, given))
        return _jax.unfolded(size, found(*wide)), True

    return found
