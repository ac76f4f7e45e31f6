"""The model suite: loading, prefill and decode of a checkpoint in bfloat16.

Prompts are random tokens: neither dense time nor that of a fixed budget depends on what they say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.bench.checks import WrongResultError
from xsake.bench.timing import time_calls
from xsake.model import huggingface
from xsake.model.generate import prefill, stream
from xsake.model.kv_cache import KVCache

# Logits of two ways through one bfloat16 model: some roundings of 2**-9, after all its layers.
LOGIT_LIMIT = 5e-2


def suite(path: Path, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Rows for one checkpoint, a folder or a GGUF file."""
    began = time.perf_counter()
    loaded = huggingface.load(path, dtype="bfloat16")
    jax.block_until_ready(loaded.model.parameters())
    name = Path(path).name
    yield {"suite": "model", "case": f"{name}: load", "seconds": time.perf_counter() - began}
    model, config = loaded.model, loaded.config
    length = min(1024 if quick else 8192, config.context)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()

    def run(chunk: int) -> Any:
        cache = KVCache.empty(config, 1, length, dtype=model.dtype)
        return prefill(model, cache, [prompt], chunk=chunk)[1]

    began = time.perf_counter()
    whole = model.logits(jax.block_until_ready(run(length)))
    compile_seconds = time.perf_counter() - began
    parts = model.logits(run(1024))
    error = float(jnp.abs(whole - parts).max() / jnp.abs(whole).max())
    if not error <= LOGIT_LIMIT:
        raise WrongResultError(f"prefill in one piece and in chunks differ by {error}")
    taken = time_calls({"prefill": (run, (length,))}, 5)["prefill"]
    yield {
        "suite": "model",
        "case": f"{name}: prefill of {length} tokens",
        "median_seconds": taken.median_seconds,
        "tokens_per_second": length / taken.median_seconds,
        "first_call_seconds": compile_seconds,
        "error": error,
    }
    narrow = model.unstacked()
    new = 64 if quick else 128
    for batch, budget in ((1, None), (8, None), (1, 0.25), (8, 0.25)):
        row = _decode(narrow, [prompt[: length - new]] * batch, new, budget)
        reads = "dense" if budget is None else f"{budget:.0%} of the blocks"
        case = f"{name}: decode at {length} tokens, batch {batch}, {reads}"
        yield {"suite": "model", "case": case, "density_ratio": budget or 1.0, **row}


def _decode(model: Any, prompts: list[list[int]], new: int, budget: float | None) -> dict[str, Any]:
    """Tokens per second after the first burst, which compiles; and who agrees with a full pass."""
    burst, marks, tokens = 16, [time.perf_counter()], []
    for step in stream(model, prompts, max_tokens=new, stop=(), budget=budget, burst=burst):
        tokens += step[0].tokens
        marks.append(time.perf_counter())
    bursts = np.diff(marks[2:])[1:]  # without the first token and the burst that compiles
    seconds = float(np.median(bursts))
    # the same tokens in one pass: greedy choices agree but for ties within a rounding
    line = jnp.asarray([prompts[0] + tokens[:-1]])
    hidden = jax.jit(lambda model, line: model.hidden(line))(model, line)
    greedy = model.logits(hidden[0, len(prompts[0]) - 1 :]).argmax(-1)
    agreement = float((greedy == jnp.asarray(tokens)).mean())
    if budget is None and agreement < 0.8:
        raise WrongResultError(f"decode and a full pass agree on {agreement:.0%} of tokens only")
    return {
        "tokens_per_second": len(prompts) * burst / seconds,
        "seconds_per_token": seconds / burst,
        "first_token_seconds": marks[1] - marks[0],
        "compile_burst_seconds": marks[2] - marks[1],
        "agreement_with_full_pass": agreement,
    }
