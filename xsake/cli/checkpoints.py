"""xsake inspect, generate: describe a checkpoint; generate text from it."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.table import Table

import xsake
from xsake import _jax
from xsake.cli.terminal import console, fast_dtype, reasons


def inspect(path: tyro.conf.Positional[Path]) -> None:
    """Prints a checkpoint's configuration and sizes, and the backend its attention would use here.

    Args:
      path: a folder with config.json and safetensors, or a .gguf file; its weights are not read.
    """
    from xsake.model import huggingface, parameter_shapes

    opened = huggingface.examine(path)
    config = opened.config
    table = Table("property", "value", title=str(path))
    for name, value in dataclasses.asdict(config).items():
        table.add_row(name, str(value))
    console.print(table)

    shapes = parameter_shapes(config)
    count = sum(math.prod(shape) for shape in shapes.values())
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stored = collections.Counter(opened.source.types.values())
    cached = 2 * config.layers * config.kv_heads * config.head_size
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
    density: float | None = None,
    stream: bool = True,
    unstack: bool = False,
) -> None:
    """Generates text after a prompt, and prints the throughput.

    Args:
      model: a folder with config.json and safetensors, or a .gguf file.
      prompt: the prompt text; - reads it from standard input.
      max_tokens: the largest number of new tokens.
      temperature: 0 takes the most likely token.
      top_k: sample from the k most likely tokens.
      top_p: sample from the most likely tokens that hold this share of the probability.
      seed: the sampling seed.
      dtype: compute dtype; default bfloat16, on CPUs float32.
      tokenizer: a tokenizer.json; default the model's own.
      density: share of the cached blocks that each head reads for a token; default all.
      stream: print tokens as they are generated, or all at the end.
      unstack: store each layer's weights separately (no scan): decodes faster, compiles longer.
    """
    from xsake.model import Sampling, huggingface
    from xsake.model import stream as tokens_of

    sampling = Sampling(temperature, top_k, top_p, seed)
    started = time.perf_counter()
    loaded = huggingface.load(model, dtype=dtype or fast_dtype(), tokenizer=tokenizer or True)
    assert loaded.tokenizer is not None  # without one, load raises
    loaded_seconds = time.perf_counter() - started
    ids = loaded.tokenizer.encode(sys.stdin.read() if prompt == "-" else prompt)
    pieces = tokens_of(
        loaded.model.unstacked() if unstack else loaded.model,
        [ids],
        max_tokens=max_tokens,
        sampling=sampling,
        budget=density,
        burst=4,
    )
    times: list[tuple[int, float]] = []  # (tokens so far, time)

    def arriving() -> Iterator[int]:
        made = 0
        for (new,) in pieces:
            made += len(new.tokens)
            times.append((made, time.perf_counter()))
            yield from new.tokens

    started = time.perf_counter()
    text = loaded.tokenizer.pieces(arriving())
    for piece in text if stream else ["".join(text)]:
        print(piece, end="", flush=True)
    print()
    console.print(_speed(len(ids), loaded_seconds, started, times), style="dim")


def _speed(prompt: int, loaded: float, started: float, times: list[tuple[int, float]]) -> str:
    """Seconds of loading and of the prompt, and tokens per second after compilation."""
    line = f"loaded in {loaded:.1f} s; {prompt} prompt tokens and the first new one "
    line += f"in {times[0][1] - started:.2f} s; {times[-1][0]} new tokens"
    # the first burst compiles
    if len(times) > 2 and times[-1][0] > times[1][0]:
        rate = (times[-1][0] - times[1][0]) / (times[-1][1] - times[1][1])
        line += f", {rate:.1f} tokens/s after the first {times[1][0]}"
    return f"{line}; {_jax.device_kind()}"
