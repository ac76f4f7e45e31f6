"""Calls that mypy must reject: `make lint` fails if one of these `type: ignore` is not needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xsake
from xsake import BlockMask, masks


def wrong_calls() -> None:
    """Never called: only mypy reads it."""
    q = jnp.zeros((1, 128, 2, 64))
    xsake.dot_product_attention(q, q, q, mask=3)  # type: ignore[call-overload]
    xsake.dot_product_attention(q, q, q, scale="small")  # type: ignore[call-overload]
    xsake.dot_product_attention(q, q, q, is_casual=True)  # type: ignore[call-overload]
    xsake.explain(q, q, q, mask=3)  # type: ignore[arg-type]
    BlockMask.from_rule(lambda b, n, q, k: q >= k, (128, 128))  # type: ignore[arg-type]
    masks.sliding_window("wide")  # type: ignore[arg-type]
    out: jax.Array = xsake.dot_product_attention(q, q, q, return_residual=True)  # type: ignore[assignment]
    del out
