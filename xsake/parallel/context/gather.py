"""The gather: a device receives the kv blocks that some of its row blocks visits, and no others.

    needed [c, C]  ─ all_to_all ─▶ wanted [c, C]        which of my blocks each device wants
    k blocks [wanted] ─ all_to_all ─▶ k [c · C blocks]  then v likewise: keys travel first
    own keys + arrived blocks ─ one call with the mask's lists renumbered

C, the capacity, is fixed, so that a new mask compiles nothing. A device that needs more than C
blocks of another one returns NaN. Where heads have lists of their own, so have kv heads, and they
are gathered one after the other.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, run_forward
from xsake.backends.choice import BACKENDS
from xsake.parallel.context.local_mask import LocalMask
from xsake.parallel.context.ring import Settings


def attend(
    settings: Settings, q: Array, k: Array, v: Array, local: LocalMask, capacity: int
) -> tuple[Array, Array]:
    """(out, logsumexp); the capacity suffices, or the caller discards the result."""
    sizes = Sizes.of(q, k, v)
    classes = local.block_classes(local.all_slots())
    batch, heads = classes.shape[:2]
    if heads > 1 and sizes.K > 1:  # lists of kv heads differ, so that their blocks do
        group = sizes.N // sizes.K
        by_head = classes.reshape(batch, sizes.K, heads // sizes.K, *classes.shape[2:])

        def one(head: Array) -> tuple[Array, Array]:
            numbers = head * group + jnp.arange(group, dtype=jnp.int32)
            rows = jnp.take(q, numbers, axis=2)
            k_head, v_head = (lax.dynamic_index_in_dim(x, head, 2) for x in (k, v))
            lists = lax.dynamic_index_in_dim(by_head, head, 1, keepdims=False)
            return _attend(settings, rows, k_head, v_head, local, lists, numbers, capacity)

        out, logsumexp = lax.map(one, jnp.arange(sizes.K, dtype=jnp.int32))
        out, logsumexp = (jnp.moveaxis(x, 0, 2) for x in (out, logsumexp))  # [B, T, K, G, …]
        whole = (sizes.B, sizes.T, sizes.N)
        return out.reshape(*whole, sizes.Hv), logsumexp.reshape(whole)
    return _attend(settings, q, k, v, local, classes, None, capacity)


def _attend(
    settings: Settings,
    q: Array,
    k: Array,
    v: Array,
    local: LocalMask,
    classes: Array,
    heads: Array | None,
    capacity: int,
) -> tuple[Array, Array]:
    """One call for heads that share their kv blocks; classes [B|1, G|1, row blocks, blocks]."""
    axis, devices, bk = settings.axis, settings.devices, local.block[1]
    per_device, me = local.keys.local // bk, lax.axis_index(settings.axis)
    needed = _needed(settings, local, classes)[:, 0]  # [B|1, c, blocks]
    count = needed.sum(-1)
    # needed blocks first, in order
    listed = jnp.argsort(~needed, axis=-1, stable=True)[..., :capacity].astype(jnp.int32)
    is_real = jnp.arange(capacity) < count[..., None]
    wanted = lax.all_to_all(listed, axis, 1, 1, tiled=True)  # [B|1, c, C] of this device's blocks

    def arrived(x: Array) -> Array:
        """Blocks of x [B, S, K, H] from all devices, [B, c · C · block, K, H]."""
        B, S, K, H = x.shape
        blocks = x.reshape(B, S // bk, bk * K * H)
        at = jnp.broadcast_to(wanted.reshape(len(wanted), -1, 1), (B, devices * capacity, 1))
        sent = jnp.take_along_axis(blocks, at, axis=1)
        return lax.all_to_all(sent, axis, 1, 1, tiled=True).reshape(B, -1, K, H)

    near_k = jnp.concatenate([k, arrived(k)], axis=1)
    near_v = jnp.concatenate([v, arrived(v)], axis=1)
    own = (me * per_device + jnp.arange(per_device, dtype=jnp.int32))[None]
    other = (jnp.arange(devices, dtype=jnp.int32) * per_device)[None, :, None] + listed
    other = other.reshape(len(other), -1)
    own = jnp.broadcast_to(own, (len(other), per_device))
    block = jnp.concatenate([own, other], axis=1)  # [B|1, blocks] in slots
    is_listed = jnp.concatenate([jnp.ones_like(own, bool), is_real.reshape(len(other), -1)], axis=1)
    columns = jnp.take_along_axis(classes, block[:, None, None, :], axis=-1)
    columns = jnp.where(is_listed[:, None, None, :], columns, 0).astype(jnp.int8)
    slots = (block[..., None] * bk + jnp.arange(bk, dtype=jnp.int32)).reshape(len(block), -1)
    mask = dataclasses.replace(local, classes=columns).mask(slots, columns, heads)
    forward = BACKENDS[settings.backend].forward
    return run_forward(forward, settings.call(q, near_k, near_v, mask))


def exceeds(settings: Settings, local: LocalMask, sizes: Sizes, capacity: int) -> Array:
    """Whether this device needs more than `capacity` blocks of another one, bool []."""
    classes = local.block_classes(local.all_slots())
    kv_heads = sizes.K if classes.shape[1] > 1 else 1
    return (_needed(settings, local, classes, kv_heads).sum(-1) > capacity).any()


def _needed(settings: Settings, local: LocalMask, classes: Array, kv_heads: int = 1) -> Array:
    """Blocks of other devices that a row block visits, bool [B|1, kv heads, c, blocks]."""
    batch, devices = classes.shape[0], settings.devices
    live = (classes > 0).any(2).reshape(batch, kv_heads, -1, classes.shape[-1]).any(2)
    is_other = jnp.arange(devices) != lax.axis_index(settings.axis)
    return live.reshape(batch, kv_heads, devices, -1) & is_other[None, None, :, None]
