"""An upper bound on the attention mass that each query loses by dropped blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float

from xsake.hads.chunks import PLAIN, Softmax
from xsake.masks.rule import cut

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
    keys = jnp.concatenate([extremes[0].max(2), extremes[1].min(2)], -1)  # [B, nk, K, 2H]
    log_tokens = np.log(np.minimum(S - np.arange(0, S, bk), bk)).astype(np.float32)
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
