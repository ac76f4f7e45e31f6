"""InputMask: a mask that is computed from q and k, layer by layer.

    Plan ──────────────────────────── is an InputMask ─┐
    (layer, q, k) -> BlockMask ────────────── lifted ──┴─ .mask(layer, q, k) ─ BlockMask

A model, chunked prefill and training know masks of this kind by these two methods alone.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import masks
from xsake.block_mask import BlockMask
from xsake.masks.rule import Leaf, Rule

if TYPE_CHECKING:
    MaskFunction = Callable[..., BlockMask]
else:
    MaskFunction = Any  # at run time `lifted` refuses other types, with a message of its own


class InputMask(abc.ABC):
    """A mask that depends on a layer's q and k. Register a subclass that holds arrays as a pytree.

    Attributes:
      by_parts: whether `mask` takes `first`; prompts longer than a chunk need it.
    """

    by_parts: bool = True

    @abc.abstractmethod
    def mask(
        self, layer: Any, q: Array, k: Array, *, segment_ids: Any = None, first: Any = None
    ) -> BlockMask:
        """The BlockMask of one layer, which runs under jit.

        Args:
          layer: the layer's number; may be traced.
          q: [B, T, N, H] as they enter attention.
          k: [B, S, K, H]; S is T without `first`.
          segment_ids: int [B, S]. If given, the mask itself must keep documents apart.
          first: position of the first query, for a part of a text; may be traced. k then holds all
            keys from position 0 on, and those after the queries are not yet written.

        Returns:
          A mask of shape (T, S). The model adds causality and its window where they are missing.
        """

    def at(self, length: int) -> InputMask:
        """This mask for texts of `length` tokens; called outside jit. The default returns self."""
        return self

    @staticmethod
    def of(function: MaskFunction, *, by_parts: bool = False) -> InputMask:
        """A function as an InputMask.

        Args:
          function: (layer, q, k) -> BlockMask. One that carries arrays must be a pytree:
            `jax.tree_util.Partial`, or a registered dataclass with `__call__`.
          by_parts: the function takes `first` as a keyword too and returns a mask of shape (T, S).
        """
        is_leaf = jax.tree_util.all_leaves([function])
        return _Lifted(jax.tree_util.Partial(function) if is_leaf else function, by_parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Lifted(InputMask):
    """A function (layer, q, k) -> BlockMask; documents are kept apart after it."""

    function: Leaf  # a pytree that is called
    by_parts: bool = dataclasses.field(metadata={"static": True})

    def mask(
        self, layer: Any, q: Array, k: Array, *, segment_ids: Any = None, first: Any = None
    ) -> BlockMask:
        if first is not None and not self.by_parts:
            raise ValueError(
                "mask is a function of (layer, q, k) and cannot serve a part of a text; "
                "InputMask.of(mask, by_parts=True) wraps one that takes `first`"
            )
        part = {} if first is None else {"first": first}
        found = self.function(layer, q, k, **part)
        if not isinstance(found, BlockMask):
            kind = type(found).__name__
            raise TypeError(f"mask(layer, q, k) must return a BlockMask, got {kind}")
        return (
            found & document_rule(segment_ids, q.shape[1], first)
            if segment_ids is not None
            else found
        )


def lifted(
    mask: MaskFunction | InputMask, others: str = "a BlockMask, a rule of xsake.masks"
) -> InputMask:
    """`mask` as an InputMask; the one place that tells functions from wrong types.

    Args:
      mask: an InputMask or a function (layer, q, k) -> BlockMask.
      others: what else the caller accepts, for the message.
    """
    if isinstance(mask, InputMask):
        return mask
    if isinstance(mask, Rule | BlockMask) or not callable(mask):
        raise TypeError(
            f"mask must be {others} or a callable (layer, q, k) -> BlockMask, "
            f"got {type(mask).__name__}; use masks.array(mask) for a bool array"
        )
    return InputMask.of(mask)


def document_rule(segment_ids: Any, T: int, first: Any = None) -> Rule:
    """`masks.documents` of segment_ids [B, S] for all queries, or for T of them from `first` on."""
    ids = jnp.asarray(segment_ids)
    if first is None:
        return masks.documents(ids)
    return masks.documents(jnp.take(ids, first + jnp.arange(T), axis=1, mode="clip"), ids)
