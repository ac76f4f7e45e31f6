"""Halo exchange for windows: a device receives the keys within its window's reach, and no others.

    device d - 1          device d          device d + 1
    ─────────[ left ][─── own keys ───][ right ]─────────      one call over left + own + right

A reach of more than one device takes whole chunks of those between. Before the first and after the
last token there is nothing; what arrives there has an index that no window reaches.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import run_forward
from xsake.backends.choice import BACKENDS
from xsake.parallel.context.local_mask import LocalMask
from xsake.parallel.context.ring import Settings, fetched

FAR = 1 << 30  # an index that is in no window: texts are shorter


def attend(
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    local: LocalMask,
    reach: tuple[int, int],
) -> tuple[Array, Array]:
    """(out, logsumexp); `reach` is the number of keys before and after a device's own."""
    pieces: list[tuple[tuple[Array, Array], Array, Array]] = []  # (k, v), slots, indices
    own = local.keys.local
    me = lax.axis_index(settings.axis)
    for side, tokens in zip((1, -1), reach, strict=True):  # from the devices before, then after
        for hop in range(1, -(-tokens // own) + 1):
            count = min(own, tokens - (hop - 1) * own)
            part = slice(own - count, own) if side == 1 else slice(0, count)
            arrived = fetched(settings, (k[:, part], v[:, part]), hop, side)
            source = me - side * hop
            slot = source * own + jnp.arange(own, dtype=jnp.int32)[part]
            is_real = (source >= 0) & (source < settings.devices)
            index = jnp.where(is_real, slot, -side * FAR)
            slot = jnp.where(is_real, slot, 0)
            pieces.insert(0 if side == 1 else len(pieces), (arrived, slot, index))
        if side == 1:
            slot = local.slots_of(me)[0]
            pieces.append(((k, v), slot, slot))
    keys, slots, indices = zip(*pieces, strict=True)
    near_k, near_v = (_joined([part[i] for part in keys], 1) for i in (0, 1))
    mask = local.mask(_joined(slots, 0)[None], k_index=_joined(indices, 0)[None])
    forward = BACKENDS[settings.backend].forward
    return run_forward(forward, settings.call(q, near_k, near_v, mask))


def _joined(parts: Any, axis: int) -> Array:
    return jnp.concatenate(parts, axis=axis)


def tokens_before(x: Array, count: int, axis: str) -> Array:
    """The `count` tokens before this device's first, [B, count, …] of x [B, T, …]; 0 before all."""
    devices, T = lax.axis_size(axis), x.shape[1]
    pieces: list[Array] = []
    for hop in range(1, -(-count // T) + 1):
        tokens = min(T, count - (hop - 1) * T)
        pairs = [(i, i + hop) for i in range(devices - hop)]
        part = x[:, T - tokens :]
        pieces.insert(0, lax.ppermute(part, axis, pairs) if pairs else jnp.zeros_like(part))
    return _joined(pieces, 1) if pieces else x[:, :0]
