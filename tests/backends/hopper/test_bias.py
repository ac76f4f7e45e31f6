"""Bias and token masks in the Hopper kernels: lowered, interpreted, and random calls on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from tests import oracle
from tests.conditions import needs_gpu, needs_interpreter, needs_newer_jax
from xsake import BlockMask, Options, _jax, masks
from xsake.backends import Call, hopper
from xsake.backends.options import BackwardTiling, ForwardTiling


class Problem(NamedTuple):
    """A call with a bias or a token mask; 0 in a shape is the whole axis."""

    sizes: tuple[int, int, int, int, int, int, int] = (1, 72, 72, 2, 1, 64, 64)
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: str = "bfloat16"
    token_mask: tuple[int, int, int, int] | None = None
    rule: str = "none"  # none | causal: array & causal | either: array | causal | not: ~array
    block: tuple[int, int] = (64, 64)
    soft_cap: float | None = None
    deterministic: bool = True
    seed: int = 0

    def inputs(self) -> dict[str, Any]:
        """q, k, v, bias, cotangents; a few pairs of the bias are -inf, and one row of the mask."""
        rng = np.random.default_rng(self.seed)
        B, T, S, N, K, H, Hv = self.sizes
        given = oracle.random_inputs(rng, B, T, S, N, K, H, Hv)
        given = {
            name: jnp.asarray(x, jnp.float32 if name == "d_lse" else jnp.bfloat16)
            for name, x in given.items()
        }
        if self.bias is not None:
            shape = [size or full for size, full in zip(self.bias, (B, N, T, S), strict=True)]
            bias = rng.standard_normal(shape)
            bias[rng.random(shape) < 0.05] = -np.inf
            given["bias"] = jnp.asarray(bias, self.bias_dtype)
        if self.token_mask is not None:
            shape = [size or full for size, full in zip(self.token_mask, (B, N, T, S), strict=True)]
            mask = rng.random(shape) < 0.6
            mask[:, :, -1:, : S // 2] = False
            mask[:, :, :64, 64:] = False  # whole blocks of 64
            given["mask"] = mask
        return given

    def spec(self, mask: np.ndarray | None) -> tuple[Any, ...]:
        """The mask for the oracle."""
        array = ("array", mask)
        match self.rule:
            case "none":
                return ("everything",) if mask is None else array
            case "causal":
                return ("causal",) if mask is None else ("and", array, ("causal",))
            case "either":
                return ("or", array, ("causal",))
            case "not":
                return ("not", array)
        raise AssertionError(self.rule)

    def block_mask(self, mask: np.ndarray | None) -> BlockMask:
        """The mask for xsake."""
        causal = masks.causal()
        array = masks.everything() if mask is None else masks.array(mask)
        rule = {"none": array, "causal": array & causal, "either": array | causal, "not": ~array}
        B, T, S, N, *_ = self.sizes
        return BlockMask.from_rule(rule[self.rule], (T, S), batch=B, heads=N, block=self.block)

    def expected(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """(output, logsumexp and gradients; sizes of the terms of the gradients)."""
        B, T, S, N, *_ = self.sizes
        exact = {name: np.asarray(x, np.float64) for name, x in given.items() if name != "mask"}
        d_out, d_lse = exact.pop("d_out"), exact.pop("d_lse")
        arrays = [exact.pop(name) for name in ("q", "k", "v")]
        allowed = oracle.allowed(self.spec(given.get("mask")), B, N, T, S)
        setting = {"allowed": allowed, "soft_cap": self.soft_cap, **exact}
        out, lse = oracle.attention(*arrays, **setting)
        cotangents = {"d_out": d_out, "d_lse": np.where(np.isfinite(lse), d_lse, 0)}
        grads = oracle.attention_grads(*arrays, **setting, **cotangents)
        terms = oracle.gradient_terms(*arrays, **setting, **cotangents)
        return {"out": out, "lse": lse, **grads}, terms


def results(problem: Problem, given: dict[str, Any], run: Any) -> dict[str, Any]:
    """run(moving arrays) -> (out, lse), and all gradients by the names that the oracle has."""
    names = [name for name in ("q", "k", "v", "bias") if name in given]
    (out, lse), pull_back = jax.vjp(run, *(given[name] for name in names))
    d_lse = jnp.where(jnp.isfinite(lse), given["d_lse"], 0)
    grads = pull_back((given["d_out"], d_lse))
    return {"out": out, "lse": lse, **dict(zip((f"d{x}" for x in names), grads, strict=True))}


def assert_agrees(found: dict[str, Any], want: dict[str, Any], terms: dict[str, float]) -> None:
    """As the conformance tests do, with their limits."""
    assert found.keys() == want.keys()
    for name, x in want.items():
        floor = 1.0 if name == "lse" else 1e-3 * terms.get(name, 0.0)
        error = oracle.relative_error(found[name], x, floor=floor)
        assert error <= 1e-2, f"{name}: {error}"


def options_of(problem: Problem) -> Options:
    return Options(
        deterministic=problem.deterministic,
        hopper_forward=ForwardTiling(),
        hopper_backward=BackwardTiling(),
    )


def call_of(problem: Problem, given: dict[str, Any], q: Any, k: Any, v: Any, bias: Any) -> Call:
    mask = problem.block_mask(given.get("mask"))
    scale = problem.sizes[5] ** -0.5
    return Call(q, k, v, bias, mask, scale, problem.soft_cap, options_of(problem))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# ------------------------------------------------------------------------------------- interpreted

INTERPRETED = {
    "bias that heads share, and a token mask under causality": Problem(
        (1, 65, 71, 2, 1, 64, 64), bias=(1, 1, 0, 0), token_mask=(1, 1, 0, 0), rule="causal",
        block=(128, 128),
    ),
}  # fmt: skip
ALSO_INTERPRETED = {
    "bias of every pair, and a token mask under causality": Problem(
        bias=(0, 0, 0, 0), token_mask=(1, 0, 0, 0), rule="causal"
    ),
    "float32 bias that heads share, soft cap": Problem(
        (1, 65, 71, 2, 2, 64, 64),
        bias=(1, 1, 0, 0),
        bias_dtype="float32",
        soft_cap=3.0,
        block=(128, 128),
    ),
    "bias per key": Problem(bias=(1, 0, 1, 0), rule="causal", block=(128, 64)),
    "bias per query": Problem(bias=(1, 1, 0, 1), rule="causal"),
    "bias per batch row": Problem((2, 30, 40, 2, 2, 64, 64), bias=(0, 1, 0, 0)),
    "token mask in a disjunction": Problem(token_mask=(1, 1, 0, 0), rule="either"),
    "no token mask": Problem(token_mask=(1, 1, 0, 0), rule="not", block=(64, 128)),
    "token mask per key": Problem(token_mask=(1, 0, 1, 0), block=(128, 64)),
    "token mask per query": Problem((1, 65, 71, 2, 2, 64, 64), token_mask=(1, 0, 0, 1)),
    "float16 bias, 128 keys a step": Problem(
        (1, 70, 90, 1, 1, 64, 64), bias=(1, 1, 0, 0), bias_dtype="float16", block=(128, 128)
    ),
}


@pytest.mark.parametrize("name", [*INTERPRETED, *(slow(name) for name in ALSO_INTERPRETED)])
@needs_interpreter
def test_bias_and_token_masks_agree_when_interpreted(name, monkeypatch):
    """Output, logsumexp and every gradient; rows without a key, odd lengths, shared axes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.backends.hopper import backward_kernel, forward_kernel

    problem = (INTERPRETED | ALSO_INTERPRETED)[name]
    interpret = plgpu.InterpretGPUParams()
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 2)
    for module, entry in ((forward_kernel, "forward"), (backward_kernel, "backward")):
        run = functools.partial(getattr(module, entry), interpret=interpret)
        monkeypatch.setattr(module, entry, run)
    given = problem.inputs()

    def attend(q, k, v, bias=None):
        return hopper.forward(call_of(problem, given, q, k, v, bias))

    jax.clear_caches()  # so that the kernels are traced again, through the functions above
    assert_agrees(results(problem, given, attend), *problem.expected(given))
    jax.clear_caches()


