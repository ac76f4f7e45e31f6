"""Masks in which 0 hides a key, as other libraries write them: bool, or 0 and 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.arguments import as_array


def visible(name: str, mask: Any) -> Array:
    """mask != 0 as bool. An additive mask, in which 0 shows a key, is refused where it is noticed.

    Under jit values cannot be read: integers are taken as they are, floating numbers are refused.
    """
    found = mask if isinstance(mask, (Array, np.ndarray)) else as_array(name, mask)
    if found.dtype == jnp.bool_:
        return jnp.asarray(found)
    if isinstance(found, jax.core.Tracer):
        if not jnp.issubdtype(found.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be bool or integer under jit, got {found.dtype}; give {name} != 0, "
                f"or, of an additive mask (0 = attend), {name} == 0"
            )
        return found != 0
    values = np.asarray(found)
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(
            f"{name} is {values.dtype} with values other than 0 and 1; of an additive mask "
            f"(0 = attend) give {name} == 0"
        )
    return jnp.asarray(values != 0)
