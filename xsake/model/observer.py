"""Observer: runs a model for calibration and evaluation and exposes q, k and v of every layer.

Weights are arguments of every method, so that compiled code can be reused with other weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from xsake.block_mask import BlockMask
from xsake.hads import Certify, Profile, calibrate, certified_attention, corrected_attention
from xsake.hads.chunks import Softmax
from xsake.hads.subject import Bare
from xsake.model import Transformer, cross_entropy
from xsake.model.attend import by_mask, by_window, narrowed
from xsake.model.positions import document_positions
from xsake.parallel import sharding

LOSS_TOKENS = 512  # whose logits are in memory at once


class Observer(Bare):
    """The interface to a model that calibration and evaluation use.

    `weights` is a pytree that every method takes, so that it is an argument of compiled code. On a
    mesh, passes are split over its devices, and every device has what is measured of a layer.
    """

    def __init__(self, model: Transformer) -> None:
        if model.config.is_sparse:
            raise ValueError(
                "HADS plans dense attention, but this model has attention = "
                f"{model.config.attention!r}, which selects its own blocks; use a dense model"
            )
        self.graph, self.weights = nnx.split(model)
        self.layers, self.heads = model.config.layers, model.config.heads
        self.vocab_size = model.config.vocab_size
        self.implementation, self.dtype = model.implementation, model.dtype
        self.hash = model.hash()

    def observe(
        self, weights: Any, tokens: Any, fold: Callable[[Any, Any, Any], Any], carry: Any
    ) -> Any:
        """carry = fold(layer, attention, carry) over the layers of a dense pass."""
        return nnx.merge(self.graph, weights).observe(tokens, fold, carry)

    def profile(self, documents: Any, *, loss: bool = False, **how: Any) -> Profile:
        """`hads.calibrate` of this model; `how` are its remaining keyword arguments.

        With `loss`, the policy `loss` is measured too: one backward pass for each document.
        """
        if loss:
            how["gradients"] = self.bare.loss_gradients
        found = calibrate(
            self.bare.observe,
            self.weights,
            documents,
            layers=self.layers,
            heads=self.heads,
            model_hash=self.hash,
            vocab_size=self.vocab_size,
            **how,
        )
        facts = dataclasses.replace(found.facts, dtype=self.dtype)
        return dataclasses.replace(found, facts=facts)

    def loss_gradients(self, weights: Any, tokens: Any) -> Array:
        """The gradient of the loss with respect to every layer's attention output.

        The loss is Σ -ln p(next token) of tokens [1, T]. float32 [layers, T, N, Hv]. Backward keeps
        the input of each layer and recomputes the rest.
        """
        model = nnx.merge(self.graph, weights)
        model.remat = True
        config, T = model.config, tokens.shape[1]
        attend = by_mask(*(config, None, 1, T), implementation=self.implementation, mesh=model.mesh)

        def loss(change: Array) -> Array:
            def changed(
                layer: Any, q: Array, k: Array, v: Array, state: Any, *more: Any
            ) -> tuple[Array, Any]:
                out, state = attend(layer, q, k, v, state, *more)
                return out + change[layer].astype(out.dtype), state

            hidden, _ = model.run(tokens, document_positions(1, T), changed)
            states, targets = hidden[0, :-1], jnp.asarray(tokens)[0, 1:]
            given = (states, model.head_kernel(), targets, jnp.ones(T - 1))
            return cross_entropy.summed(LOSS_TOKENS, *given, config.final_soft_cap)

        shape = (config.layers, T, config.heads, config.head_size)
        return sharding.everywhere(jax.grad(loss)(jnp.zeros(shape, jnp.float32)), model.mesh)

    def hidden(self, weights: Any, tokens: Array) -> Array:
        """Final hidden states of a dense pass, [T, width] for tokens [T]."""
        return nnx.merge(self.graph, weights).hidden(tokens[None])[0]

    def sparse_hidden(
        self, weights: Any, tokens: Array, choose: Callable[..., BlockMask], corrected: bool = False
    ) -> Array:
        """`hidden` with sparse attention, by the BlockMask that `choose` returns in each layer.

        choose(layer, q, k, v, kernel, softmax) takes q, k, v [1, T, …], the output projection
        [N, Hv, width] and the layer's soft cap, window and sinks. With `corrected`, centroids
        replace the dropped blocks.
        """
        model = nnx.merge(self.graph, weights)
        T, how = len(tokens), self._how(model)

        def attend(
            layer: Any, q: Array, k: Array, v: Array, state: Any, sinks: Array | None = None
        ) -> tuple[Array, Any]:
            whole = sharding.everywhere((q, k, v), model.mesh)
            mask = choose(layer, *whole, *_kernel_and_softmax(model, layer))
            if not corrected:
                by_chosen = by_mask(
                    *(model.config, mask, 1, T),
                    implementation=self.implementation,
                    mesh=model.mesh,
                )
                return by_chosen(layer, q, k, v, state, sinks)

            def of_window(windowed: bool, q: Array, k: Array, v: Array) -> Array:
                own = narrowed(mask, model.config, windowed)
                return corrected_attention(q, k, v, own, sinks=sinks, **how)

            return by_window(model.config, layer, of_window, *whole), state

        return model.run(tokens[None], document_positions(1, T), attend)[0][0]

    def _how(self, model: Transformer) -> dict[str, Any]:
        cap = model.config.soft_cap
        return {"logits_soft_cap": cap, "implementation": self.implementation}

    def certified_hidden(
        self, weights: Any, tokens: Array, choose: Callable[..., BlockMask], certify: Certify
    ) -> tuple[Array, Array]:
        """`sparse_hidden` by certified attention, and the density that it used, float32."""
        model = nnx.merge(self.graph, weights)
        T, how = len(tokens), self._how(model)

        def attend(
            layer: Any, q: Array, k: Array, v: Array, used: Any, sinks: Array | None = None
        ) -> tuple[Array, Any]:
            q, k, v = sharding.everywhere((q, k, v), model.mesh)
            mask = choose(layer, q, k, v, *_kernel_and_softmax(model, layer))

            def of_window(windowed: bool, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
                out, report = certified_attention(
                    q,
                    k,
                    v,
                    narrowed(mask, model.config, windowed),
                    jax.random.fold_in(jax.random.key(certify.seed), layer),
                    threshold=certify.threshold,
                    criterion=certify.criterion,
                    guarantee=certify.guarantee,
                    correct=certify.correct,
                    bound=certify.guarantee is not None,
                    sinks=sinks,
                    **how,
                )
                return out, report.density.mean()

            out, density = by_window(model.config, layer, of_window, q, k, v)
            return out, used + density / self.layers

        hidden, used = model.run(tokens[None], document_positions(1, T), attend, jnp.zeros(()))
        return hidden[0], used

    def logits(self, weights: Any, hidden: Array) -> Array:
        """float32 [R, vocab] of hidden [R, width]."""
        return nnx.merge(self.graph, weights).logits(hidden)


def _kernel_and_softmax(model: Transformer, layer: Any) -> tuple[Array, Softmax]:
    own = model.layer(layer).out.kernel[...], model.softmax(layer)
    return sharding.everywhere(own, model.mesh)
