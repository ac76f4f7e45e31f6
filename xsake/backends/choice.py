"""The backends by name, and which of them runs a call: the one asked for, or the fastest.

Call ─ why_not of every backend ─ those that can run ─┬─ hopper, where it can
                                                      ├─ xla or dense, by the estimates of costs.py
                                                      └─ otherwise the first

`report` passes each choice to `explain_calls`, while that traces a function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax

from xsake.backends import Call, costs, dense, hopper, kernel_rule, reference, tpu, xla

# Fastest first; between those that costs.py has estimates for, the estimate decides. A backend is a
# module with two functions: why_not(call) and forward(call).
BACKENDS: dict[str, ModuleType] = {
    "hopper": hopper,
    "xla": xla,
    "dense": dense,
    "tpu": tpu,  # by name only: xla comes first until these kernels have run on a TPU
    "reference": reference,
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The chosen backend, and for each backend why it cannot run the call, None if it can.

    `chosen` is None if the backend `asked` for by name cannot run the call, which then raises.
    `partial_blocks` is what the kernels of `hopper` evaluate in partial blocks, if it is chosen.
    `estimates` are seconds of a forward and a backward, where they decided between backends.
    """

    chosen: str | None
    reasons: dict[str, str | None]
    asked: str | None = None
    partial_blocks: str | None = None
    estimates: dict[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(f"{name:<{width}}  {why}" for name, why in self.words().items())

    def words(self) -> dict[str, str]:
        """For each backend: chosen, can run, or why it cannot."""
        words = {name: why or "can run" for name, why in self.reasons.items()}
        if self.chosen is not None:
            form = self.partial_blocks
            words[self.chosen] = "chosen" + ("" if form is None else f"; partial blocks: {form}")
        elif self.asked is not None:
            words[self.asked] = f"asked for, but {self.reasons[self.asked]}"
        for name, seconds in self.estimates.items():
            words[name] += (
                f"; estimated {1e3 * seconds:,.1f} ms for a forward and a backward, with "
                f"compilation spread over {costs.CALLS:,} calls"
            )
        return words


def choose(asked: str | None, call: Call) -> Explanation:
    """The backend for a call: the one asked for by name, or the fastest that can run it."""
    check_name(asked)
    if is_empty(call):
        return Explanation(None, dict.fromkeys(BACKENDS, "is not run: an axis is empty"), asked)
    reasons = {name: backend.why_not(call) for name, backend in BACKENDS.items()}
    able = [name for name, why in reasons.items() if why is None and asked in (None, name)]
    chosen = able[0] if able else None
    form = kernel_rule.form(call.mask) if chosen == "hopper" else None
    if asked is None and chosen == "xla" and "dense" in able:
        found = costs.estimates(call, {"xla": costs.listed_pairs, "dense": dense.pairs})
        if found:
            return Explanation(min(found, key=found.__getitem__), reasons, estimates=found)
    return Explanation(chosen, reasons, asked, form)


def check_name(asked: str | None) -> None:
    """Raises unless `asked` names a backend or is None."""
    if asked is not None and asked not in BACKENDS:
        raise ValueError(
            f"implementation {asked!r} is not one of {list(BACKENDS)}; "
            "leave it out for the fastest that can run"
        )


def is_empty(call: Call) -> bool:
    """Whether B, T or S is 0: no backend runs."""
    return 0 in call.sizes[:3]


# -------------------------------------------------------------------------- calls inside a function


def explain_calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Explanation]:
    """The Explanation of every attention call inside function(*args, **kwargs), in order.

    For what calls `dot_product_attention` itself: a model, a Flax module, the functions of
    `xsake.integrations`. The function is traced and not computed; arguments may be shapes. Calls
    inside a `jax.jit` of the function's own that was traced before with such arguments are not
    seen again. Under `shard_map` the calls are those of one device.

    >>> import jax, xsake
    >>> q = jax.ShapeDtypeStruct((1, 256, 4, 64), "float32")
    >>> [x.reasons["xla"] for x in xsake.explain_calls(xsake.dot_product_attention, q, q, q)]
    [None]
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    found: list[Explanation] = []

    def run(*shapes: Any) -> int:
        for i, x in zip(at, shapes, strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(tree, leaves)
        function(*args, **kwargs)
        return 0

    token = _LISTENER.set(found.append)
    try:
        jax.eval_shape(run, *(leaves[i] for i in at))
    finally:
        _LISTENER.reset(token)
    return found


# What `report` calls with every backend that is chosen.
_LISTENER: ContextVar[Callable[[Explanation], None] | None] = ContextVar("listener", default=None)


def report(explanation: Explanation) -> Explanation:
    """Reports a call's backend to `explain_calls`, if it is running."""
    if (listener := _LISTENER.get()) is not None:
        listener(explanation)
    return explanation
