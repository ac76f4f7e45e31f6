"""The suite `hopper-bias`: bias and token masks on Hopper, beside `jax.nn` on XLA and on cuDNN.

    bias per head      bfloat16 [1, N, T, T]
    bias, shared       bfloat16 [1, 1, T, T]: its gradient is a sum over heads
    bias per key       bfloat16 [1, N, 1, T]
    token mask         bool [1, 1, T, T], 6 of 10 pairs: every block is partial
    blocks of tokens   the same, in 4 of 10 blocks of 128 × 128; the other blocks are empty

An implementation is measured forward, forward and backward together, and with the gradient of the
bias too. TFLOP/s count visited blocks, or all pairs where none is empty: 2·(H + Hv) per pair
forward, 2.5 times that for the backward. Every timed result is compared with a float32 reference.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake.attention import dot_product_attention
from xsake.backends import reference
from xsake.bench import programs
from xsake.bench.checks import ERROR_LIMIT, WrongResultError
from xsake.bench.suites import Part, Record
from xsake.bench.timing import alone, beside, time_queued

HEADS = 16
CHECKED = (0, 15)  # heads whose results are compared with the reference
BLOCK = 128
# Whether a bias has values of its own for every head, and whether all queries share them.
BIAS_KINDS = {"bias per head": (True, False), "bias, shared": (False, False)}
BIAS_KINDS |= {"bias per key": (True, True)}


class Case(NamedTuple):
    """One call; sampled on the device."""

    kind: str
    T: int
    H: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.kind}, 1·{HEADS}·{self.T}·{self.H}"


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Every kind at every length and head size."""
    for T in (1024,) if quick else (2048, 4096, 16384):
        for H in (128, 64):
            for kind in (*BIAS_KINDS, "token mask", "blocks of tokens"):
                case = Case(kind, T, H)
                yield Part(case.name, functools.partial(records, case))


