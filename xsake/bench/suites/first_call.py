"""Seconds of first calls: to trace, lower, compile and run once, in a new process for each record.

    python -m xsake.bench.suites.first_call --out benchmarks/results/first-call.json

    attention   forward and backward of one call, beside jax.nn (by cuDNN on a GPU)
    layers      a training step of 2 and of 12 layers, written out; `without` has no attention
    model       the first training step of a small NNX model; window, documents, learnable sinks
    cache       the same call twice, with JAX's persistent compilation cache in an empty folder

Programs are repeated by turns: all variants of a case, then all again. CPU seconds are those of
the process, user and system; they depend less than seconds on what else the machine does.
With `--busy 2` two endless loops run beside the measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xsake.bench import programs
from xsake.bench.suites import Record
from xsake.bench.timing import command_line, provenance


class Shape(NamedTuple):
    """Sizes of a call and the name of its rule."""

    B: int
    T: int
    N: int
    K: int
    H: int
    rule: str

    def __str__(self) -> str:
        heads = str(self.N) if self.N == self.K else f"{self.N}/{self.K}"
        return f"{self.B}·{heads}·{self.T}·{self.H} {self.rule}"


SMALL = Shape(2, 512, 4, 2, 32, "window and documents")
ATTENTION = {
    "gpu": [
        Shape(4, 4096, 16, 16, 128, "causal"),
        Shape(2, 8192, 32, 8, 128, "window and documents"),
        Shape(4, 4096, 16, 16, 64, "blocks"),
        Shape(4, 512, 16, 16, 64, "causal"),
    ],
    "cpu": [Shape(1, 4096, 8, 8, 64, "causal"), SMALL],
}
LAYERS = {"gpu": Shape(4, 4096, 16, 16, 64, "causal"), "cpu": SMALL}


def mask_of(shape: Shape, ids: Any) -> Any:
    """The rule, or blocks of every head, that a shape names."""
    import numpy as np

    from xsake import BlockMask, masks

    if shape.rule == "causal":
        return masks.causal()
    if shape.rule == "blocks":
        n = shape.T // 128
        blocks = np.random.default_rng(0).random((shape.N, n, n)) < 0.43
        return BlockMask.from_dense(blocks | np.eye(n, dtype=bool), masks.causal())
    return masks.sliding_window(shape.T // 4 - 1, 0) & masks.documents(ids)


def attend_of(variant: str, shape: Shape) -> Callable[..., Any]:
    """attend(q, k, v, ids, sinks) -> out by a variant: "xsake", "jax.nn", or a backend's name."""
    import jax
    import jax.numpy as jnp

    import xsake
    from xsake import _jax

    def ours(q: Any, k: Any, v: Any, ids: Any, sinks: Any = None) -> Any:
        name = None if variant == "xsake" else variant
        return xsake.dot_product_attention(
            q, k, v, mask=mask_of(shape, ids), implementation=name, sinks=sinks
        )

    def by_jax_nn(q: Any, k: Any, v: Any, ids: Any, sinks: Any = None) -> Any:
        plain = shape.rule in ("causal", "blocks")
        flash = _jax.platform() == "gpu" and plain
        call: dict[str, Any] = {"is_causal": True, "implementation": "cudnn" if flash else "xla"}
        if not plain:
            call["local_window_size"] = (shape.T // 4 - 1, 0)
            call["mask"] = (ids[:, :, None] == ids[:, None])[:, None]
        if sinks is None:
            return jax.nn.dot_product_attention(q, k, v, **call)
        out, lse = jax.nn.dot_product_attention(q, k, v, return_residual=True, **call)
        return out * jax.nn.sigmoid(lse - sinks[None, None])[..., None].astype(out.dtype)

    def without(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return q + jnp.repeat(k + v, shape.N // shape.K, axis=2)

    return {"jax.nn": by_jax_nn, "without": without}.get(variant, ours)


class Problem(NamedTuple):
    """A function to compile, and its arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def _inputs(shape: Shape) -> tuple[Any, ...]:
    """q, k, v of zeros in the device's fast dtype, and ids of documents."""
    import jax.numpy as jnp

    from xsake import _jax

    dtype = jnp.bfloat16 if _jax.platform() == "gpu" else jnp.float32
    B, T, N, K, H, _ = shape
    ids = jnp.broadcast_to(jnp.arange(T) * 5 // T, (B, T))
    return *(jnp.zeros((B, T, heads, H), dtype) for heads in (N, K, K)), ids


def attention(shape: Shape, variant: str) -> Problem:
    """The output and the gradients of q, k and v."""
    import jax

    *inputs, ids = _inputs(shape)
    attend = attend_of(variant, shape)

    def both(q: Any, k: Any, v: Any, ids: Any) -> Any:
        out, pull_back = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
        return out, pull_back(out)

    return Problem(both, (*inputs, ids))


def layers(shape: Shape, variant: str, count: int) -> Problem:
    """Loss and gradients of `count` layers of attention with projections, written out."""
    import jax
    import jax.numpy as jnp

    q, _, _, ids = _inputs(shape)
    B, T, N, K, H, _ = shape
    attend, D = attend_of(variant, shape), N * H
    widths = {"q": N * H, "k": K * H, "v": K * H, "out": D}
    parameters = [{x: jnp.zeros((D, w), q.dtype) for x, w in widths.items()} for _ in range(count)]

    def loss(parameters: Any, x: Any, ids: Any) -> Any:
        for layer in parameters:
            q, k, v = ((x @ layer[name]).reshape(B, T, -1, H) for name in "qkv")
            x = x + attend(q, k, v, ids).reshape(B, T, D) @ layer["out"]
        return (x.astype(jnp.float32) ** 2).mean()

    return Problem(jax.value_and_grad(loss), (parameters, q.reshape(B, T, D), ids))


def model(shape: Shape, variant: str) -> Problem:
    """A training step of a small NNX model of two layers, with window, documents and sinks."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    B, T, N, K, H, _ = shape
    attend, D = attend_of(variant, shape), N * H

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.q, self.out = (nnx.Linear(D, D, rngs=rngs) for _ in range(2))
            self.k, self.v = (nnx.Linear(D, K * H, rngs=rngs) for _ in range(2))
            self.up = nnx.Linear(D, 4 * D, rngs=rngs)
            self.down = nnx.Linear(4 * D, D, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2)])
            self.sinks = nnx.Param(jnp.zeros(N))

        def __call__(self, x: Any, ids: Any) -> Any:
            h = self.norms[0](x)
            q, k, v = (part(h).reshape(B, T, -1, H) for part in (self.q, self.k, self.v))
            x = x + self.out(attend(q, k, v, ids, self.sinks[...]).reshape(B, T, D))
            return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(256, D, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

        def __call__(self, tokens: Any, ids: Any) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, ids)
            return self.embed.attend(x)

    net = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, tokens: Any, ids: Any) -> Any:
        def loss_of(net: Any) -> Any:
            logits = net(tokens, ids)[:, :-1]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return loss.mean()

        loss, grads = nnx.value_and_grad(loss_of)(net)
        optimizer.update(net, grads)
        return loss

    tokens = jnp.arange(B * T).reshape(B, T) % 256
    return Problem(step, (net, optimizer, tokens, _inputs(shape)[-1]))


def cases(platform: str, kinds: list[str]) -> Iterator[tuple[str, str, str, tuple[Any, ...]]]:
    """(kind, case, variant, arguments) of every record; "model" needs the extra `model`."""
    for shape in ATTENTION[platform] if "attention" in kinds else []:
        for variant in ("xsake", "jax.nn"):
            yield "attention", str(shape), variant, (shape, variant)
    shape = LAYERS[platform]
    for count in (2, 12) if "layers" in kinds else ():
        for variant in ("xsake", "without"):
            yield "layers", f"{count} layers, {shape}", variant, (shape, variant, count)
    for variant in ("xsake", "xla", "jax.nn") if "model" in kinds else ():
        yield "model", f"NNX model, 2 layers, {SMALL}, sinks", variant, (SMALL, variant)
    for variant in ("empty cache", "filled cache") if "cache" in kinds else ():
        yield "cache", f"xsake, {shape}", variant, (shape, "xsake")


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "attention": attention,
    "layers": layers,
    "model": model,
    "cache": attention,
}


def measure(kind: str, arguments: tuple[Any, ...]) -> Record:
    """Seconds of each stage of a first call, in this process, which must be new."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.ones(8) + 1)  # the device itself is ready
    fn, args = PROBLEMS[kind](*arguments)
    times, cpu = [time.perf_counter()], [sum(os.times()[:4])]

    def note() -> None:
        times.append(time.perf_counter())
        cpu.append(sum(os.times()[:4]))

    if kind == "model":  # nnx.jit: one call, as a user makes it
        jax.block_until_ready(fn(*args))
        note()
        stages = ["first_call"]
    else:
        traced = jax.jit(fn).trace(*args)
        note()
        lowered = traced.lower()
        note()
        compiled = lowered.compile()
        note()
        jax.block_until_ready(compiled(*args))
        note()
        stages = ["trace", "lower", "compile", "run"]
    record: Record = {
        f"{stage}_seconds": after - before
        for stage, before, after in zip(stages, times, times[1:], strict=False)
    }
    record["first_call_seconds"] = times[-1] - times[0]
    record["cpu_seconds"] = cpu[-1] - cpu[0]
    return record


def measure_apart(index: int, given: argparse.Namespace, env: dict[str, str]) -> tuple[Any, Record]:
    """(provenance, record) of one case by a new process, or its error."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "xsake.bench.suites.first_call", "--index", str(index)]
    command += ["--platform", given.platform, "--kinds", *given.kinds]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    for line in ended.stdout.splitlines():
        if line.startswith("RECORD "):
            facts, record = json.loads(line.removeprefix("RECORD "))
            return facts, {**record, "load_before": load}
    raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Loops in processes of their own, which end on exit, or with this process."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def run(given: argparse.Namespace) -> None:
    """All cases, `repeats` times; one JSON."""
    if given.platform == "gpu":
        programs.stop_without("gpu", "first_call --platform gpu", apart=True)
    found = list(cases(given.platform, given.kinds))
    records: list[Record] = []
    with busy(given.busy), tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats):
            for index, (kind, case, variant, _) in enumerate(found):
                env = {"JAX_PLATFORMS": "cpu"} if given.platform == "cpu" else {}
                if kind == "cache":
                    env["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/{repeat}"
                    # JAX keeps programs that took a second to compile; this one may take less
                    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
                facts, record = measure_apart(index, given, env)
                names = {"suite": "first-call", "kind": kind, "case": case, "variant": variant}
                record = {**names, "repeat": repeat, "busy_loops": given.busy, **record}
                records.append(record)
                print(json.dumps(record, ensure_ascii=False), flush=True)
                if given.out:
                    whole = {**facts, "command": command_line(), "results": records}
                    given.out.write_text(json.dumps(whole, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases, or one of them in this process."""
    parser = programs.parser("xsake.bench.suites.first_call", __doc__)
    add = parser.add_argument
    programs.add_out(parser, required=False)
    add("--platform", choices=("cpu", "gpu"), default="cpu", help="what runs; default: %(default)s")
    add(
        "--kinds",
        nargs="+",
        choices=list(PROBLEMS),
        default=list(PROBLEMS),
        metavar="KIND",
        help=f"{', '.join(PROBLEMS)}, as described above; default: all",
    )
    add("--repeats", type=int, default=1, metavar="N", help="of all cases; default: %(default)s")
    add("--busy", type=int, default=0, metavar="N", help="endless loops meanwhile; default: none")
    add("--index", type=int, metavar="N", help="one case, in this process; prints its record")
    given = parser.parse_args(arguments)
    if given.index is None:
        run(given)
    else:
        measure_one(given)


def measure_one(given: argparse.Namespace) -> None:
    """Prints the record of the case with the number `given.index`."""
    found = list(cases(given.platform, given.kinds))
    if not 0 <= given.index < len(found):
        programs.stop(
            f"--index is {given.index}; {', '.join(given.kinds)} on a {given.platform} have "
            f"{len(found)} cases, from 0 to {len(found) - 1}"
        )
    from xsake import _jax

    if given.platform == "gpu":
        programs.stop_without("gpu", "first_call --platform gpu")
    elif _jax.platform() != "cpu":
        programs.stop(
            f"first_call --platform cpu is measured with JAX_PLATFORMS=cpu; this is a "
            f"{_jax.platform()}"
        )
    kind, _, _, arguments = found[given.index]
    print("RECORD " + json.dumps([provenance(), measure(kind, arguments)]))


if __name__ == "__main__":
    main()
