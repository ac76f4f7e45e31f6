"""Small attention problems for the tests of HADS: q, k, v and an output projection."""

import jax.numpy as jnp
import numpy as np

from xsake.hads.chunks import PLAIN, Softmax

# Soft cap, window and sinks of 4 heads at once, as Gemma and gpt-oss have them.
CAPPED = Softmax(jnp.float32(2.0), jnp.int32(40), jnp.array([0.5, -1.0, 2.0, 0.0]))
SOFTMAXES = {"plain": PLAIN, "cap, window, sinks": CAPPED}


def attention(T=100, N=4, K=2, H=8, width=24, seed=0, sharp=2.0):
    """q [T, N, H], k and v [T, K, H], kernel [N, H, width]; `sharp` makes heads focused."""
    normal = np.random.default_rng(seed).standard_normal

    def drifting(heads):
        """Adjacent tokens are correlated and distant blocks are not, as in a text."""
        steps = normal((T, heads, H))
        return 0.5 * steps + np.cumsum(0.2 * steps, 0)

    q, k = sharp * drifting(N), drifting(K)
    v, kernel = normal((T, K, H)), normal((N, H, width)) / np.sqrt(H)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, kernel))


def capped(s, softmax):
    """Logits after the soft cap, in float64."""
    cap = softmax.soft_cap
    return s if cap is None else float(cap) * np.tanh(s / float(cap))


def dense(q, k, v, softmax=PLAIN):
    """p [N, T, T] and out [N, T, H] in float64: the definition, all in memory.

    With sinks, the rows of p lack their mass to 1.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    T, N, H = q.shape
    k, v = (np.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
    s = capped(np.einsum("tnh,snh->nts", q, k) / np.sqrt(H), softmax)
    row, column = np.ogrid[:T, :T]
    window = T if softmax.window is None else int(softmax.window)
    s = np.where((column <= row) & (column > row - window), s, -np.inf)
    sinks = np.full(N, -np.inf) if softmax.sinks is None else np.asarray(softmax.sinks, np.float64)
    s = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (N, T, 1))], -1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True))[..., :-1]
    return p, np.einsum("nts,snh->nth", p, v)


def spread(p, sinks):
    """-Σ p ln p over the last axis and the sinks' mass [N, T]."""
    p = np.concatenate([p, sinks[..., None]], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.where(p > 1e-12, p * np.log(p), 0).sum(-1)


def blocks_of(p, block):
    """p [N, T, T] summed over blocks of keys: [N, T, n]."""
    N, T, _ = p.shape
    n = -(-T // block)
    return np.pad(p, ((0, 0), (0, 0), (0, n * block - T))).reshape(N, T, n, block).sum(-1)


def tokens_of(blocks, block, T):
    """bool [N, n, n] -> [N, T, T], causal."""
    wide = np.repeat(np.repeat(np.asarray(blocks), block, 1), block, 2)[:, :T, :T]
    return wide & np.tri(T, dtype=bool)