def sampled(case: Case) -> dict[str, Array]:
    """q, k, v, d_out bfloat16 [1, T, N, H], and the bias or the mask."""
    keys = iter(jax.random.split(jax.random.key(case.T), 6))
    tokens, T = (1, case.T, HEADS, case.H), case.T

    def normal(shape: tuple[int, ...]) -> Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    given = {name: normal(tokens) for name in ("q", "k", "v", "d_out")}
    if case.kind in BIAS_KINDS:
        per_head, per_key = BIAS_KINDS[case.kind]
        given["bias"] = normal((1, HEADS if per_head else 1, 1 if per_key else T, T))
        return given
    mask = jax.random.bernoulli(next(keys), 0.6, (1, 1, T, T))
    if case.kind == "blocks of tokens":
        blocks = jax.random.bernoulli(next(keys), 0.4, (T // BLOCK, T // BLOCK))
        blocks = blocks | jnp.eye(T // BLOCK, dtype=bool)
        mask = mask & jnp.repeat(jnp.repeat(blocks, BLOCK, 0), BLOCK, 1)
    given["mask"] = mask
    return given


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "xsake": functools.partial(dot_product_attention, implementation="hopper"),
    "jax_nn_xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "jax_nn_cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}


def directions(attend: Callable[..., Array], has_bias: bool) -> dict[str, Callable[..., Any]]:
    """What is timed: functions of the sampled arrays."""

    def forward(given: dict[str, Array]) -> Any:
        more = {name: given[name] for name in ("bias", "mask") if name in given}
        return (attend(given["q"], given["k"], given["v"], **more),)

    def both(given: dict[str, Array], names: tuple[str, ...]) -> Any:
        moving = {name: given[name] for name in names}
        (out,), pull_back = jax.vjp(lambda moving: forward(given | moving), moving)
        return out, pull_back((given["d_out"],))[0]

    found: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "forward+backward": functools.partial(both, names=("q", "k", "v")),
    }
    if has_bias:
        every = ("q", "k", "v", "bias")
        found["forward+backward with the bias"] = functools.partial(both, names=every)
    return found


def records(case: Case, done: list[Record]) -> Iterator[Record]:
    """A record for each direction and implementation."""
    shapes = jax.eval_shape(functools.partial(sampled, case))
    compiled: dict[tuple[str, str], Any] = {}
    failed: dict[tuple[str, str], str] = {}

    def compile_all(name: str, context: Any) -> None:
        for direction, fn in directions(IMPLEMENTATIONS[name], "bias" in shapes).items():
            try:
                with context():
                    compiled[direction, name] = jax.jit(fn).lower(shapes).compile()
            except Exception as problem:  # another library's, and memory at long lengths
                if name == "xsake":
                    raise
                failed[direction, name] = f"{type(problem).__name__}: {problem}"[:300]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        own = pool.submit(compile_all, "xsake", contextlib.nullcontext)
        # For its products XLA times candidates on the GPU while it compiles, and needs memory.
        for name in IMPLEMENTATIONS:
            if name != "xsake":
                compile_all(name, beside)
        with beside():
            checks = Checks.of(case, shapes)
        own.result()
    with alone():
        yield from _timed(case, compiled, checks, failed)


class Checks(NamedTuple):
    """What a cell's results are compared with, compiled before its turn."""

    sample: Callable[[], dict[str, Array]]
    expected: Callable[..., dict[str, Array]]
    errors: dict[str, Callable[..., Array]]  # by direction

    @classmethod
    def of(cls, case: Case, shapes: dict[str, Any]) -> Checks:
        """Compiles them for arrays of these shapes."""
        # As an argument, so that XLA does not fold T × T constants.
        allowed = shapes.get("mask", jax.ShapeDtypeStruct((1, 1, 1, 1), bool))
        want = jax.eval_shape(expected, shapes, allowed)
        by_direction = directions(IMPLEMENTATIONS["jax_nn_xla"], "bias" in shapes)
        return cls(
            jax.jit(functools.partial(sampled, case)).lower().compile(),
            expected.lower(shapes, allowed).compile(),
            {
                name: largest_error.lower(jax.eval_shape(fn, shapes), want).compile()
                for name, fn in by_direction.items()
            },
        )


def _timed(
    case: Case,
    compiled: dict[tuple[str, str], Any],
    checks: Checks,
    failed: dict[tuple[str, str], str],
) -> Iterator[Record]:
    """Checks and times what is compiled; a peer that fails gets a record that says why."""
    given = checks.sample()
    want = checks.expected(given, given.get("mask", jnp.ones((1, 1, 1, 1), bool)))
    errors: dict[tuple[str, str], float] = {}
    for (direction, name), run in compiled.items():
        try:
            errors[direction, name] = float(checks.errors[direction](run(given), want))
        except Exception as problem:  # a peer needs more memory than there is
            if name == "xsake":
                raise
            failed[direction, name] = f"{type(problem).__name__}: {problem}"[:300]
            continue
        if not errors[direction, name] <= ERROR_LIMIT["bfloat16"]:
            failed[direction, name] = f"error {errors[direction, name]}"
            if name == "xsake":
                raise WrongResultError(f"{case.name} {direction}: {failed[direction, name]}")
    pairs = visited_pairs(case, given)
    for direction in directions(IMPLEMENTATIONS["xsake"], "bias" in given):
        names = [x for x in IMPLEMENTATIONS if (direction, x) not in failed]
        times = times_of({name: compiled[direction, name] for name in names}, given)
        factor = 1.0 if direction == "forward" else 3.5
        for name in IMPLEMENTATIONS:
            record = {
                "suite": "hopper-bias",
                "case": case.name,
                "kind": case.kind,
                "direction": direction,
                "implementation": name,
                "T": case.T,
                "H": case.H,
                "density_ratio": pairs / (HEADS * case.T**2),
            }
            if name not in times:
                yield record | {"missing": failed[direction, name]}
                continue
            memory = compiled[direction, name].memory_analysis()
            yield record | {
                "median_seconds": times[name],
                "teraflops": 4 * pairs * case.H * factor / times[name] / 1e12,
                "error": errors[direction, name],
                "temporary_bytes": int(memory.temp_size_in_bytes),
            }


def times_of(runs: dict[str, Any], given: dict[str, Array]) -> dict[str, float]:
    """Median seconds of each implementation; their rounds take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            timing = time_queued(run, given, seconds=0.06, rounds=2)
            found[name] += timing.seconds
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def visited_pairs(case: Case, given: dict[str, Array]) -> float:
    """Token pairs in the blocks that are not empty."""
    if case.kind != "blocks of tokens":
        return float(HEADS * case.T**2)
    blocks = given["mask"].reshape(case.T // BLOCK, BLOCK, case.T // BLOCK, BLOCK).any((1, 3))
    return float(blocks.sum()) * BLOCK**2 * HEADS


# The float32 reference, one head at a time: T × T logits of a head fit in memory.


@jax.jit
def expected(given: dict[str, Array], allowed: Array) -> dict[str, Array]:
    """Output and gradients of the heads that are checked; of a shared bias, over all heads."""
    is_shared = "bias" in given and given["bias"].shape[1] == 1
    heads = [*CHECKED, *(n for n in range(HEADS) if is_shared and n not in CHECKED)]
    of_heads = lax.map(functools.partial(_of_head, given, allowed), jnp.array(heads))
    want = {name: of_heads[name][: len(CHECKED), 0, :, 0] for name in of_heads if name != "bias"}
    if "bias" in given:
        bias = of_heads["bias"][:, 0, 0]
        want["bias"] = bias.sum(0, keepdims=True) if is_shared else bias
    return want


def _of_head(given: dict[str, Array], allowed: Array, n: Array) -> dict[str, Array]:
    def pick(x: Array, axis: int) -> Array:
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, n, 1, axis)

    inputs = {name: pick(given[name], 2).astype(jnp.float32) for name in ("q", "k", "v")}
    if "bias" in given:
        inputs["bias"] = pick(given["bias"], 1).astype(jnp.float32)
    scale = given["q"].shape[-1] ** -0.5

    def attend(inputs: dict[str, Array]) -> Array:
        arrays = (inputs["q"], inputs["k"], inputs["v"], inputs.get("bias"))
        return reference.attention(*arrays, allowed, scale=scale, soft_cap=None)[0]

    out, pull_back = jax.vjp(attend, inputs)
    return {"out": out, **pull_back(pick(given["d_out"], 2).astype(jnp.float32))[0]}


@jax.jit
def largest_error(results: Any, want: dict[str, Array]) -> Array:
    """max |error| ÷ max |reference|, the worst of all results."""
    out, *gradients = results
    found = {"out": out, **(gradients[0] if gradients else {})}

    def of_heads(name: str, x: Array) -> Array:
        if name == "bias":
            return x[0, jnp.array(CHECKED)] if x.shape[1] > 1 else x[0]
        return jnp.moveaxis(x[0][:, jnp.array(CHECKED)], 1, 0)

    errors = [
        jnp.abs(of_heads(name, x).astype(jnp.float32) - want[name]).max()
        / jnp.abs(want[name]).max()
        for name, x in found.items()
    ]
    finite = jnp.stack([jnp.isfinite(x).all() for x in found.values()]).all()
    return jnp.where(finite, jnp.stack(errors).max(), jnp.nan)


if __name__ == "__main__":
    programs.stop_for_suite("hopper-bias")
