"""HADS on a model of the user's own: its attention modules are hooked while it runs.

    subject = observed(model)                         every module with an attention_fn is a layer
    profile = subject.profile(documents, block=64)    q, k, v and `out` of every layer, dense passes
    plan = hads.make(profile, 0.5, "output")
    logits = subject(subject.weights, tokens, plan)   the same model, attention by the plan

A module's attention_fn is called with q, k and v. For one call of the model it is replaced: in NNX
on a copy of the model, in Linen by `linen.intercept_methods`. Layers are numbered in the order in
which the model calls them. The model must call them outside scans, remat and jit of its own, whose
traced values cannot leave them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import masks
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask, as_input_mask
from xsake.hads import Profile, calibrate, corrected_attention
from xsake.hads.chunks import PLAIN
from xsake.hads.profile import hash_of
from xsake.integrations.flax.attend import attention

__all__ = ["Observed", "observed"]

# Of float32 and of bfloat16 rounding over many layers, relative to the largest logit. Attention
# that is not causal, or scaled otherwise, changes logits by about their own size.
SAME = 2e-2

Call = Callable[[Any, Any], Any]  # (model or variables, tokens [B, T]) -> logits [B, T, vocab]
AttentionFn = Callable[..., Any]
# (the module's own attention_fn, its output projection) -> what is called instead of it
Hook = Callable[[AttentionFn, Any], AttentionFn]


class Seen(NamedTuple):
    """What a layer's attention was called with."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, K, H]
    v: Array  # [B, T, K, Hv]
    kernel: Array  # [N, Hv, width], the output projection


def observed(
    model: Any,
    variables: Any = None,
    *,
    call: Call | None = None,
    projection: Callable[[Any], Any] | None = None,
) -> Observed:
    """A model made with Flax, for calibration, evaluation and plans.

    Every module with an `attention_fn` is a layer: nnx.MultiHeadAttention,
    linen.MultiHeadDotProductAttention, or one of your own that calls its attention_fn with q, k and
    v. Attention must be causal, of whole texts to themselves, with the scale 1/sqrt(H):
    `Observed.profile` checks that.

    Args:
      model: an nnx.Module, or a linen.Module with its `variables`.
      variables: of a linen.Module, as `model.init` returns them.
      call: (model, tokens [B, T]) -> logits [B, T, vocab]; default model(tokens). For Linen:
        (variables, tokens); default model.apply(variables, tokens). Dropout must be off.
      projection: the kernel of the output projection, [N, Hv, width] or [N·Hv, width], of an
        attention module (NNX) or of its parameters (Linen); default that of its `out`.
    """
    run: Any
    if variables is None:
        from flax import nnx

        graph, weights = nnx.split(model)
        run = functools.partial(_run_nnx, graph, call or _call, projection or _out_of_module)
    else:
        weights = variables
        call = call or model.apply
        run = functools.partial(_run_linen, call, projection or _out_of_parameters)
    return Observed(run, weights)


def _call(model: Any, tokens: Any) -> Any:
    return model(tokens)


class Observed:
    """A `hads.subject.Subject`. Its output is its final state: logits [T, vocab]."""

    def __init__(self, run: Callable[..., Any], weights: Any) -> None:
        self._run = run
        self.weights = weights
        leaves = jax.tree.leaves(weights)
        self.hash = hash_of([np.asarray(x) for x in leaves if not _is_key(x)])
        found: list[Seen] = []
        jax.eval_shape(
            lambda weights: self.observe(weights, np.zeros((1, 2), np.int32), _collect, found),
            weights,
        )
        if not found:
            raise ValueError(
                "the model calls no module with an attention_fn; give its attention modules one: "
                "attention_fn=xsake.integrations.flax.attention()"
            )
        heads = {seen.q.shape[2] for seen in found}
        if len(heads) > 1:
            raise ValueError(f"layers have {sorted(heads)} query heads; a plan needs one number")
        self.layers, self.heads = len(found), heads.pop()

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
        state = _State(carry)

        def hook(inner: AttentionFn, kernel: Any) -> AttentionFn:
            @functools.wraps(inner)
            def seen(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                q, k, v = (jnp.asarray(x) for x in (query, key, value))
                layer = state.next_layer()
                state.carry = fold(layer, Seen(q, k, v, _by_head(kernel, q, v)), state.carry)
                return inner(query, key, value, *args, **kwargs)

            return seen

        self._run(weights, tokens, hook)
        return state.carry

    def profile(self, documents: Any, **how: Any) -> Profile:
        """`hads.calibrate` of this model; `how` are its remaining keyword arguments."""
        documents = [np.asarray(document) for document in documents]
        if documents and documents[0].ndim == 1:
            self._check_is_causal(jnp.asarray(documents[0])[None])
        how.setdefault("model_hash", self.hash)
        return calibrate(
            self.observe,
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
        state = _State(None)

        def hook(inner: AttentionFn, kernel: Any) -> AttentionFn:
            @functools.wraps(attention())
            def sparse(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                layer = state.next_layer()
                q, k, v = (jnp.asarray(x) for x in (query, key, value))
                mask = choose(layer, q, k, v, _by_head(kernel, q, v), PLAIN)
                if corrected:
                    return corrected_attention(q, k, v, mask)
                if isinstance(mask, InputMask):
                    return attention(mask, layer=layer)(query, key, value, *args, **kwargs)
                return attention(mask)(query, key, value, *args, **kwargs)

            return sparse

        return self._run(weights, tokens, hook)

    def _check_is_causal(self, tokens: Array) -> None:
        """Raises unless plain causal attention in every layer gives the model's own output."""

        @jax.jit
        def distance(weights: Any) -> Array:
            own = self(weights, tokens).astype(jnp.float32)
            rule = BlockMask.from_rule(masks.causal(), (tokens.shape[1],) * 2)
            causal = self._sparsely(weights, tokens, lambda *seen: rule).astype(jnp.float32)
            return jnp.abs(own - causal).max() / jnp.maximum(jnp.abs(own).max(), 1e-30)

        found = float(distance(self.weights))
        if not found <= SAME:
            raise ValueError(
                "plain causal attention with the scale 1/sqrt(H) in every layer changes the "
                f"model's output by {found:.3g} of its largest value, but HADS plans such "
                "attention; it cannot plan windows, bias, soft caps, or attention to later tokens"
            )


@dataclasses.dataclass
class _State:
    """Of one pass over the layers."""

    carry: Any
    layers: int = 0

    def next_layer(self) -> int:
        self.layers += 1
        return self.layers - 1


def _collect(layer: int, seen: Seen, found: list[Seen]) -> list[Seen]:
    found.append(seen)
    return found


def _by_head(kernel: Any, q: Array, v: Array) -> Array:
    """The output projection as [N, Hv, width]."""
    kernel = jnp.asarray(kernel)
    N, Hv = q.shape[2], v.shape[3]
    if kernel.ndim not in (2, 3) or kernel.shape[:-1] not in ((N, Hv), (N * Hv,)):
        raise ValueError(
            f"the output projection must be [N, Hv, width] or [N·Hv, width] with N = {N} and "
            f"Hv = {Hv}, got shape {list(kernel.shape)}; pass observed(…, projection=…)"
        )
    return kernel.reshape(N, Hv, kernel.shape[-1])


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
        hooked = hook(inner, projection(module.variables["params"]))
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
