"""InputMask: a mask that is computed from q and k, layer by layer.

    Plan ──────────────────────────── is an InputMask ─┐
    (layer, q, k) -> BlockMask ───────── as_input_mask ┴─ .mask(layer, q, k) ─ BlockMask

The model, prefill and training use only the methods `mask`, `at`, `padded`, `check_lengths` and
`check` and the attributes `chunked` and `row_block`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import masks
from xsake.block_mask import BLOCK, BlockMask
from xsake.masks.integers import int_array
from xsake.masks.rule import Leaf, Rule

if TYPE_CHECKING:
    MaskFunction = Callable[..., BlockMask]
else:
    MaskFunction = Any  # at run time `as_input_mask` raises for other types


class InputMask(abc.ABC):
    """A mask that depends on a layer's q and k.

    A subclass that holds arrays must be registered as a pytree.

    Attributes:
      chunked: whether `mask` accepts `first`, which chunked prefill needs.
    """

    chunked: bool = True

    @property
    def row_block(self) -> int:
        """Queries of a row block; prefill replaces padding among them by real ones. Default 128."""
        return BLOCK

    @abc.abstractmethod
    def mask(
        self, layer: Any, q: Array, k: Array, *, segment_ids: Any = None, first: Any = None
    ) -> BlockMask:
        """Returns the BlockMask of one layer; called under jit.

        Args:
          layer: the layer's number; may be traced.
          q: [B, T, N, H] as they enter attention; in prefill, real queries of the same row block
            replace those of padding.
          k: [B, S, K, H]; S is T without `first`.
          segment_ids: int [B, S]. If given, the mask itself must keep documents apart.
          first: position of the first query of a chunk; may be traced. k then holds all
            keys from position 0 on, and those after the queries are not yet written.

        Returns:
          A mask of shape (T, S). The model adds causality and its window where they are missing.
        """

    def at(self, length: int) -> InputMask:
        """This mask for texts of `length` tokens; called outside jit. The default returns self."""
        return self

    def padded(self, length: int, capacity: int) -> InputMask:
        """This mask for texts of `length` tokens that are padded to `capacity`; outside jit.

        It has the same shapes for every length. The default is `at(capacity)`.
        """
        return self.at(capacity)

    def check_lengths(self, lengths: Iterable[int]) -> None:  # noqa: B027  (a hook)
        """Raises if prompts of these lengths cannot be read in one batch.

        By default nothing is refused. A function that calls `plan.mask` and is wrapped by `of` has
        this default, and the weighted end of the plan then lies in the padding; pass the plan
        itself.
        """

    def check(self, layers: int, heads: int) -> None:  # noqa: B027  (a hook)
        """Raises if the mask is not for a model of so many layers and query heads.

        By default nothing is refused. The model calls this outside its scan over layers, where an
        index out of range is clamped.
        """

    @staticmethod
    def of(function: MaskFunction, *, chunked: bool = False) -> InputMask:
        """Wraps a function as an InputMask.

        Args:
          function: (layer, q, k) -> BlockMask. One that carries arrays must be a pytree:
            `jax.tree_util.Partial`, or a registered dataclass with `__call__`.
          chunked: the function also accepts the keyword `first`; it returns a mask (T, S).
        """
        is_leaf = jax.tree_util.all_leaves([function])
        return _FunctionMask(jax.tree_util.Partial(function) if is_leaf else function, chunked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _FunctionMask(InputMask):
    """A function (layer, q, k) -> BlockMask.

    If segment_ids are given, the document rule is applied to its result.
    """

    function: Leaf  # a pytree that is called
    chunked: bool = dataclasses.field(metadata={"static": True})

    def mask(
        self, layer: Any, q: Array, k: Array, *, segment_ids: Any = None, first: Any = None
    ) -> BlockMask:
        if first is not None and not self.chunked:
            raise ValueError(
                "mask is a function of (layer, q, k) and cannot be used for chunked prefill; "
                "if it accepts `first`, wrap it with InputMask.of(mask, chunked=True)"
            )
        extra = {} if first is None else {"first": first}
        found = self.function(layer, q, k, **extra)
        if not isinstance(found, BlockMask):
            kind = type(found).__name__
            raise TypeError(f"mask(layer, q, k) must return a BlockMask, got {kind}")
        return (
            found & document_rule(segment_ids, q.shape[1], first)
            if segment_ids is not None
            else found
        )


def as_input_mask(
    mask: MaskFunction | InputMask, others: str = "a BlockMask, a rule of xsake.masks"
) -> InputMask:
    """Converts `mask` to an InputMask and raises for unsupported types; no other code checks this.

    Args:
      mask: an InputMask or a function (layer, q, k) -> BlockMask.
      others: what else the caller accepts, for the message.
    """
    if isinstance(mask, InputMask):
        return mask
    if isinstance(mask, Rule | BlockMask) or not callable(mask):
        remedy = (
            ""
            if isinstance(mask, Rule | BlockMask)
            else ("; masks.array(mask) converts a bool array to a rule")
        )
        raise TypeError(
            f"mask must be {others} or a callable (layer, q, k) -> BlockMask, "
            f"got {type(mask).__name__}{remedy}"
        )
    return InputMask.of(mask)


def document_rule(segment_ids: Any, T: int, first: Any = None) -> Rule:
    """`masks.documents` of segment_ids [B, S] for all queries, or for T of them from `first` on."""
    ids = int_array("segment_ids", segment_ids, 2)
    if first is None:
        return masks.documents(ids)
    return masks.documents(jnp.take(ids, first + jnp.arange(T), axis=1, mode="clip"), ids)
