"""The queries that stand for the parts of a row block."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

Represent = Callable[[Array, int, int], Array]  # (q [T, N, H], part, block) -> [parts, N, H]


def sizes_of(T: int, part: int, block: int) -> Int[Array, " parts"]:
    """The number of tokens in each part; parts in the padding of the last block have 0."""
    padded = -(-T // block) * block
    return jnp.clip(T - jnp.arange(0, padded, part), 0, part)


def means(x: Float[Array, "T N H"], part: int, block: int) -> Float[Array, "parts N H"]:
    """The float32 mean of every `part` tokens, 0 where there are none."""
    sizes = sizes_of(x.shape[0], part, block)
    padded = jnp.pad(x, ((0, len(sizes) * part - x.shape[0]), (0, 0), (0, 0)))
    sums = padded.reshape(-1, part, *x.shape[1:]).astype(jnp.float32).sum(1)
    return sums / jnp.maximum(sizes, 1)[:, None, None]


def outliers(x: Float[Array, "T N H"], part: int, block: int) -> Float[Array, "parts N H"]:
    """Of every `part` tokens the one furthest from the mean of their block, for each head; float32.

    A part in the padding of the last block is 0.
    """
    sizes = sizes_of(x.shape[0], part, block)
    padded = jnp.pad(x, ((0, len(sizes) * part - x.shape[0]), (0, 0), (0, 0)))
    members = padded.reshape(-1, part, *x.shape[1:]).astype(jnp.float32)
    mean = jnp.repeat(means(x, block, block), block // part, axis=0)
    distance = ((members - mean[:, None]) ** 2).sum(-1)  # [parts, part, N]
    real = jnp.arange(part) < sizes[:, None]
    furthest = jnp.where(real[..., None], distance, -1).argmax(1)
    return jnp.take_along_axis(members, furthest[:, None, :, None], axis=1)[:, 0]
