"""RoPE: each pair of a head's dimensions is rotated by an angle that grows with position.

    angle[t, i] = position[t] · frequency[i],   frequency[i] = base^(-2i / H),   i = 0 … H/2 - 1
    (x[i], x[i + H/2])  →  (x[i] cos - x[i + H/2] sin,  x[i + H/2] cos + x[i] sin)

Pairs are half a head apart, as in the published Llama and Qwen weights. Scaling lowers the low
frequencies to extend the context beyond the length of the original training.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake import _files

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE's base and scaling; the fields after `factor` apply to some types of scaling only.

    Attributes:
      base: 10,000 in the first Llama; a larger base rotates more slowly.
      scaling: "none"; "linear": every frequency is divided by factor; "llama3": frequencies whose
        wavelength is above original_context / low_frequency are divided by factor, those below
        original_context / high_frequency are kept, with a linear ramp between; "yarn": the ramp is
        between beta_fast and beta_slow rotations over original_context, and cos and sin are
        multiplied by attention_factor.
      factor: the extended context ÷ original_context.
      original_context: context length of the original training.
      attention_factor: for yarn; default 0.1 · ln(factor) + 1.
      truncate: for yarn: the ends of the ramp are rounded outwards to whole pairs.
    """

    base: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _files.check_fields(Rope, vars(self), "rope")
        if self.scaling not in SCALINGS:
            raise ValueError(f"rope scaling {self.scaling!r} is not one of {list(SCALINGS)}")
        if not 1 < self.base < math.inf:
            raise ValueError(f"rope base must be above 1, got {self.base}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"rope factor must be at least 1, got {self.factor}")
        if self.scaling in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(
                f"rope scaling {self.scaling!r} needs original_context, "
                "the context length of the original training"
            )
        low, high = self.low_frequency, self.high_frequency
        if self.scaling == "llama3" and not 0 < low < high < math.inf:
            raise ValueError(f"rope needs 0 < low_frequency < high_frequency, got {low} and {high}")
        slow, fast = self.beta_slow, self.beta_fast
        if self.scaling == "yarn" and not 0 < slow < fast < math.inf:
            raise ValueError(f"rope needs 0 < beta_slow < beta_fast, got {slow} and {fast}")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"rope attention_factor must be above 0, got {self.attention_factor}")


def frequencies(rope: Rope, head_size: int) -> tuple[np.ndarray, float]:
    """(radians per position of each pair, float32 [H/2]; the factor of cos and sin)."""
    plain = rope.base ** -(np.arange(0, head_size, 2) / head_size)
    if rope.scaling == "none":
        return plain.astype(np.float32), 1.0
    if rope.scaling == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    if rope.scaling == "llama3":
        turns = rope.original_context * plain / (2 * np.pi)  # over original_context
        keep = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        magnitude = 1.0
    else:
        # the (fractional) index of the pair that makes `beta` rotations over original_context
        slowest, fastest = (
            head_size
            * math.log(rope.original_context / (beta * 2 * math.pi))
            / (2 * math.log(rope.base))
            for beta in (rope.beta_slow, rope.beta_fast)
        )
        if rope.truncate:
            fastest, slowest = float(math.floor(fastest)), float(math.ceil(slowest))
        first, last = max(fastest, 0.0), min(slowest, head_size - 1.0)
        pairs = np.arange(head_size // 2, dtype=np.float64)
        keep = 1 - (pairs - first) / max(last - first, 1e-3)
        magnitude = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    keep = np.clip(keep, 0, 1)
    return (plain * keep + plain / rope.factor * (1 - keep)).astype(np.float32), magnitude


def angles(
    rope: Rope, head_size: int, positions: Int[Array | np.ndarray, "B T"]
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """(cos, sin), float32 [B, T, 1, H/2] each, for positions [B, T]; the 1 is for the heads."""
    per_position, magnitude = frequencies(rope, head_size)
    angle = positions[..., None, None].astype(jnp.float32) * per_position
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 half"], sin: Float[Array, "B T 1 half"]
) -> Float[Array, "B T N H"]:
    """Rotates x [B, T, N, H] in float32 and casts back to its dtype."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
