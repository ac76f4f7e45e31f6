"""xsake inspect, generate: describe a checkpoint; generate text from it."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import tyro
from rich.table import Table

import xsake
from xsake import _jax
from xsake.cli.model_path import checkpoint
from xsake.cli.placements import print_placements
from xsake.cli.progress import status
from xsake.cli.terminal import console, fast_dtype, reasons
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes

if TYPE_CHECKING:
    from xsake.model import Config, Transformer
    from xsake.model.huggingface import Loaded


def inspect(path: tyro.conf.Positional[Path], *, mesh: str | None = None) -> None:
    """Prints a checkpoint's configuration and sizes, and the backend its attention would use here.

    Args:
      path: a folder with config.json and safetensors, a .gguf file, a run's folder, or "shipped";
        its weights are not read.
      mesh: instead: what would lie where on a mesh, such as data=2,fsdp=4,tensor=2, in bytes per
        device; what is not given is 1. No device is needed.
    """
    from xsake.model import huggingface, parameter_shapes

    path = checkpoint(path)
    opened = huggingface.examine(path)
    config = opened.config
    if mesh is not None:
        print_placements(config, mesh)
        return
    table = Table("property", "value", title=str(path))
    for name, value in dataclasses.asdict(config).items():
        table.add_row(name, str(value))
    console.print(table)

    shapes = parameter_shapes(config)
    count = sum(math.prod(shape) for shape in shapes.values())
    files = {Path(opened.source.location(name)) for name in opened.source.shapes}
    stored = collections.Counter(opened.source.types.values())
    cached = 2 * config.layers * config.kv_heads * config.head_size
    if config.is_sparse:
        cached = _sparse_cache_numbers(config)
    table = Table("size", "")
    table.add_row("parameters", f"{count:,}")
    table.add_row("bytes on disk", f"{sum(file.stat().st_size for file in files):,}")
    table.add_row("bytes in float32", f"{4 * count:,}")
    table.add_row("cache bytes per token", f"{4 * cached:,} in float32, {2 * cached:,} in bfloat16")
    kinds = ", ".join(f"{n} {kind}" for kind, n in stored.most_common())
    table.add_row("tensors", f"{sum(stored.values())}: {kinds}")
    console.print(table)

    table = Table("parameter", "shape", "elements")
    for name, shape in shapes.items():
        table.add_row(name, " × ".join(map(str, shape)), f"{math.prod(shape):,}")
    console.print(table)

    length = min(config.context, 8192)
    dtype = fast_dtype()
    q, k = (
        jax.ShapeDtypeStruct((1, length, heads, config.head_size), dtype)
        for heads in (config.heads, config.kv_heads)
    )
    console.print(reasons(xsake.explain(q, k, k, is_causal=True), f"{length:,} tokens, {dtype}"))


def _sparse_cache_numbers(config: Config) -> int:
    """Numbers of a SparseCache per token, at the model's context: k, v, pooled blocks, indexer."""
    from xsake.model import SparseCache

    cache = jax.eval_shape(lambda: SparseCache.empty(config, 1, config.context))
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(cache) if x.ndim > 1)
    return round(total / cache.capacity)


def generate(
    model: Path,
    prompt: str,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] | None = None,
    tokenizer: Path | None = None,
    plan: Path | None = None,
    density: float | None = None,
    stream: bool = True,
    unstack: bool = False,
    mesh: MeshSizes = ONE_DEVICE,
) -> None:
    """Generates text after a prompt, and prints the throughput.

    Args:
      model: a folder with config.json and safetensors, a .gguf file, a run's folder, or "shipped".
      prompt: the prompt text; - reads it from standard input.
      max_tokens: the largest number of new tokens.
      temperature: 0 takes the most likely token.
      top_k: sample from the k most likely tokens.
      top_p: sample from the most likely tokens that hold this share of the probability.
      seed: the sampling seed.
      dtype: compute dtype; default bfloat16, on CPUs float32.
      tokenizer: a tokenizer.json; default the model's own.
      plan: what `xsake plan` wrote for this model: the prompt is read with it, and a new token
        reads the share of the cache that it gives each head.
      density: share of the cached blocks that each head reads for a token; default all.
      stream: print tokens as they are generated, or all at the end.
      unstack: store each layer's weights separately (no scan): decodes faster, compiles longer.
      mesh: devices that share the model: fsdp its parameters, tensor its heads.
    """
    from xsake.model import Sampling, huggingface
    from xsake.model import stream as tokens_of
    from xsake.model.on_mesh import mesh_for_text

    if plan is not None and density is not None:
        raise ValueError(
            "--plan and --density are both given: a plan has the density of each head; leave out "
            "one of them"
        )
    sampling = Sampling(temperature, top_k, top_p, seed)
    path = checkpoint(model)
    text = _prompt_text(prompt)
    started = time.perf_counter()
    with status(f"loading {model}") as update:
        loaded = huggingface.load(
            path,
            dtype=dtype or fast_dtype(),
            tokenizer=tokenizer or True,
            mesh=mesh_for_text(huggingface.examine(path).config, mesh),
        )
        assert loaded.tokenizer is not None  # without one, load raises
        loaded_seconds = time.perf_counter() - started
        ids = loaded.tokenizer.encode(text)
        sparsity = {"budget": density} if plan is None else _by_plan(plan, loaded.model)
        pieces = tokens_of(
            loaded.model.unstacked() if unstack else loaded.model,
            [ids],
            max_tokens=max_tokens,
            sampling=sampling,
            burst=4,
            **sparsity,
        )
        update(f"reading the prompt of {len(ids):,} tokens")
        started = time.perf_counter()
        first = next(pieces)
        first_time = time.perf_counter()
    times = [(len(first[0].tokens), first_time)]  # (tokens so far, time)

    def arriving() -> Iterator[int]:
        yield from first[0].tokens
        for (new,) in pieces:
            times.append((times[-1][0] + len(new.tokens), time.perf_counter()))
            yield from new.tokens

    _print_text(loaded, arriving(), stream)
    console.print(_speed(len(ids), loaded_seconds, started, times), style="dim")


def _prompt_text(prompt: str) -> str:
    """The prompt, from standard input if it is -; raises unless it is UTF-8."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        # Python has a byte of an argument that is not UTF-8 as a surrogate.
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        source = "standard input" if prompt == "-" else "--prompt"
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


def _by_plan(path: Path, model: Transformer) -> dict[str, Any]:
    """Options of `stream` for a plan of this model: blocks of the prompt, share of the cache."""
    from xsake import hads
    from xsake.model.observer import Observer

    plan = hads.Plan.load(path, Observer(model).hash)
    return {"mask": plan, "budget": plan.decode_budget(plan.terms.density)}


def _print_text(loaded: Loaded, tokens: Iterator[int], stream: bool) -> None:
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.pieces(tokens)
    for piece in text if stream else ["".join(text)]:
        print(piece, end="", flush=True)
    print()


def _speed(prompt: int, loaded: float, started: float, times: list[tuple[int, float]]) -> str:
    """Seconds of loading and of the prompt, and tokens per second after compilation."""
    line = f"loaded in {loaded:.1f} s; {prompt} prompt tokens and the first new one "
    line += f"in {times[0][1] - started:.2f} s; {times[-1][0]} new tokens"
    # the first burst compiles
    if len(times) > 2 and times[-1][0] > times[1][0]:
        rate = (times[-1][0] - times[1][0]) / (times[-1][1] - times[1][1])
        line += f", {rate:.1f} tokens/s after the first {times[1][0]}"
    return f"{line}; {_jax.device_kind()}"
