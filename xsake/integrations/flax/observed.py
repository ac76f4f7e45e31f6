"""HADS on a model of the user's own: its attention modules are hooked while it runs.

    subject = observed(model)                         every module with an attention_fn is a layer
    profile = subject.profile(documents, block=64)    q, k, v and `out` of every layer, dense passes
    plan = hads.make(profile, 0.5, "output")
    logits = subject(subject.weights, tokens, plan)   the same model, attention by the plan

A module's attention_fn is called with q, k and v. For one call of the model it is replaced: in NNX
on a copy of the model, in Linen by `linen.intercept_methods`. Layers are numbered in the order in
which the model calls them; layer.py knows what each of them computes. The model must call them
outside scans, remat and jit of its own, whose traced values cannot leave them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.arguments import as_array
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, as_input_mask
from xsake.hads import Profile, calibrate
from xsake.hads.chunks import Softmax
from xsake.hads.files import hash_of
from xsake.hads.profile import check_curves, check_documents
from xsake.hads.statistics import CURVES
from xsake.hads.subject import Bare
from xsake.integrations.flax.attend import Attend, attention
from xsake.integrations.flax.layer import AttentionFn, Layer

__all__ = ["Observed", "observed"]

Call = Callable[[Any, Any], Any]  # (model or variables, tokens [B, T]) -> logits [B, T, vocab]
# (the module's own attention_fn, its output projection) -> what is called instead of it
Hook = Callable[[AttentionFn, Any], AttentionFn]


class Seen(NamedTuple):
    """What a layer's attention was called with."""

    q: Array  # [B, T, N, H], scaled so that the logits are q kᵀ / √H
    k: Array  # [B, T, K, H]
    v: Array  # [B, T, K, Hv]
    kernel: Array  # [N, Hv, width], the output projection
    softmax: Softmax  # the layer's soft cap and window


def observed(
    model: Any,
    variables: Any = None,
    *,
    call: Call | None = None,
    projection: Callable[[Any], Any] | None = None,
    computes: Mapping[AttentionFn, Any] | None = None,
) -> Observed:
    """A model made with Flax, for calibration, evaluation and plans.

    Every module with an `attention_fn` is a layer: nnx.MultiHeadAttention,
    linen.MultiHeadDotProductAttention, or one of your own that calls its attention_fn with q, k and
    v. That function must be Flax's own or `attention(…)`, whose window, scale and soft cap are
    measured and kept under a plan, or be named in `computes`. Attention must be causal, of whole
    texts to themselves; bias, dropout and other rules are refused.

    Args:
      model: an nnx.Module, or a linen.Module with its `variables`.
      variables: of a linen.Module, as `model.init` returns them.
      call: (model, tokens [B, T]) -> logits [B, T, vocab]; default model(tokens). For Linen:
        (variables, tokens); default model.apply(variables, tokens). Dropout must be off.
      projection: the kernel of the output projection, [N, Hv, width] or [N·Hv, width], of an
        attention module (NNX) or of its parameters (Linen); default that of its `out`.
      computes: what attention functions of your own compute: {function: attention(rule, scale=…,
        logits_soft_cap=…)}. `Observed.profile` checks it on every document.
    """
    run: Any
    _check_model(model, variables)
    if other := [x for x in (computes or {}).values() if not isinstance(x, Attend)]:
        raise TypeError(
            "computes must be {function: attention(…)} with xsake.integrations.flax.attention, got "
            f"{type(other[0]).__name__}"
        )
    if variables is None:
        from flax import nnx

        graph, weights = nnx.split(model)
        run = functools.partial(_run_nnx, graph, call or _call, projection or _out_of_module)
    else:
        weights = variables
        call = call or model.apply
        run = functools.partial(_run_linen, call, projection or _out_of_parameters)
    return Observed(run, weights, computes or {})


def _check_model(model: Any, variables: Any) -> None:
    from flax import linen, nnx

    name = type(model).__name__
    if isinstance(model, linen.Module):
        if variables is None:
            raise ValueError(
                f"{name} is a linen.Module, whose parameters are apart from it; pass "
                "observed(model, variables) with what model.init returned"
            )
    elif not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an nnx.Module or a linen.Module, got {name}")
    elif variables is not None:
        raise ValueError(f"{name} is an nnx.Module, which has its parameters; leave variables out")


def _call(model: Any, tokens: Any) -> Any:
    return model(tokens)


