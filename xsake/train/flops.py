"""FLOPs per token, and model FLOPs utilisation (MFU) of the device."""

from __future__ import annotations

from xsake import _jax
from xsake.model import Config, parameter_shapes

# Peak FLOP/s of dense bfloat16 matmuls by JAX's device name, from the vendors' data sheets.
PEAK = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
}


def per_token(config: Config, length: int, density: float = 1.0) -> float:
    """FLOPs of forward and backward: 6 per matmul weight, plus attention over visited blocks.

        6 Σ kernel sizes (with the head) + 6 · layers · N · H · T · density

    A query sees T / 2 keys on average; each takes 2 · 2H operations forward, twice that backward.
    With sparse attention `density` is that of the selected branch; the pooled keys and those of the
    window are added, the scores and the loss of an indexer are not. Document boundaries in a
    sequence and recomputed activations are not taken into account.

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
    keys = length * density + _more_keys(config, length)  # twice the mean number of keys
    return 6.0 * (total + config.layers * config.heads * config.head_size * keys)


def _more_keys(config: Config, length: int) -> float:
    """Twice the mean number of keys of a query beside those of its blocks."""
    if not config.is_sparse:
        return 0.0
    settings, keys = config.settings, 0.0
    if config.attention == "nsa" or "g_cmp" in config.branches:
        keys += length / settings.compression_stride
    if settings.window_size is not None:
        keys += 2 * min(settings.window_size, length / 2)
    return keys


def utilisation(tokens_per_second: float, flops_per_token: float, dtype: str) -> float | None:
    """MFU, 0 to 1; None if the peak of the device for this dtype is unknown."""
    peak = PEAK.get(_jax.device_kind())
    if peak is None or dtype == "float32":
        return None
    return tokens_per_second * flops_per_token / peak
