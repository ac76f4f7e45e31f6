"""Times whole training steps of a GPT-2-small shape: dense by cuDNN, dense by XSAKE, HADS.

    python benchmarks/train_step.py --out benchmarks/results/train-step.json

Every variant runs in a process of its own, so that its peak memory is its own. Rows are one text
each. HADS rows choose blocks at run time with the same budget for every head, which costs what a
calibrated plan costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIANTS = ("dense cudnn", "dense", "hads 0.43", "hads 0.20")


def problem(variant: str, length: int, tokens: int, block: int) -> tuple[Any, Any, Any, Any]:
    """(config, state, batch, plan): what `step.compiled_update` takes."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is not one of {list(VARIANTS)}")
    import jax
    import numpy as np

    from xsake.data.stream import Batch
    from xsake.hads import Plan, budget, row_blocks
    from xsake.hads.plan import Terms
    from xsake.model import PRESETS, attend
    from xsake.train import planning, step
    from xsake.train.config import Compute, Config, Data

    if variant == "dense cudnn":

        def by_cudnn(q: Any, k: Any, v: Any, mask: Any, implementation: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

        attend.dot_product_attention = by_cudnn  # type: ignore[assignment]
    model = dataclasses.replace(PRESETS["gpt2"], context=length, vocab_size=50_304)
    count = max(1, tokens // length)
    config = Config(
        model=model,
        data=Data(length=length, rows=count, separate=False),
        compute=Compute(dtype="bfloat16", scan=False, loss_tokens=8192),
    )
    plan = None
    if variant.startswith("hads"):
        density = float(variant.split()[1])
        n = row_blocks.count_blocks(length, block)
        counts = budget.uniform(density, model.layers, model.heads, n).counts
        plan = Plan(counts, None, Terms(density, "uniform", "mean_query", block, length))
    text = np.random.default_rng(0).integers(0, 50_257, (count, length + 1)).astype(np.int32)
    ones = np.ones((count, length), np.float32)
    batch = jax.device_put(Batch(text[:, :-1], text[:, 1:], np.zeros_like(text[:, 1:]), ones))
    return config, step.initial(config), batch, planning.argument(plan)


def measure(variant: str, length: int, tokens: int, block: int, steps: int) -> dict[str, Any]:
    """One row: seconds of a step (median), tokens/s, MFU and peak memory."""
    import jax

    from xsake.train import flops, planning, step

    config, state, batch, given = problem(variant, length, tokens, block)
    density, count = planning.density(given), config.data.rows
    taken = []
    for number in range(steps + 3):
        began = time.perf_counter()
        state, said = step.compiled_update(state, batch, given, config=config)
        loss = float(said.loss)
        if number >= 3:
            taken.append(time.perf_counter() - began)
    seconds = statistics.median(taken)
    speed = count * length / seconds
    return {
        "case": f"gpt2-small training step, {length} tokens, {variant}",
        "variant": variant,
        "length": length,
        "rows": count,
        "block": block,
        "density_ratio": density,
        "median_seconds": seconds,
        "least_seconds": min(taken),
        "tokens_per_second": speed,
        "mfu_ratio": flops.utilisation(
            speed, flops.per_token(config.model, length, density), "bfloat16"
        ),
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "loss_nats": loss,
    }


def parsed(description: str | None, lengths: list[int], steps: int) -> argparse.Namespace:
    """The flags of a program that measures variants of this step."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--tokens", type=int, default=32_768, help="of one step, over its rows")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--only", help="one variant, in this process; prints its row")
    return parser.parse_args()


def run(script: str, measure: Any, given: argparse.Namespace, flags: str = "") -> None:
    """All variants at all lengths, each by `script --only` in a process of its own; one JSON.

    `flags` are added to XLA_FLAGS of those processes and told in the JSON.
    """
    if given.only:
        row = measure(given.only, given.lengths[0], given.tokens, given.block, given.steps)
        from xsake.bench.timing import provenance

        print("ROW " + json.dumps([provenance(), row]))
        return
    found: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}  # of the processes that measure; this one leaves the device alone
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    for length in given.lengths:
        for variant in given.variants:
            words = [sys.executable, script, "--only", variant, "--lengths", str(length)]
            words += ["--tokens", str(given.tokens), "--block", str(given.block)]
            words += ["--steps", str(given.steps)]
            env = {**os.environ, "XLA_FLAGS": flags}
            ended = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
            told = [x[4:] for x in ended.stdout.splitlines() if x.startswith("ROW ")]
            why = [x for x in ended.stderr.splitlines() if "Error" in x][-1:]
            failed = [facts, {"variant": variant, "length": length, "error": why}]
            facts, row = json.loads(told[0]) if told else failed
            found.append(row)
            print(json.dumps({x: y for x, y in row.items() if x != "kernels"}), flush=True)
            if given.out:  # after each row, so that a stopped run keeps what it has
                asked = {"command": " ".join(sys.argv), "xla_flags": flags}
                whole = {**facts, **asked, "results": found}
                given.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    run(__file__, measure, parsed(__doc__, [4096, 16_384], 10))