# ----------------------------------------------------------------------------------------- lowered


@pytest.mark.parametrize(
    ("problem", "kernels"),
    [
        # Forward, work table; transposed lists, work table, fused backward.
        (Problem((1, 500, 500, 4, 2, 128, 128), bias=(1, 0, 0, 0), token_mask=(1, 1, 0, 0)), 5),
        slow(Problem((1, 500, 500, 4, 2, 64, 64), bias=(1, 0, 1, 0), rule="either"), 5),
        slow(Problem((1, 500, 500, 4, 2, 128, 128), token_mask=(1, 0, 0, 0), rule="not"), 5),
        slow(Problem((1, 500, 500, 4, 2, 64, 64), bias=(1, 1, 0, 0), bias_dtype="float32"), 5),
    ],
    ids=["bias, token mask", "per key", "rule of a token mask", "float32"],
)
@needs_newer_jax
def test_bias_and_token_masks_lower_for_cuda(problem, kernels):
    """The gradient of a bias of every pair takes a kernel and a work table more."""
    problem = problem._replace(
        block=(128, 128), token_mask=problem.token_mask or (1, 1, 0, 0), deterministic=False
    )
    given = problem.inputs()
    names = [name for name in ("q", "k", "v", "bias") if name in given]

    def lowered(moving):
        still = {name: given[name] for name in names if name not in moving}

        def attend(*arrays):
            arrays = still | dict(zip(moving, arrays, strict=True))
            return hopper.forward(call_of(problem, given, **({"bias": None} | arrays)))

        def gradients(*arrays):
            results, pull_back = jax.vjp(attend, *arrays)
            return pull_back(results)

        shapes = [jax.ShapeDtypeStruct(given[x].shape, given[x].dtype) for x in moving]
        traced = jax.jit(gradients).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")

    assert lowered(["q", "k", "v"]) == kernels
    if problem.bias is not None:
        by_pairs = problem.bias[2] != 1
        assert lowered(["q", "k", "v", "bias"]) == kernels + 2 * by_pairs


