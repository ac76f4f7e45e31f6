"""The suite `model`: loading, prefill and decode of a checkpoint in bfloat16.

Prompts are random tokens: neither dense time nor that of a fixed budget depends on the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.bench import programs
from xsake.bench.checks import WrongResultError
from xsake.bench.suites import Part, Record
from xsake.bench.timing import time_calls

if TYPE_CHECKING:  # needs the extra `model`
    from xsake.model import Transformer

# Between whole-prompt and chunked prefill, bfloat16 rounding errors (2**-9) add up over the layers.
LOGIT_LIMIT = 5e-2


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """The whole suite as one part, for the checkpoint `model`: a folder or a GGUF file."""
    if model is None:
        raise ValueError("suite 'model' needs a checkpoint: --model PATH")
    yield Part("model", lambda done: _records(model, quick))


def _records(path: Path, quick: bool) -> Iterator[Record]:
    from xsake.model import huggingface

    began = time.perf_counter()
    loaded = huggingface.load(path, dtype="bfloat16")
    jax.block_until_ready(loaded.model.parameters())
    name = Path(path).name
    yield {"suite": "model", "case": f"{name}: load", "seconds": time.perf_counter() - began}
    model, config = loaded.model, loaded.config
    length = min(1024 if quick else 8192, config.context)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    yield {"suite": "model", "case": f"{name}: prefill of {length} tokens"} | _prefill(
        model, prompt
    )
    unstacked = model.unstacked()
    new = 64 if quick else 128
    for batch, budget in ((1, None), (8, None), (1, 0.25), (8, 0.25)):
        record = _decode(unstacked, [prompt[: length - new]] * batch, new, budget)
        reads = "dense" if budget is None else f"{budget:.0%} of the blocks"
        case = f"{name}: decode at {length} tokens, batch {batch}, {reads}"
        yield {"suite": "model", "case": case, "density_ratio": budget or 1.0, **record}


def _prefill(model: Transformer, prompt: list[int]) -> Record:
    """Seconds of a prefill of the whole prompt, checked against a prefill in chunks."""
    from xsake.model.generate import prefill
    from xsake.model.kv_cache import KVCache

    length = len(prompt)

    def run(chunk: int) -> Any:
        cache = KVCache.empty(model.config, 1, length, dtype=model.dtype)
        return prefill(model, cache, [prompt], chunk=chunk)[1]

    began = time.perf_counter()
    whole = model.logits(jax.block_until_ready(run(length)))
    first_call_seconds = time.perf_counter() - began
    chunked = model.logits(run(1024))
    error = float(jnp.abs(whole - chunked).max() / jnp.abs(whole).max())
    if not error <= LOGIT_LIMIT:
        raise WrongResultError(f"whole-prompt and chunked prefill differ by {error}")
    timing = time_calls({"prefill": (run, (length,))}, 5)["prefill"]
    return {
        "median_seconds": timing.median_seconds,
        "tokens_per_second": length / timing.median_seconds,
        "first_call_seconds": first_call_seconds,
        "error": error,
    }


def _decode(model: Transformer, prompts: list[list[int]], new: int, budget: float | None) -> Record:
    """Tokens per second after compilation, and greedy agreement with a full forward pass."""
    from xsake.model.generate import stream

    burst, times, tokens = 16, [time.perf_counter()], []
    for step in stream(model, prompts, max_tokens=new, stop=(), budget=budget, burst=burst):
        tokens += step[0].tokens
        times.append(time.perf_counter())
    bursts = np.diff(times[2:])[1:]  # without the first token and the burst that compiles
    seconds = float(np.median(bursts))
    # the same tokens in one pass: greedy choices agree except for near-ties
    line = jnp.asarray([prompts[0] + tokens[:-1]])
    hidden = jax.jit(lambda model, line: model.hidden(line))(model, line)
    greedy = model.logits(hidden[0, len(prompts[0]) - 1 :]).argmax(-1)
    agreement = float((greedy == jnp.asarray(tokens)).mean())
    if budget is None and agreement < 0.8:
        raise WrongResultError(f"decode and a full pass agree on {agreement:.0%} of tokens only")
    return {
        "tokens_per_second": len(prompts) * burst / seconds,
        "seconds_per_token": seconds / burst,
        "first_token_seconds": times[1] - times[0],
        "compile_burst_seconds": times[2] - times[1],
        "agreement_with_full_pass": agreement,
    }


if __name__ == "__main__":
    programs.stop_for_suite("model")