class Observed(Bare):
    """A `hads.subject.Subject`. Its output is its final state: logits [T, vocab]."""

    def __init__(
        self, run: Callable[..., Any], weights: Any, computes: Mapping[AttentionFn, Attend]
    ) -> None:
        self._run, self._computes = run, computes
        self.weights = weights
        leaves = jax.tree.leaves(weights)
        self.hash = hash_of([np.asarray(x) for x in leaves if not _is_key(x)])
        found: list[Seen] = []
        tokens = np.zeros((1, 2), np.int32)
        jax.eval_shape(lambda weights: self.observe(weights, tokens, _collect, found), weights)
        if not found:
            raise ValueError(
                "the model calls no module with an attention_fn; give its attention modules one: "
                "attention_fn=xsake.integrations.flax.attention()"
            )
        heads = {seen.q.shape[2] for seen in found}
        if len(heads) > 1:
            raise ValueError(f"layers have {sorted(heads)} query heads; a plan needs one number")
        self.layers, self.heads = len(found), heads.pop()
        outputs: list[Any] = []
        jax.eval_shape(lambda weights: outputs.append(self(weights, tokens)), weights)
        _check_logits(outputs[0])

    def __call__(self, weights: Any, tokens: Any, mask: Any = None) -> Any:
        """Output of the model for tokens [B, T], dense or under a plan.

        Args:
          weights: `self.weights`, or such as a step of training returns.
          tokens: int [B, T].
          mask: None: the model as it is; a Plan or another InputMask, or a function
            (layer, q, k) -> BlockMask: attention by these masks.
        """
        if mask is None:
            return self._run(weights, tokens, lambda inner, kernel: inner)
        by_input = as_input_mask(mask, "a Plan, another InputMask")
        by_input.check(self.layers, self.heads)
        return self._sparsely(weights, tokens, lambda *seen: by_input)

    def observe(
        self, weights: Any, tokens: Any, fold: Callable[[Any, Any, Any], Any], carry: Any
    ) -> Any:
        """carry = fold(layer, attention, carry) over the layers of a dense pass."""

        def see(inner: AttentionFn, layer: Layer, q: Array, k: Array, v: Array, kernel: Any) -> Any:
            nonlocal carry
            layer.check_can_be_planned()
            seen = Seen(layer.scaled(q), k, v, _by_head(kernel, q, v), layer.softmax)
            carry = fold(layer.number, seen, carry)
            return _as_called(inner, layer, q, k, v)

        self._by_layer(weights, tokens, see)
        return carry

    def _by_layer(
        self, weights: Any, tokens: Any, attend: Callable[..., Any], like: AttentionFn | None = None
    ) -> Any:
        """The model's output with attend(inner, layer, q, k, v, kernel) as every layer's.

        Linen passes on the arguments that a signature names: that of `like`, or the layer's own.
        """
        numbers = itertools.count()

        def hook(inner: AttentionFn, kernel: Any) -> AttentionFn:
            @functools.wraps(like or inner)
            def hooked(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                q, k, v = (jnp.asarray(x) for x in (query, key, value))
                layer = Layer.of(next(numbers), inner, self._computes, args, kwargs, q, k)
                return attend(inner, layer, q, k, v, kernel)

            return hooked

        return self._run(weights, tokens, hook)

    def profile(self, documents: Any, **how: Any) -> Profile:
        """`hads.calibrate` of this model; `how` are its remaining keyword arguments.

        First every layer's attention is compared with what HADS plans, on every document.
        """
        if how.pop("loss", False):
            raise ValueError(
                "loss=True needs gradients of the loss with respect to each head's output, which "
                "are known for xsake.model.Transformer only; leave it out, or pass "
                "gradients=…, see xsake.hads.profile.Gradients"
            )
        documents = [np.asarray(document) for document in documents]
        check_documents(documents, how.get("vocab_size"))
        check_curves(how.get("curves", CURVES), how.get("outputs", True))
        self._check_layers(documents)
        how.setdefault("model_hash", self.hash)
        return calibrate(
            self.bare.observe,
            self.weights,
            documents,
            layers=self.layers,
            heads=self.heads,
            **how,
        )

    def hidden(self, weights: Any, tokens: Array) -> Array:
        """Logits of a dense pass, float32 [T, vocab] for tokens [T]."""
        return self(weights, tokens[None])[0].astype(jnp.float32)

    def sparse_hidden(
        self, weights: Any, tokens: Array, choose: Callable[..., BlockMask], corrected: bool = False
    ) -> Array:
        """`hidden` with sparse attention, by the BlockMask that `choose` returns in each layer.

        choose(layer, q, k, v, kernel, softmax) takes q, k, v [1, T, …], the output projection
        [N, Hv, width] and a plain softmax. With `corrected`, centroids replace the dropped blocks.
        """
        return self._sparsely(weights, tokens[None], choose, corrected)[0].astype(jnp.float32)

    def logits(self, weights: Any, hidden: Array) -> Array:
        """The hidden states, which are logits already."""
        return hidden

    def _sparsely(
        self, weights: Any, tokens: Any, choose: Callable[..., Any], corrected: bool = False
    ) -> Any:
        def sparse(
            inner: AttentionFn, layer: Layer, q: Array, k: Array, v: Array, kernel: Any
        ) -> Any:
            scaled = layer.scaled(q)
            mask = choose(layer.number, scaled, k, v, _by_head(kernel, q, v), layer.softmax)
            if isinstance(mask, InputMask):
                mask = mask.mask(layer.number, scaled, k)
            return layer.corrected(mask, q, k, v) if corrected else layer.attend(mask, q, k, v)

        return self._by_layer(weights, tokens, sparse, like=attention())

    def _check_layers(self, documents: list[Any]) -> None:
        """Raises unless every layer computes what HADS plans, up to rounding, on every document."""

        @jax.jit
        def distances(weights: Any, tokens: Array) -> list[tuple[Array, Array]]:
            found = []

            def compare(
                inner: AttentionFn, layer: Layer, q: Array, k: Array, v: Array, kernel: Any
            ) -> Any:
                layer.check_can_be_planned()
                found.append(layer.distance(inner, self._computes, q, k, v))
                return _as_called(inner, layer, q, k, v)

            self._by_layer(weights, tokens, compare)
            return found

        for number, document in enumerate(documents):
            for layer, pair in enumerate(distances(self.weights, document[None])):
                found, rounding = map(float, pair)
                if not math.isfinite(found):
                    raise ValueError(
                        f"layer {layer} has values that are not finite on document {number}; token "
                        "ids beyond the embedding give such values: pass vocab_size=…"
                    )
                if not found <= rounding:
                    raise ValueError(
                        f"layer {layer} does not compute the causal attention that HADS would "
                        f"plan: on document {number} they differ by {found:.2g} of the largest "
                        f"value, and rounding explains {rounding:.2g}; give windows, scale "
                        "and soft cap to attention(masks.sliding_window(left, 0), scale=…, "
                        "logits_soft_cap=…), and leave out other masks"
                    )


def _as_called(inner: AttentionFn, layer: Layer, q: Array, k: Array, v: Array) -> Any:
    args, kwargs = layer.call
    return inner(q, k, v, *args, **kwargs)


def _collect(layer: int, seen: Seen, found: list[Seen]) -> list[Seen]:
    found.append(seen)
    return found


def _by_head(kernel: Any, q: Array, v: Array) -> Array:
    """The output projection as [N, Hv, width]."""
    kernel = as_array("the output projection", kernel)
    N, Hv = q.shape[2], v.shape[3]
    if kernel.ndim not in (2, 3) or kernel.shape[:-1] not in ((N, Hv), (N * Hv,)):
        raise ValueError(
            f"the output projection must be [N, Hv, width] or [N·Hv, width] with N = {N} and "
            f"Hv = {Hv}, got shape {list(kernel.shape)}; pass observed(…, projection=…)"
        )
    return kernel.reshape(N, Hv, kernel.shape[-1])


def _check_logits(out: Any) -> None:
    if getattr(out, "ndim", None) != 3 or out.shape[:2] != (1, 2):
        shape = f" of shape {list(out.shape)}" if hasattr(out, "shape") else ""
        raise TypeError(
            "the model must return logits [B, T, vocab], but for tokens [1, 2] it returns "
            f"{type(out).__name__}{shape}; pass observed(…, call=…)"
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


# --------------------------------------------------------------------------- hooks of NNX and Linen


def _run_nnx(
    graph: Any,
    call: Call,
    projection: Callable[[Any], Any],
    weights: Any,
    tokens: Any,
    hook: Hook,
) -> Any:
    """The output of a copy of the model whose modules have hooked attention functions."""
    from flax import nnx

    model = nnx.merge(graph, weights)
    module: Any
    for _, module in nnx.iter_modules(model):
        inner = getattr(module, "attention_fn", None)
        if callable(inner):
            module.attention_fn = hook(inner, projection(module))
    return call(model, tokens)


def _out_of_module(module: Any) -> Any:
    if not hasattr(getattr(module, "out", None), "kernel"):
        raise ValueError(
            f"{type(module).__name__} has an attention_fn but no `out` with a kernel; pass "
            "observed(…, projection=…), which returns the kernel of its output projection"
        )
    return module.out.kernel[...]


def _run_linen(
    call: Call, projection: Callable[[Any], Any], variables: Any, tokens: Any, hook: Hook
) -> Any:
    """The output of the model; a module's attention function is hooked while it is called."""
    from flax import linen

    def intercept(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        inner = getattr(module, "attention_fn", None)
        if context.method_name != "__call__" or not callable(inner):
            return next_call(*args, **kwargs)
        hooked = hook(inner, projection(module.variables.get("params", {})))
        with _replaced(module, hooked):
            return next_call(*args, **kwargs)

    with linen.intercept_methods(intercept):
        return call(variables, tokens)


@contextlib.contextmanager
def _replaced(module: Any, hooked: AttentionFn) -> Iterator[None]:
    """A Linen module is frozen, so that its field is set below its `__setattr__`."""
    inner = module.attention_fn
    object.__setattr__(module, "attention_fn", hooked)
    try:
        yield
    finally:
        object.__setattr__(module, "attention_fn", inner)


def _out_of_parameters(parameters: Any) -> Any:
    try:
        return parameters["out"]["kernel"]
    except KeyError:
        raise ValueError(
            f"a module with an attention_fn has parameters {sorted(parameters)} and no out/kernel; "
            "pass observed(…, projection=…), which returns it from these parameters"
        ) from None
