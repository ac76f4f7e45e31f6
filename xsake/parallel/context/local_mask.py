"""LocalMask: what the queries of one device see, for keys that lie on any device.

    mask | rule | None ─┐
    causal, window ─────┼─ LocalMask.of ─┬─ .mask(slots)  BlockMask of these queries and the keys
    ids, positions ─────┘                │                in these slots of the laid-out sequence
                                         └─ .block_classes(slots)  the same as an array

Segment ids and positions (4 bytes a token) are gathered from all devices first: they decide which
keys have to travel at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax, masks
from xsake.backends import Sizes
from xsake.block_mask import BlockMask
from xsake.block_mask.lists import Lists, classes_in_any_order
from xsake.masks.carrying import Numbered
from xsake.masks.rule import Grid, Leaf, Rule, check_fits
from xsake.parallel.context.layout import Layout
from xsake.parallel.context.local_rule import localized, sent_rule, take
from xsake.parallel.context.rows import Schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalMask:
    """The mask of one device's queries, and what is needed to evaluate it for any keys."""

    q_slot: Leaf  # int32 [T]: where these queries lie in the laid-out sequence
    rule: Any  # Rule | None: decides inside partial blocks
    limits: Any  # Rule of the whole text that holds in full blocks too
    # int8 [B|1, N|K|1, row blocks, kv blocks of the text]: 0 empty, 1 partial, 2 full; None: the
    # rules alone decide
    classes: Leaf
    overflow: Leaf  # bool [] | None: a list of the mask was cut
    q_ids: Leaf  # int32 [B|1, T] | None
    kv_ids: Leaf  # int32 [B|1, S] | None, by slot
    q_positions: Leaf  # int32 [B|1, T] | None
    kv_positions: Leaf  # int32 [B|1, S] | None, by slot
    # Whether `rule` is about these queries only; else it is about all queries of the text.
    rows_are_local: bool = dataclasses.field(metadata={"static": True})
    queries: Layout = dataclasses.field(metadata={"static": True})
    keys: Layout = dataclasses.field(metadata={"static": True})
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})

    @property
    def bound(self) -> Rule:
        """A rule without data that allows at least as much."""
        if self.q_positions is not None or self.kv_positions is not None:
            return masks.everything()
        return self.limits.upper_bound()  # type: ignore[no-any-return]

    @property
    def is_static(self) -> bool:
        """Whether `bound` is all there is, so that the mask is known when a call is traced."""
        data = (self.classes, self.q_ids, self.q_positions, self.kv_positions)
        return all(x is None for x in data) and bool(self.bound == self.limits)

    # ------------------------------------------------------------------------------------- masks

    def mask(
        self,
        k_slot: Array,
        classes: Array | None = None,
        heads: Array | None = None,
        k_index: Array | None = None,
    ) -> BlockMask:
        """The BlockMask of these queries and of the keys in slots [B|1, S'].

        Args:
          k_slot: int32 [B|1, S'].
          classes: of their blocks, int8 [B|1, N|K|1, row blocks, kv blocks]; default: those of the
            blocks that begin at every block_k-th slot.
          heads: int32 [N'], the query heads; default all.
          k_index: int32 [B|1, S'], their places in the text; default those of the slots.
        """
        shape = (self.q_slot.shape[0], k_slot.shape[1])
        k_index = self.keys.index(k_slot) if k_index is None else k_index
        limits = self._limits(k_slot, k_index, heads)
        if self.classes is None:
            count = self.heads if heads is None else heads.shape[0]
            return BlockMask.from_rule(
                limits, shape, batch=self.batch, heads=count, block=self.block
            )
        rule = self.rule
        if rule is not None:
            q_index = None if self.rows_are_local else self.queries.index(self.q_slot)[None]
            rule = localized(rule, q_index, k_index, heads)
        classes = self._listed(k_slot) if classes is None else classes
        found = BlockMask.from_classes(classes, rule, shape, self.block)
        return found if limits == masks.everything() else found & limits

    def block_classes(self, k_slot: Array) -> Array:
        """int8 [B|1, N|K|1, row blocks, blocks of these slots]; limits and ids are applied."""
        limits = self._limits(k_slot, self.keys.index(k_slot))
        shape = (self.q_slot.shape[0], k_slot.shape[1])
        grid = Grid(shape, self.block, self.batch, self.heads)
        live, full = limits.classify(grid)
        allowed = jnp.where(live, jnp.where(full, 2, 1), 0).astype(jnp.int8)
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], *grid.counts))
        if self.classes is None:
            return allowed
        classes = self._listed(k_slot)
        if allowed.shape[1] > classes.shape[1]:
            classes = jnp.repeat(classes, allowed.shape[1] // classes.shape[1], axis=1)
        return jnp.minimum(classes, allowed)

    def slots_of(self, device: Any) -> Array:
        """The slots of a device's keys, int32 [1, S']."""
        return (device * self.keys.local + jnp.arange(self.keys.local, dtype=jnp.int32))[None]

    def all_slots(self) -> Array:
        """The slots of all keys, int32 [1, S]."""
        return jnp.arange(self.keys.length, dtype=jnp.int32)[None]

    def moved(self, rows: Schedule) -> LocalMask:
        """The mask of the queries that this device gets when row blocks are scheduled."""
        rule = sent_rule(self.rule, rows.sent) if self.rows_are_local else self.rule
        at = {"q_slot": 0, "classes": 2, "q_ids": 1, "q_positions": 1}
        given = {name: (getattr(self, name), axis) for name, axis in at.items()}
        new: dict[str, Any] = {
            name: rows.sent(x, axis) for name, (x, axis) in given.items() if x is not None
        }
        if self.overflow is not None:  # the row blocks of a device are now on all of them
            cut = _jax.vary(self.overflow.astype(jnp.int32), (rows.axis,))
            new["overflow"] = lax.pmax(cut, rows.axis) > 0
        return dataclasses.replace(self, rule=rule, **new)

    def _listed(self, k_slot: Array) -> Array:
        number = self.keys.index(k_slot[0, :: self.block[1]]) // self.block[1]
        return jnp.take(self.classes, number, axis=-1)

    def _limits(self, k_slot: Array, k_index: Array, heads: Array | None = None) -> Rule:
        """`limits`, with positions and ids, for the keys in these slots."""
        found = self.limits
        if found != masks.everything():
            found = localized(found, self.queries.index(self.q_slot)[None], k_index, heads)
            found = _with_positions(found, self.q_positions, _in_slots(self.kv_positions, k_slot))
        if self.q_ids is not None:
            found = found & masks.documents(self.q_ids, _in_slots(self.kv_ids, k_slot))
        return found


def _in_slots(x: Array | None, k_slot: Array) -> Array | None:
    """x [B|1, S] in slots [B|1, S']."""
    if x is None:
        return None
    return take(jnp.broadcast_to(x, (max(len(x), len(k_slot)), x.shape[1])), k_slot, 1)


def _with_positions(rule: Any, q: Array | None, kv: Array | None) -> Rule:
    """The outermost positions of a rule from `localized`, replaced by those that are given."""
    if isinstance(rule, Numbered):
        return dataclasses.replace(rule, a=_with_positions(rule.a, q, kv))
    new = {"q_positions": q, "kv_positions": kv}
    return dataclasses.replace(rule, **{name: x for name, x in new.items() if x is not None})


# ------------------------------------------------------------------------------------ construction


def gathered(x: Array, axis: str) -> Array:
    """Integers [B|1, L] of every device as [B|1, devices · L], in slots."""
    return lax.all_gather(x, axis, axis=1, tiled=True)


def row_classes(mask: BlockMask, row: Array) -> Array:
    """The classes of some row blocks of a mask of the whole text, int8 [B|1, N|K|1, R, nk]."""
    start, count, full, index = (
        jnp.asarray(x) for x in (mask.kv_start, mask.kv_count, mask.full_count, mask.kv_index)
    )
    lists = Lists(start[..., row], count[..., row], full[..., row], index, None)
    return classes_in_any_order(lists, mask.grid.counts[1])


def check_block_mask(mask: BlockMask, sizes: Sizes, queries: Layout, keys: Layout) -> None:
    """Raises where a BlockMask does not fit the sequence or its blocks straddle two devices."""
    T, S = mask.shape
    if keys.length != S or T not in (queries.length, queries.local):
        raise ValueError(
            f"mask is for (T, S) = {mask.shape}, but {queries.devices} devices hold "
            f"{(queries.length, keys.length)} tokens; give the mask of the whole sequence, or that "
            f"of each device's queries with shape {(queries.local, keys.length)}"
        )
    for name, size, side in zip(("query", "key"), mask.block, (queries, keys), strict=True):
        if side.run % size:
            raise ValueError(
                f"mask has {name} blocks of {size} tokens, which do not divide the {side.run} "
                f"consecutive tokens that a device holds in layout {side.name!r}; use smaller "
                "blocks or pad the sequence"
            )
    batch, heads = mask.kv_count.shape[:2]
    if batch not in (1, sizes.B) or heads not in (1, sizes.K, sizes.N):
        raise ValueError(
            f"mask has lists for {batch} batch rows and {heads} heads, but a device has "
            f"{sizes.B} and {sizes.N} ({sizes.K} key/value heads); shard it by "
            "mask.partition_spec(batch=…, heads=…)"
        )
    if mask.rule is not None:
        check_fits(mask.rule, sizes.B, sizes.N, T, S)
