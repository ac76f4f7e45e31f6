"""Layer: what one call of a module's attention_fn computes, as far as HADS has to know it.

    nnx, linen .dot_product_attention ────┐
    attention(rule, scale=…, …) ──────────┼─ known ─ Attend ─┐
    functools.partial of these ───────────┤                  ├─ Layer ─┬─ softmax, q: to the profile
    yours, {function: attention(…)} ──────┘                  │         └─ attend(mask): with a plan
    what it is called with: mask, bias, dropout, … ──────────┘

Rules are known for every length, and what a layer has is kept: its window, its soft cap, its scale.
An array as mask is known only in its values: `Observed.profile` checks that it is the causal one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import masks
from xsake.block_mask import BlockMask
from xsake.block_mask.input_mask import InputMask
from xsake.hads import corrected_attention
from xsake.hads.chunks import Softmax
from xsake.integrations.flax.attend import Attend, check_call
from xsake.masks.positional import Window
from xsake.masks.rule import Everything, Rule, combine, conjuncts

__all__ = ["Layer"]

AttentionFn = Callable[..., Any]
ARGUMENTS = inspect.signature(Attend.__call__)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A call of an attention_fn."""

    number: int
    own: Attend  # what the function computes
    call: tuple[tuple[Any, ...], dict[str, Any]]  # what it was called with, after q, k and v
    arguments: dict[str, Any]  # the same by name, with those of a functools.partial
    rule: Rule  # of both masks and is_causal, as far as they are rules
    H: int

    @classmethod
    def of(
        cls,
        number: int,
        function: AttentionFn,
        computes: Mapping[AttentionFn, Attend],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        q: Array,
        k: Array,
    ) -> Layer:
        """Of a call function(q, k, v, *args, **kwargs); refuses what is not known."""
        function, given = _unwrapped(function, computes)
        own = _known(number, function, computes)
        if any(function is named for named in computes):  # its own keywords are its own affair
            given = {name: x for name, x in given.items() if name in ARGUMENTS.parameters}
        if isinstance(own.mask, InputMask):
            raise ValueError(
                f"layer {number} has a plan already, attention(plan, layer=…); build the model "
                "with attention() to calibrate it, or to run it under another plan"
            )
        try:
            bound = ARGUMENTS.bind(own, q, k, None, *args, **given | kwargs).arguments
        except TypeError as problem:
            raise TypeError(
                f"layer {number} calls its attention_fn with arguments that Flax's does not take: "
                f"{problem}"
            ) from None
        arguments = dict(list(bound.items())[4:])
        check_call(**arguments)
        if q.ndim != 4 or k.ndim != 4 or q.shape[1] != k.shape[1]:
            raise ValueError(
                f"layer {number} attends from query {list(q.shape)} to key {list(k.shape)}, but "
                "HADS plans attention of texts [B, T, N, H] to themselves"
            )
        rules = [x for x in (own.mask, arguments.get("mask")) if isinstance(x, Rule)]
        if arguments.get("is_causal"):
            rules.append(masks.causal())
        return cls(number, own, (args, kwargs), arguments, combine(rules), q.shape[-1])

    @property
    def has_array(self) -> bool:
        """Whether the call's mask is an array, whose values are not known here."""
        mask = self.arguments.get("mask")
        return mask is not None and not isinstance(mask, Rule | BlockMask)

    def check_can_be_planned(self) -> None:
        """Raises for what HADS does not measure."""
        if self.arguments.get("bias") is not None:
            raise ValueError(
                f"layer {self.number} adds a bias to its logits, which HADS does not plan; leave "
                "the bias out, or encode positions in q and k"
            )
        for mask in (self.own.mask, self.arguments.get("mask")):
            if isinstance(mask, BlockMask):
                raise ValueError(
                    f"layer {self.number} has a BlockMask, which is for one length; give its rule"
                )
        parts = conjuncts(self.rule)
        if other := [x for x in parts if not isinstance(x, Window)]:
            raise ValueError(
                f"layer {self.number} has the rule {other[0]}, but HADS plans causal attention and "
                "sliding windows only; this layer cannot be planned with it"
            )
        if not self.rule.is_causal and not self.has_array:
            raise ValueError(
                f"layer {self.number} sees later tokens, but HADS plans causal attention; call it "
                "with a causal mask, or give it attention(masks.causal())"
            )

    @property
    def softmax(self) -> Softmax:
        """The layer's soft cap and window."""
        cap = self.own.settings.get("logits_soft_cap")
        sizes = [
            x.left + 1 for x in conjuncts(self.rule) if isinstance(x, Window) and x.left is not None
        ]
        return Softmax(
            None if cap is None else jnp.float32(cap),
            jnp.int32(min(sizes)) if sizes else None,
        )

    def scaled(self, q: Array) -> Array:
        """The query for logits q kᵀ / √H, by which HADS measures and selects."""
        scale = self.own.settings.get("scale")
        return q if scale is None else q * jnp.asarray(scale * math.sqrt(self.H), q.dtype)

    def attend(self, mask: Any, q: Array, k: Array, v: Array) -> Any:
        """The layer's attention under a BlockMask, with its own rule, scale and so on."""
        own = self.own.mask
        both = mask if own is None else mask & own
        return Attend(both, None, self.own.decode, self.own.settings)(q, k, v, **self.arguments)

    def corrected(self, mask: BlockMask, q: Array, k: Array, v: Array) -> Array:
        """`attend` with centroids in place of the dropped blocks."""
        cap, how = self.own.settings.get("logits_soft_cap"), self.own.settings.get("implementation")
        mask = mask if isinstance(self.rule, Everything) else mask & self.rule
        return corrected_attention(
            self.scaled(q), k, v, mask, logits_soft_cap=cap, implementation=how
        )

    def distance(
        self,
        function: AttentionFn,
        computes: Mapping[AttentionFn, Attend],
        q: Array,
        k: Array,
        v: Array,
    ) -> tuple[Array, Array]:
        """(how far the function is from what HADS plans, what rounding explains), of max |v|.

        Flax's functions and `attention(…)` are called in float32: logits of up to L differ by a few
        ε · L, which are relative errors of the weights. Functions of one's own may take no float32:
        they are called as the model does, and a few ε of their dtype are allowed.
        """
        wide = jnp.promote_types(q.dtype, jnp.float32)
        args, kwargs = self.call
        how = {x: y for x, y in self.own.settings.items() if x in ("scale", "logits_soft_cap")}
        given: Any = tuple(x.astype(wide) for x in (q, k, v))
        planned = Attend(combine([self.rule, masks.causal()]), None, None, how)(*given)
        bare, keywords = _unwrapped(function, computes)
        allowed: Any = 0.0
        if any(bare is named for named in computes):
            given, allowed = (q, k, v), 4 * jnp.finfo(q.dtype).eps
        else:
            for name, exact in (("dtype", wide), ("precision", lax.Precision.HIGHEST)):
                kwargs = kwargs | {name: exact} if name in self.arguments else kwargs
            if isinstance(bare, Attend):  # a backend that it names need not take float32
                function = functools.partial(Attend(bare.mask, None, bare.decode, how), **keywords)
        with jax.default_matmul_precision("highest"):  # a GPU would round float32 to TF32
            found = function(*given, *args, **kwargs)
        size = jnp.maximum(jnp.abs(v.astype(wide)).max(), jnp.finfo(wide).tiny)
        logits = _longest(q) * _longest(k) * how.get("scale", 1 / math.sqrt(self.H))
        rounding = allowed + jnp.finfo(found.dtype).eps + 4 * jnp.finfo(wide).eps * (1 + logits)
        return jnp.abs(found.astype(wide) - planned).max() / size, rounding


def _unwrapped(
    function: AttentionFn, computes: Mapping[AttentionFn, Attend]
) -> tuple[AttentionFn, dict[str, Any]]:
    """A function inside functools.partial, up to one that is named; and the keywords around it."""
    given: dict[str, Any] = {}
    while (
        isinstance(function, functools.partial)
        and not function.args
        and not any(function is named for named in computes)
    ):
        given = function.keywords | given
        function = function.func
    return function, given


def _longest(x: Array) -> Array:
    """The largest norm of a query or key."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1).max()


def _known(number: int, function: AttentionFn, computes: Mapping[AttentionFn, Attend]) -> Attend:
    """What a function computes, as an Attend."""
    from flax import linen, nnx

    if isinstance(function, Attend):
        return function
    if function in (nnx.dot_product_attention, linen.dot_product_attention):
        return Attend(None, None, None, {})
    for named, attend in computes.items():
        if named is function:
            return attend
    name = getattr(function, "__qualname__", type(function).__name__)
    raise ValueError(
        f"layer {number} has the attention_fn {name}, and what it computes is not known; pass "
        "observed(…, computes={function: attention(…)}) with its rule, scale and soft cap"
    )
