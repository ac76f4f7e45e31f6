"""Random attention calls: a Signature is the static part, Contents are the values of the arrays.

    Signature ── inputs(signature, contents) ─┬─ oracle.py, float64 ─┐
    Contents ─┘                               └─ xsake, one backend ─┴─ check: a line for each error

tests/test_properties.py samples contents for a few fixed signatures; tests/fuzz.py samples both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from tests import oracle
from tests.specs import Slot, fill, slots, to_rule
from xsake import BlockMask, _jax

BACKENDS = ("xla", "dense", "reference")

# max |error| / max |reference|, for outputs and gradients.
#   float32: as in tests/backends/test_conformance.py, which gives the reason.
#   bfloat16: both sides get the same rounded inputs. The rest is five roundings of 2**-9 =
#     2e-3: the result, the saved output, and the weights before each product.
#   float16: the same five roundings of 2**-11 = 5e-4.
TOLERANCE = {"float32": (2e-6, 1e-5), "bfloat16": (1e-2, 1e-2), "float16": (2.5e-3, 2.5e-3)}
# Where the terms of a gradient nearly cancel, the error is relative to this share of the terms and
# not to the gradient. The limit is then 1e-5 / 20 = 5e-7 of the terms in float32 (eight
# roundings), and a quarter of a rounding in bfloat16.
CANCELLATION = 1 / 20
# Logsumexp is an exponent: its absolute error is the relative error of the weights made from it.
LOGSUMEXP_FLOOR = 1.0
# LLVM's optimiser takes half of the compile time and changes results by less than the tolerances.
# The conformance tests compile with it, except those with GPU-sized steps. JAX before 0.11 can also
# bypass the MLIR fusion emitters.
FAST_COMPILATION: dict[str, Any] = {"xla_backend_optimization_level": 0}
if _jax.version() < (0, 11):
    FAST_COMPILATION["xla_cpu_use_fusion_emitters"] = False


@dataclass(frozen=True)
class Signature:
    """Everything static in a call. Slots in rule, blocks and keywords are filled by Contents."""

    sizes: tuple[int, int, int, int, int, int, int]  # B, T, S, N, K, H, Hv
    form: str = "rule"  # how the mask is given: rule | from_rule | from_dense | array | none
    rule: tuple[Any, ...] = ("everything",)
    block: tuple[int, int] = (64, 64)
    blocks: Slot | None = None  # the live blocks of from_dense
    keywords: tuple[tuple[str, Any], ...] = ()  # more arguments
    bias: str | None = None  # axes, "BNTS" to "1111"
    sinks: tuple[int, ...] | None = None
    soft_cap: float | None = None
    scale: float | None = None
    dtype: str = "float32"

    def shape(self, axes: str) -> tuple[int, ...]:
        B, T, S, N, K, _, _ = self.sizes
        rows, columns = -(-T // self.block[0]), -(-S // self.block[1])
        letters = {"B": B, "T": T, "S": S, "N": N, "K": K, "i": rows, "j": columns}
        return tuple(letters.get(axis, 1) for axis in axes)

    def slots(self) -> list[Slot]:
        needed = slots((self.rule, self.keywords)) | slots(self.blocks)
        return sorted(needed, key=lambda slot: slot.key)

    def spec(self) -> tuple[Any, ...]:
        """The whole mask of this call as an oracle spec; positions are passed separately."""
        spec, given = self.rule, dict(self.keywords)
        if self.blocks is not None:
            spec = ("and", spec, ("blocks", self.blocks, self.block))
        if given.get("is_causal"):
            spec = ("and", spec, ("causal",))
        if (window := given.get("local_window_size")) is not None:
            window = window if isinstance(window, tuple) else (window, window)
            spec = ("and", spec, ("sliding_window", *window))
        lengths = given.get("query_seq_lengths"), given.get("key_value_seq_lengths")
        if lengths != (None, None):
            spec = ("and", spec, ("lengths", *lengths))
        if "q_segment_ids" in given:
            ids = given["q_segment_ids"], given["kv_segment_ids"]
            spec = ("and", spec, ("documents", *ids))
        return spec


@dataclass(frozen=True)
class Contents:
    """The array values of a call, generated from a seed and a few readable parameters."""

    seed: int = 0
    documents: int = 1  # how many ids there are
    padding: float = 0.0  # the share of negative ids
    is_sorted: bool = True  # ids in runs, or scattered
    order: str = "arange"  # positions: arange | offset | permuted | repeated
    keep: float = 0.5  # the share of True in masks and blocks
    magnitude: float = 1.0  # of q, k, v


def inputs(signature: Signature, contents: Contents):
    """(floats in the signature's dtype, integer and bool arrays by name)."""
    rng = np.random.default_rng(contents.seed)
    arrays = {slot.key: _array(rng, slot, signature, contents) for slot in signature.slots()}
    floats = oracle.random_inputs(rng, *signature.sizes, magnitude=contents.magnitude)
    if signature.bias is not None:
        floats["bias"] = rng.standard_normal(signature.shape(signature.bias))
    if signature.sinks is not None:
        floats["sinks"] = rng.standard_normal(signature.sinks)
    dtypes = {"d_lse": "float32", "sinks": "float32"}
    for name, x in floats.items():
        floats[name] = np.asarray(jnp.asarray(x, dtypes.get(name, signature.dtype)))
    return floats, arrays


def _array(rng, slot: Slot, signature: Signature, contents: Contents) -> np.ndarray:
    shape, name = signature.shape(slot.axes), slot.name
    if name.endswith("ids"):
        ids = rng.integers(0, contents.documents, shape)
        ids = np.sort(ids, -1) if contents.is_sorted else ids
        return np.where(rng.random(shape) < contents.padding, -1 - ids, ids).astype(np.int32)
    if name.endswith("positions"):
        line = np.broadcast_to(np.arange(shape[-1]), shape)
        draw = {
            "arange": lambda: line,
            "offset": lambda: line + rng.integers(0, shape[-1], (*shape[:-1], 1)),
            "permuted": lambda: rng.permuted(line, axis=-1),
            "repeated": lambda: rng.integers(0, shape[-1], shape),
        }
        return draw[contents.order]().astype(np.int32)
    if name.endswith("lengths"):
        longest = signature.sizes[1] if name.startswith("q") else signature.sizes[2]
        return rng.integers(0, longest + 1, shape).astype(np.int32)
    if name.endswith("table"):
        return rng.integers(-40, 40, shape).astype(np.int32)
    return rng.random(shape) < contents.keep


@functools.lru_cache(maxsize=64)
def compiled(signature: Signature, backend: str):
    """jit of (floats, arrays) -> out, logsumexp, gradients by name."""

    def attend(learned, arrays):
        q, k, v = learned["q"], learned["k"], learned["v"]
        return xsake.dot_product_attention(
            q,
            k,
            v,
            learned.get("bias"),
            mask_of(signature, arrays),
            scale=signature.scale,
            logits_soft_cap=signature.soft_cap,
            sinks=learned.get("sinks"),
            implementation=backend,
            return_residual=True,
            **{name: fill(value, arrays) for name, value in signature.keywords},
        )

    @functools.partial(jax.jit, compiler_options=FAST_COMPILATION)
    def run(floats, arrays):
        learned = {name: x for name, x in floats.items() if not name.startswith("d_")}
        (out, lse), pull_back = jax.vjp(lambda x: attend(x, arrays), learned)
        (grads,) = pull_back((floats["d_out"], floats["d_lse"]))
        return out, lse, {f"d{name}": g for name, g in grads.items()}

    return run


def mask_of(signature: Signature, arrays):
    """The argument `mask` of the call."""
    B, T, S, N, *_ = signature.sizes
    rule = fill(signature.rule, arrays)
    match signature.form:
        case "none":
            return None
        case "array":
            return rule[1]
        case "rule":
            return to_rule(rule)
        case "from_rule":
            return BlockMask.from_rule(
                to_rule(rule), (T, S), batch=B, heads=N, block=signature.block
            )
        case "from_dense":
            return BlockMask.from_dense(
                fill(signature.blocks, arrays),
                None if signature.rule == ("everything",) else to_rule(rule),
                shape=(T, S),
                block=signature.block,
            )
    raise ValueError(f"{signature.form=} is not a form")


def errors(signature: Signature, contents: Contents, backends=BACKENDS) -> dict[str, dict]:
    """By backend and quantity: max |error| / max |reference| against the oracle."""
    floats, arrays = inputs(signature, contents)
    B, T, S, N, *_ = signature.sizes
    given = fill(signature.keywords, arrays)
    positions = {name: x for name, x in given if name.endswith("positions")}
    call = {name: floats.get(name) for name in ("q", "k", "v", "bias", "sinks")}
    call |= {
        "allowed": oracle.allowed(fill(signature.spec(), arrays), B, N, T, S, **positions),
        "scale": signature.scale,
        "soft_cap": signature.soft_cap,
    }
    out, lse = oracle.attention(**call)
    floats["d_lse"] = np.where(np.isfinite(lse), floats["d_lse"], np.float32(0))
    cotangents = {"d_out": floats["d_out"], "d_lse": floats["d_lse"]}
    grads = oracle.attention_grads(**call, **cotangents)
    terms = oracle.gradient_terms(**call, **cotangents)
    found = {}
    for backend in backends:
        ours, our_lse, our_grads = compiled(signature, backend)(floats, arrays)
        assert (ours.dtype, our_lse.dtype) == (floats["q"].dtype, np.float32)
        found[backend] = {
            "out": oracle.relative_error(ours, out),
            "lse": oracle.relative_error(our_lse, lse, LOGSUMEXP_FLOOR),
        } | {
            name: oracle.relative_error(our_grads[name], grads[name], CANCELLATION * terms[name])
            for name in grads
        }
    return found


def check(signature: Signature, contents: Contents, backends=BACKENDS) -> list[str]:
    """One line for each quantity whose error against the oracle exceeds its tolerance."""
    forward, backward = TOLERANCE[signature.dtype]
    limits = {"out": forward, "lse": TOLERANCE["float32"][0]}  # the logsumexp is always float32
    lines = []
    for backend, found in errors(signature, contents, backends).items():
        for name, error in found.items():
            limit = limits.get(name, backward)
            if not error <= limit:
                lines.append(f"{backend} {name}: {error:.2e} > {limit:.1e}")
    return lines


def describe(signature: Signature) -> str:
    """The signature without its defaults, as a Python expression that reconstructs it."""
    shown = [
        f"{field.name}={getattr(signature, field.name)!r}"
        for field in fields(signature)
        if getattr(signature, field.name) != field.default
    ]
    return f"Signature({', '.join(shown)})"
