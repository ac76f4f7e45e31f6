"""The block sizes of a call, which ejkernel's users write in four ways."""

from __future__ import annotations

import dataclasses
from typing import Any

from xsake.masks.integers import size_of

__all__ = ["DEFAULT", "BwdParams", "FwdParams", "block_sizes"]

DEFAULT = 64  # of create_sparsity_mask, and so of layouts that are given without a block size
SIZES = ("q_blocksize", "kv_blocksize")


@dataclasses.dataclass(frozen=True)
class FwdParams:
    """Block sizes of the forward pass; the other fields set ejkernel's own kernels."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class BwdParams:
    """Block sizes of the backward pass, which are those of the forward pass."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


def block_sizes(
    fwd_params: Any, bwd_params: Any, chunk_size: Any, q_blocksize: Any, kv_blocksize: Any
) -> tuple[int, int] | None:
    """(q_blocksize, kv_blocksize), or None if nothing names one; a missing one is DEFAULT.

    fwd_params and bwd_params are the classes above or ejkernel's own.
    """
    found = []
    for name, given in zip(SIZES, (q_blocksize, kv_blocksize), strict=True):
        named = {"chunk_size": chunk_size, name: given}
        for place, params in (("fwd_params", fwd_params), ("bwd_params", bwd_params)):
            named[f"{place}.{name}"] = None if params is None else _sizes_of(place, params)[name]
        sizes = {who: size_of(who, x, 1) for who, x in named.items() if x is not None}
        if len(set(sizes.values())) > 1:
            words = ", ".join(f"{who}={x}" for who, x in sizes.items())
            raise ValueError(
                f"{words} disagree, but forward and backward visit the same blocks; give one size"
            )
        found.append(next(iter(sizes.values()), None))
    if found == [None, None]:
        return None
    q, kv = (DEFAULT if size is None else size for size in found)
    return q, kv


def _sizes_of(place: str, params: Any) -> dict[str, Any]:
    """The two sizes; every other field of the parameters must be None."""
    fields = dict(vars(params)) if hasattr(params, "__dict__") else {}
    if not set(SIZES) <= set(fields):
        raise TypeError(
            f"{place} must have q_blocksize and kv_blocksize, as FwdParams and BwdParams do, "
            f"got {type(params).__name__}"
        )
    for name, value in fields.items():
        if name not in SIZES and value is not None:
            raise ValueError(
                f"{place}.{name}={value!r} sets a kernel of ejkernel, and XSAKE's kernels have "
                "measured settings of their own; leave it None"
            )
    return fields
