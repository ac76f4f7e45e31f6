"""Pages: the parts of a split sequence that a device asks for, sent in rounds of fixed size.

    needed [pages of the text] ─ all_to_all ─▶ which of my pages every device wants
    round r   C pages to every device ─ all_to_all ─▶ written where they are in the text
    until no device lacks a page: what is sent grows with what is needed, in steps of C pages

Every device runs as many rounds as the one that lacks most, which all of them know. Shapes are
fixed, so that other needs compile nothing, and no need is too large. Gradients of the pages go home
in the same rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import get_abstract_mesh

from xsake import _jax

ROUNDS = 8  # that a need of all pages takes


class Pages(NamedTuple):
    """What this device asks of the others, and the others of it; c devices with n pages each."""

    asked: Array  # int32 [B, c, ROUNDS · C]: pages of device d; n where there is no more
    wanted: Array  # int32 [B, c, ROUNDS · C]: pages of this device that device d asked for
    rounds: Array  # int32 []: the same on all devices
    per_device: int  # n
    axis: str

    @classmethod
    def request(cls, needed: Array, axis: str) -> Pages:
        """needed: bool [B, c · n], the pages of the text that this device reads."""
        devices = lax.axis_size(axis)
        by_device = needed.reshape(len(needed), devices, -1)
        is_other = jnp.arange(devices) != lax.axis_index(axis)
        by_device = by_device & is_other[None, :, None]
        count, n = by_device.sum(-1, dtype=jnp.int32), by_device.shape[-1]
        # needed pages first, in order; then n, which is no page
        first = jnp.argsort(~by_device, axis=-1, stable=True).astype(jnp.int32)
        asked = jnp.where(jnp.arange(n) < count[..., None], first, n)
        size = -(-n // ROUNDS)
        asked = jnp.pad(asked, ((0, 0), (0, 0), (0, ROUNDS * size - n)), constant_values=n)
        axes = tuple(get_abstract_mesh().manual_axes)
        asked = _jax.vary(asked, (axis,))
        most = lax.pmax(_jax.vary(count.max(initial=0), axes), axes)
        wanted = lax.all_to_all(asked, axis, 1, 1, tiled=True)
        return cls(asked, wanted, -(-most // size), n, axis)

    def fetched(self, x: Array) -> Array:
        """x [B, T, …] of every device as [B, c · T, …], with 0 in pages that were not needed."""
        devices, n, (B, T), rest = self.asked.shape[1], self.per_device, x.shape[:2], x.shape[2:]
        pages = x.reshape(B, n, -1)
        row = jnp.arange(B)[:, None]
        offset = jnp.arange(devices, dtype=jnp.int32)[None, :, None] * n

        def arrive(number: Any, text: Array) -> Array:
            asked, wanted = self._round(number)
            sent = pages.at[row, wanted.reshape(B, -1)].get(mode="fill", fill_value=0)
            arrived = lax.all_to_all(sent, self.axis, 1, 1, tiled=True)
            to = jnp.where(asked < n, asked + offset, devices * n).reshape(B, -1)
            return text.at[row, to].set(arrived, mode="drop")

        text = jnp.zeros((B, devices * n, pages.shape[-1]), x.dtype)
        own = lax.axis_index(self.axis) * n
        text = lax.dynamic_update_slice_in_dim(self._vary(text, x), pages, own, axis=1)
        return lax.fori_loop(0, self.rounds, arrive, text).reshape(B, devices * T, *rest)

    def returned(self, d: Array) -> Array:
        """The transpose of `fetched`: d [B, c · T, …] summed over the devices that read a page."""
        devices, n, B, rest = self.asked.shape[1], self.per_device, d.shape[0], d.shape[2:]
        text = d.reshape(B, devices * n, -1)
        row = jnp.arange(B)[:, None]
        offset = jnp.arange(devices, dtype=jnp.int32)[None, :, None] * n

        def go_home(number: Any, total: Array) -> Array:
            asked, wanted = self._round(number)
            at = jnp.where(asked < n, asked + offset, devices * n).reshape(B, -1)
            sent = text.at[row, at].get(mode="fill", fill_value=0)
            home = lax.all_to_all(sent, self.axis, 1, 1, tiled=True).reshape(*wanted.shape, -1)

            def add(device: Any, total: Array) -> Array:  # in a fixed order
                return total.at[row, wanted[:, device]].add(home[:, device], mode="drop")

            return lax.fori_loop(0, devices, add, total)

        first = lax.axis_index(self.axis) * n
        own = lax.dynamic_slice_in_dim(text, first, n, axis=1)
        total = lax.fori_loop(0, self.rounds, go_home, self._vary(own, d))
        return total.reshape(B, d.shape[1] // devices, *rest)

    def _round(self, number: Any) -> tuple[Array, Array]:
        size = self.asked.shape[-1] // ROUNDS
        asked, wanted = (
            lax.dynamic_slice_in_dim(x, number * size, size, axis=2)
            for x in (self.asked, self.wanted)
        )
        return asked, wanted

    def _vary(self, state: Array, x: Array) -> Array:
        """The state of a loop, which varies over whatever x and the requests vary over."""
        return _jax.vary(state, _jax.varying_axes(x, self.asked, self.wanted))
