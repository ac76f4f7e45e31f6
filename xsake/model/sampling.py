"""Sampling: draws the next token from logits.

The random numbers for a token depend only on (seed, batch row, position), not on the rest of the
batch or on the size of a burst.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only the k most likely tokens; None: all.
      top_p: only the smallest set of most likely tokens with this total probability; 1: all.
      seed: of the random numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        if not (_is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be 0 or more, got {temperature!r}")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1, "; None keeps all tokens")
        if not (_is_number(top_p) and 0 < top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
        check_whole("seed", self.seed)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2³² - 1, got {self.seed}")


def check_whole(name: str, value: Any, least: int | None = None, remedy: str = "") -> None:
    """Raises unless `value` is a whole number, and at least `least` if that is given."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r:.40}{remedy}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{remedy}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def sample(logits: Array, sampling: Sampling, seed: Any, position: Array) -> Array:
    """The next token of every row, int32 [B].

    Args:
      logits: float32 [B, vocab].
      sampling: static; its seed is not read, so that another seed does not recompile.
      seed: uint32 [].
      position: int [B], of the token that is drawn.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    token = None
    if sampling.top_k is not None or sampling.top_p < 1:
        kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
        logits, token = jax.lax.top_k(logits, kept)  # most likely first
        p = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)
    rows = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda row, at: _key(seed, row, at))(rows, position)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if token is not None:
        drawn = jnp.take_along_axis(token, drawn[:, None], axis=-1)[:, 0]
    return drawn.astype(jnp.int32)


def _key(seed: Any, row: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)
