"""Subject: what calibration and evaluation ask of a model.

`xsake.model.observer.Observer` is one, and `xsake.integrations.flax.Observed` another.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax import Array

from xsake.block_mask import BlockMask


@runtime_checkable
class Subject(Protocol):
    """A model whose attention can be observed and replaced.

    `weights` is a pytree that every method takes, so that it is an argument of compiled code.
    """

    weights: Any
    layers: int
    heads: int
    hash: str

    @property
    def bare(self) -> Subject:
        """Itself without weights, always the same: for static arguments, which JAX keeps."""

    def observe(
        self, weights: Any, tokens: Any, fold: Callable[[Any, Any, Any], Any], carry: Any
    ) -> Any:
        """carry = fold(layer, attention, carry) over the layers of a dense pass of tokens [1, T].

        `attention` has q, k, v [1, T, …] and kernel [N, Hv, width], the output projection; and
        `softmax`, a `hads.chunks.Softmax`, if it has a soft cap, windows or sinks.
        """

    def hidden(self, weights: Any, tokens: Array) -> Array:
        """Final states of a dense pass, [T, width] for tokens [T]."""

    def sparse_hidden(
        self, weights: Any, tokens: Array, choose: Callable[..., BlockMask], corrected: bool = False
    ) -> Array:
        """`hidden` with sparse attention, by the mask that `choose` returns in each layer.

        choose(layer, q, k, v, kernel, softmax) takes what `attention` has in `observe`. With
        `corrected`, centroids replace the dropped blocks.
        """

    def logits(self, weights: Any, hidden: Array) -> Array:
        """float32 [R, vocab] of hidden [R, width]."""


@runtime_checkable
class SubjectWithGradients(Subject, Protocol):
    """One that also has the gradient of its loss: for the policy `loss` and its oracle.

    The class defines `loss_gradients`; one that delegates by `__getattr__` does not count.
    """

    def loss_gradients(self, weights: Any, tokens: Array) -> Array:
        """Of Σ -ln p(next token) of tokens [1, T]: float32 [layers, T, N, Hv].

        With respect to every layer's attention output, before the output projection.
        """


class Bare:
    """Implements `Subject.bare`."""

    weights: Any

    @functools.cached_property
    def bare(self) -> Any:
        """Itself without weights, always the same: for static arguments, which JAX keeps."""
        found = copy.copy(self)
        found.weights = None
        found.__dict__["bare"] = found
        return found
