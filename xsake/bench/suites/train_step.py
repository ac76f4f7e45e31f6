"""Times whole training steps of a GPT-2-small shape: dense by cuDNN, dense by XSAKE, HADS.

    python -m xsake.bench.suites.train_step --out benchmarks/results/train-step.json

Every variant runs in its own process, so that its peak memory is its own. A batch row is one
document. HADS selects blocks at run time with a uniform budget for every head; a calibrated plan
takes the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from xsake.bench import programs
from xsake.bench.suites import Record
from xsake.bench.timing import command_line, provenance

if TYPE_CHECKING:
    from xsake.train.config import Config

VARIANTS = ("dense cudnn", "dense", "hads 0.43", "hads 0.20")


class Problem(NamedTuple):
    """A jitted update function and its arguments: update(state, batch, plan)."""

    update: Any  # jax.jit of (state, batch, plan) -> (state, metrics); state is donated
    state: Any
    batch: Any
    plan: Any  # of the form that `planning.argument` returns
    config: Config


def problem(variant: str, length: int, tokens: int, block: int) -> Problem:
    """One training step of a variant, on random tokens."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is not one of {list(VARIANTS)}")
    import jax
    import numpy as np

    from xsake.data.stream import Batch
    from xsake.hads import Plan, budget, row_blocks
    from xsake.hads.terms import Terms
    from xsake.model import PRESETS
    from xsake.train import planning, step
    from xsake.train.config import Compute, Config, Data

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
    loss_fn = cudnn_loss if variant == "dense cudnn" else step.summed_loss
    update = functools.partial(step.update, config=config, loss_fn=loss_fn)
    return Problem(
        jax.jit(update, donate_argnums=0),
        step.initial(config),
        batch,
        planning.argument(plan),
        config,
    )


def cudnn_loss(parameters: Any, batch: Any, plan: None, config: Config, mesh: None) -> Any:
    """`step.summed_loss` with cuDNN's causal attention in every layer."""
    import jax
    import jax.numpy as jnp

    from xsake.train import step

    def attend(layer: Any, q: Any, k: Any, v: Any, state: Any) -> tuple[Any, Any]:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out, state

    model = step.transformer(config, parameters)
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    hidden, _ = model.run(batch.tokens, positions, attend)
    return step.loss_of_hidden(model, hidden, batch, config)


def measure(variant: str, length: int, tokens: int, block: int, steps: int) -> Record:
    """One record: seconds of a step (median), tokens/s, MFU and peak memory."""
    import jax

    from xsake.train import flops, planning

    update, state, batch, plan, config = problem(variant, length, tokens, block)
    density, count = planning.density(plan), config.data.rows
    times = []
    for number in range(steps + 3):
        began = time.perf_counter()
        state, metrics = update(state, batch, plan)
        loss = float(metrics.loss)
        if number >= 3:
            times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    speed = count * length / seconds
    return {
        "case": f"gpt2-small training step, {length} tokens, {variant}",
        "variant": variant,
        "length": length,
        "rows": count,
        "block": block,
        "density_ratio": density,
        "median_seconds": seconds,
        "least_seconds": min(times),
        "tokens_per_second": speed,
        "mfu_ratio": flops.utilisation(
            speed, flops.per_token(config.model, length, density), "bfloat16"
        ),
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "loss_nats": loss,
    }


def parse_arguments(
    module: str,
    description: str | None,
    lengths: list[int],
    steps: int,
    arguments: list[str] | None = None,
) -> argparse.Namespace:
    """The flags of a program that measures variants of this step."""
    parser = programs.parser(module, description)
    add = functools.partial(parser.add_argument, metavar="N")
    programs.add_out(parser, required=False)
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=lengths,
        help=f"tokens of a batch row; default: {' and '.join(map(str, lengths))}",
    )
    add("--tokens", type=int, default=32_768, help="per step, over the batch; default: %(default)s")
    add("--block", type=int, default=128, help="tokens per block of HADS; default: %(default)s")
    add("--steps", type=int, default=steps, help="that are measured; default: %(default)s")
    named = ", ".join(f'"{x}"' for x in VARIANTS)
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="VARIANT",
        help=f"of {named}; default: all",
    )
    add(
        "--only",
        choices=VARIANTS,
        metavar="VARIANT",
        help="one variant at the first length, in this process; prints its record",
    )
    return parser.parse_args(arguments)


def run(
    module: str, measure: Callable[..., Record], given: argparse.Namespace, xla_flags: str = ""
) -> None:
    """All variants at all lengths, each by `python -m module --only` in a new process; one JSON.

    `xla_flags` are added to XLA_FLAGS of those processes and recorded in the JSON.
    """
    # a process that only starts others leaves the GPU's memory to them
    programs.stop_without("gpu", module.rpartition(".")[2], apart=not given.only)
    if given.only:
        record = measure(given.only, given.lengths[0], given.tokens, given.block, given.steps)
        print("RECORD " + json.dumps([provenance(), record]))
        return
    records: list[Record] = []
    facts: dict[str, Any] = {}  # provenance of the measuring processes; this one uses no device
    xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    for length in given.lengths:
        for variant in given.variants:
            facts, record = _measured_apart(module, variant, length, given, xla_flags, facts)
            records.append(record)
            print(json.dumps({x: y for x, y in record.items() if x != "kernels"}), flush=True)
            if given.out:  # after every record, so that an interrupted run keeps what it measured
                asked = {"command": command_line(), "xla_flags": xla_flags}
                whole = {**facts, **asked, "results": records}
                given.out.write_text(json.dumps(whole, indent=1) + "\n")


def _measured_apart(
    module: str,
    variant: str,
    length: int,
    given: argparse.Namespace,
    xla_flags: str,
    facts: dict[str, Any],
) -> tuple[dict[str, Any], Record]:
    """(provenance, record) of one variant by a new process; `facts` and the error if it fails."""
    command = [sys.executable, "-m", module, "--only", variant, "--lengths", str(length)]
    command += ["--tokens", str(given.tokens), "--block", str(given.block)]
    command += ["--steps", str(given.steps)]
    env = {**os.environ, "XLA_FLAGS": xla_flags}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    for line in ended.stdout.splitlines():
        if line.startswith("RECORD "):
            found, record = json.loads(line.removeprefix("RECORD "))
            return found, record
    errors = [line for line in ended.stderr.splitlines() if "Error" in line][-1:]
    return facts, {"variant": variant, "length": length, "error": errors}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    module = "xsake.bench.suites.train_step"
    run(module, measure, parse_arguments(module, __doc__, [4096, 16_384], 10, arguments))


if __name__ == "__main__":
    main()