@pytest.mark.parametrize(("size", "overlap"), [(64, True), (128, False)])
@needs_newer_jax
def test_a_bias_in_shared_memory_lowers_for_cuda(size, overlap):
    """With the other tiling that leaves out operations of a step; row blocks of 64 and of 128."""
    problem = Problem((1, 256, 256, 2, 1, size, size), bias=(1, 1, 0, 0), block=(size, 128))
    given = problem.inputs()
    tiling = ForwardTiling(bias_in_shared=True, lazy_maximum=True, overlap=overlap)

    def attend(q, k, v, bias):
        call = call_of(problem, given, q, k, v, bias)
        return hopper.forward(dataclasses.replace(call, options=Options(hopper_forward=tiling)))

    def observe(q, k, v, bias):  # statistics have that memory
        call = call_of(problem, given, q, k, v, bias)
        call = dataclasses.replace(call, options=Options(hopper_forward=tiling))
        return hopper.observed(call, None, "blocks")

    shapes = [jax.ShapeDtypeStruct(given[x].shape, given[x].dtype) for x in ("q", "k", "v", "bias")]
    for run in (attend, observe):
        lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("@mosaic_gpu") == 2  # with the work table


# ------------------------------------------------------------------------------------------- words


@needs_newer_jax
def test_words_have_the_bits_of_the_columns_that_a_thread_holds():
    """Bit 2 g + j of word c is column 8 g + 2 c + j; past the end, and past the last row, 0."""
    from xsake.backends.hopper import token_words
    from xsake.backends.hopper.shape import Shape

    rng = np.random.default_rng(0)
    mask = rng.random((1, 2, 70, 190)) < 0.5
    x = jnp.zeros((1, 70, 2, 64), jnp.bfloat16)
    y = jnp.zeros((1, 190, 2, 64), jnp.bfloat16)
    lists = BlockMask.from_rule(masks.everything(), (70, 190), block=(64, 128)).lists
    shape = Shape.of(x, y, y, lists, (64, 128))
    by_query = np.asarray(token_words.pack(jnp.asarray(mask), shape, 0)).view(np.uint32)
    by_key = np.asarray(token_words.pack(jnp.asarray(mask), shape, 1)).view(np.uint32)
    assert by_query.shape == (1, 2, 128, 8)
    assert by_key.shape == (1, 2, 4, 256)
    padded = np.zeros((2, 128, 256), bool)
    padded[:, :70, :190] = mask[0]
    for words, wide in ((by_query[0], padded), (by_key[0].swapaxes(1, 2), padded.mT)):
        for chunk, c, g, j in np.ndindex(wide.shape[2] // 128, 4, 16, 2):
            bits = words[..., chunk * 4 + c] >> np.uint32(2 * g + j) & 1
            np.testing.assert_array_equal(bits, wide[..., chunk * 128 + 8 * g + 2 * c + j])


# ------------------------------------------------------------------------------------- on the card


def drawn(seed: int) -> Problem:
    """A random call: sizes, axes of bias and mask, dtypes, rules, blocks."""
    rng = np.random.default_rng(seed)

    def axes():
        return tuple(int(x) for x in rng.integers(0, 2, 4))

    K, group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3]))
    T, S = (int(rng.integers(1, 420)) for _ in range(2))
    size = int(rng.choice([40, 64, 128, 192]))
    kind = rng.choice(["bias", "mask", "both"])
    return Problem(
        (int(rng.integers(1, 3)), T, S if rng.random() < 0.6 else T, K * group, K, size, size),
        bias=axes() if kind != "mask" else None,
        bias_dtype=str(rng.choice(["bfloat16", "float32", "float16"])),
        token_mask=axes() if kind != "bias" else None,
        rule=str(
            rng.choice(
                ["none", "causal", "either", "not"] if kind != "bias" else ["none", "causal"]
            )
        ),
        block=tuple(int(x) for x in rng.choice([64, 128, 128], 2)),
        soft_cap=3.0 if rng.random() < 0.25 else None,
        deterministic=bool(rng.random() < 0.3),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.gpu
@needs_gpu
def test_random_calls_agree_on_a_gpu(seed):
    """Any axes of bias and token mask, odd lengths, grouped heads, every block size."""
    problem, tiling = drawn(seed), None  # the measured one
    if seed >= 60:
        tiling = ForwardTiling(bias_in_shared=True, lazy_maximum=seed % 2 == 0, lazy_rescale=8.0)
        problem = problem._replace(
            sizes=(*problem.sizes[:5], *[min(x, 128) for x in problem.sizes[5:]]),
            bias=(*(problem.bias or (1, 0))[:2], 0, 0),
            bias_dtype="float16" if seed % 3 else "bfloat16",
        )
    given = problem.inputs()

    def attend(q, k, v, bias=None):
        return xsake.dot_product_attention(
            q,
            k,
            v,
            bias,
            problem.block_mask(given.get("mask")),
            logits_soft_cap=problem.soft_cap,
            return_residual=True,
            implementation="hopper",
            options=Options(deterministic=problem.deterministic, hopper_forward=tiling),
        )

    found = jax.jit(functools.partial(results, problem, run=attend))
    arrays = {name: x for name, x in given.items() if name != "mask"}
    first = found(arrays)
    assert_agrees(first, *problem.expected(given))
    if problem.deterministic:
        again = found(arrays)
        for name, x in first.items():
            np.testing.assert_array_equal(
                np.asarray(x, np.float32), np.asarray(again[name], np.float32)
            )


@pytest.mark.gpu
@needs_gpu
def test_a_block_that_a_token_mask_empties_is_not_read():
    """NaN in its keys, values and bias: the results do not change by one bit."""
    problem = Problem(
        (1, 500, 500, 4, 2, 128, 128), bias=(1, 0, 0, 0), token_mask=(1, 1, 0, 0), block=(128, 128)
    )
    given = problem.inputs()
    mask = np.array(given["mask"])
    mask[..., 128:256] = False
    given["mask"] = mask

    def run(given, q, k, v, bias):
        return hopper.forward(call_of(problem, given, q, k, v, bias))

    clean = results(problem, given, functools.partial(run, given))
    poison = dict(given)
    for name in ("k", "v"):
        poison[name] = given[name].at[:, 128:256].set(jnp.nan)
    poison["bias"] = given["bias"].at[..., 128:256].set(jnp.nan)
    found = results(problem, poison, functools.partial(run, poison))
    for name, x in clean.items():
        np.testing.assert_array_equal(
            np.asarray(x, np.float32), np.asarray(found[name], np.float32)
        )
