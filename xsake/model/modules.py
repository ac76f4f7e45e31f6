"""Linear, Norm and their parameters: the modules that a layer is made of.

Every parameter knows its logical axes, for sharding rules: {"embed": 576, "mlp": 1536}. With
`stack` the parameters of all layers are one array with a leading axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

# Axis names and sizes, in order: {"embed": 576, "mlp": 1536}.
Axes = dict[str, int]


class Linear(nnx.Module):
    """y = x · kernel + bias, from the axes `inputs` to the axes `outputs`."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        inputs: Axes,
        outputs: Axes,
        *,
        bias: bool = False,
        deviation: float = 0.02,
        stack: Axes | None = None,
    ) -> None:
        stack = stack or {}
        self.contracted = len(inputs)
        self.kernel = normal(rngs, stack | inputs | outputs, deviation)
        self.bias = constant(stack | outputs, 0.0) if bias else None

    def __call__(self, x: Array) -> Array:
        """[..., *inputs] -> [..., *outputs], in x's dtype."""
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.contracted)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Norm(nnx.Module):
    """rms: x / sqrt(mean(x²) + ε) · scale;  layer: the same of x - mean(x), + bias; in float32."""

    def __init__(self, kind: str, epsilon: float, axes: Axes, stack: Axes | None = None) -> None:
        self.epsilon = epsilon
        self.scale = constant((stack or {}) | axes, 1.0)
        self.bias = constant((stack or {}) | axes, 0.0) if kind == "layer" else None

    def __call__(self, x: Array) -> Array:
        """[..., width] -> the same, in x's dtype."""
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + self.epsilon)
        wide = wide * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)


def normal(rngs: nnx.Rngs, axes: Axes, deviation: float) -> nnx.Param[Array]:
    """A float32 parameter, normally distributed."""
    draw = deviation * jax.random.normal(rngs.params(), tuple(axes.values()), jnp.float32)
    return _named(draw, axes)


def constant(axes: Axes, value: float) -> nnx.Param[Array]:
    """A float32 parameter, the same everywhere."""
    return _named(jnp.full(tuple(axes.values()), value, jnp.float32), axes)


def _named(value: Array, axes: Axes) -> nnx.Param[Array]:
    """A parameter with logical axis names, for sharding rules."""
    return nnx.Param(value, out_sharding=tuple(axes), eager_sharding=False)
