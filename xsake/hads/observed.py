"""Mass and entropies of a layer's heads: what needs no values, so that attention has it anyway.

q, k [T, …] ─┬─ a Hopper GPU takes the call: by-products of its forward
             └─ else `chunks`, in plain JAX
                      └─▶ Heads: mass [N, n, n], token and block entropy [N]
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from xsake import _jax, masks
from xsake.attention import explain, observed_attention
from xsake.backends import hopper
from xsake.block_mask import BlockMask
from xsake.hads import chunks
from xsake.hads.chunks import PLAIN, Softmax


class Heads(NamedTuple):
    """The causal attention of one layer's heads to one sequence; see `statistics.Statistics`."""

    mass: Float[Array, "*layers N n n"]  # share of attention that row block i gives to block j
    entropy: Float[Array, "*layers N"]  # over tokens, ÷ ln(visible keys), mean over queries
    block_entropy: Float[Array, "*layers N"]  # over blocks, ÷ ln(visible blocks)


def observe(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    *,
    block: int = 128,
    softmax: Softmax = PLAIN,
) -> Heads:
    """Mass and entropies of one sequence in one layer; causal, any length, memory linear in it.

    Sinks are one more key and one more block of every query.
    """
    if has_by_products(q, k, block, softmax):
        # The values do not matter: keys are at hand and have a size that the kernels support.
        mask = _causal(q.shape[0], block)
        _, found = observed_attention(q, k, k, mask=mask, what="tokens", sinks=softmax.sinks)
        mass, by_block, by_key = found
        assert by_key is not None  # "tokens"
        return Heads(mass, *_means(by_key, by_block, block, softmax))
    cut = chunks.cut(q, k, block, softmax=softmax)

    def of_chunk(number: Array) -> tuple[Array, Array, Array]:
        chunk = cut.attend(number)
        by_block = chunk.p.sum(-1)
        tokens = chunk.entropy(chunk.p.reshape(*chunk.p.shape[:2], -1))
        return chunk.mean(by_block), tokens, chunk.entropy(by_block)

    mass, tokens, blocks = (
        jnp.moveaxis(x, 0, 1).reshape(q.shape[1], -1, *x.shape[3:])
        for x in lax.map(of_chunk, jnp.arange(cut.chunks))
    )
    entropies = _means(tokens[:, : cut.length], blocks[:, : cut.length], block, softmax)
    return Heads(mass[:, : cut.n], *entropies)


def has_by_products(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], block: int, softmax: Softmax
) -> bool:
    """Whether the Hopper forward takes this call, and has statistics of it.

    A soft cap and a window of a layer may be traced; the kernels need numbers.
    """
    if softmax.soft_cap is not None or softmax.window is not None:
        return False
    if q.shape[-1] > hopper.limits.OBSERVED_HEAD_SIZE or _jax.why_no_hopper(
        hopper.limits.NEEDS_JAX
    ):
        return False
    return explain(q, k, k, mask=_causal(q.shape[0], block)).chosen == "hopper"


def _causal(length: int, block: int) -> BlockMask:
    return BlockMask.from_rule(masks.causal(), (length, length), block=(block, block))


def _means(
    tokens: Float[Array, "N T"], blocks: Float[Array, "N T"], block: int, softmax: Softmax
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Entropies ÷ their maximum, mean over queries.

    Without the first query (block), which sees one key (block): 0 ÷ ln 1.
    """
    N, T = tokens.shape

    def mean(x: Array, size: int) -> Array:
        shares = x / jnp.log(softmax.outcomes(jnp.arange(T), size))
        return shares[:, size:].mean(-1) if size < T else jnp.zeros(N)

    return mean(tokens, 1), mean(blocks, block)
