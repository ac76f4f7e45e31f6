"""How much arithmetic a token costs, and how much the device could do: their ratio is MFU."""

from __future__ import annotations

from xsake import _jax
from xsake.model import Config, parameter_shapes

# Dense bfloat16 multiply-adds in FLOP/s, by JAX's name of the device, from the makers' data sheets.
PEAK = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
}


def per_token(config: Config, length: int, density: float = 1.0) -> float:
    """Of forward and backward: 6 for each weight of a matrix, and attention over visited blocks.

        6 Σ kernel sizes (the head's too) + 6 · layers · N · H · T · density

    A query sees T / 2 keys on average, each for 2 · 2H operations forward and twice that backward.
    Documents within a row and activations that are computed again are not counted.

    >>> from xsake.model import PRESETS
    >>> f"{per_token(PRESETS['gpt2'], 1024):.3g}"
    '7.98e+08'
    """
    shapes = parameter_shapes(config)
    kernels = {name: shape for name, shape in shapes.items() if name.endswith(".kernel")}
    if config.tied:
        kernels["head"] = shapes["embed.tokens"]
    total = 0
    for shape in kernels.values():
        size = 1
        for axis in shape:
            size *= axis
        total += size
    attention = config.layers * config.heads * config.head_size * length * density
    return 6.0 * (total + attention)


def utilisation(tokens_per_second: float, flops_per_token: float, dtype: str) -> float | None:
    """MFU, 0 to 1; None where the device's peak for this dtype is not known."""
    peak = PEAK.get(_jax.device_kind())
    if peak is None or dtype == "float32":
        return None
    return tokens_per_second * flops_per_token / peak
