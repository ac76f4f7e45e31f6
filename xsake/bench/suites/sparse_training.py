"""Trains a model with dense attention, with NSA and with MSA, and compares them.

    python -m xsake.bench.suites.sparse_training --train text --valid valid --runs runs/sparse
        --out benchmarks/results/sparse-training.json                             (on one line)

    presets ─ train dense ─ train NSA ─ train MSA ─┬─ validation loss, its gap to dense, tokens/s
              (runs/sparse/NAME, resumable)        └─ how much the choices of neighbours overlap

After --seconds the program saves a checkpoint and stops; the same command resumes. Finished runs
are not trained again. The JSON is written when all runs are finished.

The overlap is measured on the validation text, at tokens with more blocks behind them than they
select. It decides whether a kernel reads the union of the blocks of neighbouring tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.bench import programs
from xsake.bench.suites import Record, training
from xsake.bench.timing import provenance
from xsake.model import Transformer, huggingface
from xsake.model.sparse.attend import chosen_blocks
from xsake.observe import sinks
from xsake.observe.events import Evaluated, Stopped, TrainStep
from xsake.train import inputs, loop
from xsake.train.config import PRESETS, Config

RUNS = {"dense": "gpt-37m-4k", "nsa": "gpt-37m-nsa", "msa": "gpt-37m-msa"}  # name → preset
GROUPS = (8, 16, 32, 64, 128)  # neighbouring tokens whose union of blocks is counted
LEAST_SECONDS = 120  # compiling may take as long: what would have less is left to the next command
WINDOWS = 4  # of the validation text, to measure the overlap on


def configs(given: argparse.Namespace) -> dict[str, Config]:
    """The training config of every run, on the same text, with the same seed and steps."""
    found = {}
    for name, preset in RUNS.items():
        base = PRESETS[preset]
        steps = given.steps or base.schedule.steps
        found[name] = dataclasses.replace(
            base,
            seed=given.seed,
            data=dataclasses.replace(
                base.data, train=tuple(map(str, given.train)), rows=given.rows or base.data.rows
            ),
            schedule=dataclasses.replace(base.schedule, steps=steps, warmup_steps=steps // 10),
            evaluation=dataclasses.replace(base.evaluation, files=(str(given.valid),)),
            run=dataclasses.replace(base.run, name=name, folder=str(given.runs)),
        )
    return found


def is_finished(run: Path) -> bool:
    """Whether a run made its last step and exported its model."""
    path = run / "events.jsonl"
    if not path.exists() or not (run / "model" / "config.json").exists():
        return False
    *_, last = sinks.read(path)
    return isinstance(last, Stopped) and last.reason == "finished"


def train_all(settings: dict[str, Config], seconds: float) -> bool:
    """Trains what is not finished for at most so long; returns whether all runs are finished."""
    began = time.monotonic()
    for name, config in settings.items():
        if is_finished(config.run_folder):
            continue
        left = seconds - (time.monotonic() - began)
        if left < LEAST_SECONDS:
            return False
        print(f"training {name}, at most {left:.0f} s", flush=True)
        timed = dataclasses.replace(config, run=dataclasses.replace(config.run, seconds=left))
        with contextlib.closing(sinks.Terminal(config.schedule.steps)) as terminal:
            if loop.train(timed, terminal).reason != "finished":
                return False
    return True


# ---------------------------------------------------------------------------------------- overlap


@functools.partial(jax.jit, static_argnames="groups")
def overlaps(model: Transformer, tokens: Any, groups: tuple[int, ...] = GROUPS) -> dict[str, Any]:
    """Of every layer, over tokens [B, T] that have more blocks behind them than they select.

    overlap_ratio: |A ∩ B| ÷ |A| of the blocks A of a token and B of the next.
    free_overlap_ratio: the same without forced blocks.
    union_blocks: how many blocks a group of neighbours selects, by the size of the group.
    """
    config, (_, T) = model.config, tokens.shape
    settings, (initial, local) = config.settings, config.settings.forced
    count = -(-T // settings.block_size)
    current = jnp.arange(T, dtype=jnp.int32) // settings.block_size
    blocks = jnp.arange(count, dtype=jnp.int32)
    forced = (blocks < initial) | (blocks[None] > current[:, None] - local)  # [T, count]
    counted = current >= settings.num_selected  # [T]

    def of_layer(layer: Any, seen: Any, carry: Any) -> Any:
        chosen = chosen_blocks(
            config, seen.q, seen.k, seen.inputs, implementation=model.implementation
        )
        member = (chosen[..., None] == blocks).any(-2)  # [B, T, K, count]
        free = member & ~forced[None, :, None]
        found = {
            "overlap_ratio": _overlap(member, counted),
            "free_overlap_ratio": _overlap(free, counted),
            "union_blocks": jnp.stack([_union(member, counted, size) for size in groups]),
        }
        return {name: carry[name].at[layer].set(x) for name, x in found.items()}

    empty = {name: jnp.zeros(config.layers) for name in ("overlap_ratio", "free_overlap_ratio")}
    empty["union_blocks"] = jnp.zeros((config.layers, len(groups)))
    return model.observe(tokens, of_layer, empty)


def _overlap(member: Any, counted: Any) -> Any:
    """Mean over pairs of neighbours, both of them counted, of the share of common blocks."""
    one, other = member[:, :-1], member[:, 1:]
    share = (one & other).sum(-1) / jnp.maximum(one.sum(-1), 1)
    pairs = jnp.broadcast_to(counted[None, :-1, None], share.shape)
    return jnp.where(pairs, share, 0).sum() / jnp.maximum(pairs.sum(), 1)


def _union(member: Any, counted: Any, size: int) -> Any:
    """Mean number of blocks that `size` neighbours select together."""
    whole = member.shape[1] // size
    grouped = member[:, : whole * size].reshape(member.shape[0], whole, size, *member.shape[2:])
    union = grouped.any(2).sum(-1)  # [B, groups, K]
    first = jnp.broadcast_to(counted[: whole * size : size][None, :, None], union.shape)
    return jnp.where(first, union, 0).sum() / jnp.maximum(first.sum(), 1)


def measured_overlap(config: Config) -> Record:
    """The overlaps of a trained model by layer, on the first windows of its validation text."""
    model = huggingface.load(
        config.run_folder / "model",
        dtype=config.compute.dtype,
        tokenizer=False,
        implementation=config.compute.implementation,
    ).model
    (stream,) = inputs.held_out(config).values()
    rows = [np.asarray(batch.tokens) for batch in stream.in_order(1, WINDOWS)]
    groups = tuple(x for x in GROUPS if x <= config.data.length)
    found = [jax.device_get(overlaps(model, row, groups)) for row in rows]
    mean = {name: np.mean([x[name] for x in found], axis=0) for name in found[0]}
    settings = config.model.settings
    return {
        "block_size": settings.block_size,
        "num_selected": settings.num_selected,
        "forced_blocks": list(settings.forced),
        "windows": len(rows),
        "overlap_ratio_by_layer": np.round(mean["overlap_ratio"], 4).tolist(),
        "free_overlap_ratio_by_layer": np.round(mean["free_overlap_ratio"], 4).tolist(),
        "union_blocks_by_group_and_layer": {
            str(size): np.round(mean["union_blocks"][:, i], 2).tolist()
            for i, size in enumerate(groups)
        },
    }


# ----------------------------------------------------------------------------------------- result


def record_of(name: str, config: Config) -> Record:
    """A finished run: what `training.record_of` has, losses, and for sparse attention overlaps."""
    found = training.record_of(config.run_folder)
    events = sinks.read(config.run_folder / "events.jsonl")
    losses = [x for x in events if isinstance(x, Evaluated)]
    steps = [x for x in events if isinstance(x, TrainStep)]
    found |= {
        "case": f"{name}, {config.data.length} tokens a sequence",
        "length": config.data.length,
        "rows": config.data.rows,
        "validation_loss_nats": losses[-1].loss_nats,
        "validation_loss_nats_by_step": [[x.step, x.loss_nats] for x in losses],
        "index_loss_nats": steps[-1].index_loss_nats,
        "peak_bytes": steps[-1].peak_bytes,
    }
    if config.model.is_sparse:
        found["overlap"] = measured_overlap(config)
    return found


def write(settings: dict[str, Config], out: Path) -> dict[str, Any]:
    """The comparison of finished runs, as JSON; the gap is to the first of them."""
    records = [record_of(name, config) for name, config in settings.items()]
    first = records[0]["validation_loss_nats"]
    for record in records:
        record["validation_loss_gap_ratio"] = record["validation_loss_nats"] / first - 1
    report = {**provenance(), "results": records}
    out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 when the JSON is written, 3 when the command must be run again."""
    parser = programs.parser("xsake.bench.suites.sparse_training", __doc__)
    add = parser.add_argument
    add("--train", type=Path, nargs="+", required=True, help="tokenized datasets")
    add("--valid", type=Path, required=True, help="a tokenized dataset")
    add("--runs", type=Path, required=True, help="folder of the runs")
    programs.add_out(parser)
    add("--seconds", type=float, default=540.0, help="save and stop then; default: %(default)g")
    add("--seed", type=int, default=0, help="of weights and data; default: %(default)s")
    add("--steps", type=int, default=0, help="of every run; default: those of the presets")
    add("--rows", type=int, default=0, help="of a batch; default: those of the presets")
    given = parser.parse_args(arguments)
    if missing := [str(x) for x in (*given.train, given.valid) if not x.exists()]:
        programs.stop(f"there is no {', '.join(missing)}; `xsake tokenize` makes datasets")
    settings, began = configs(given), time.monotonic()
    is_done = train_all(settings, given.seconds)
    seconds = time.monotonic() - began
    if not is_done or seconds > max(given.seconds - LEAST_SECONDS, LEAST_SECONDS):
        print("run the same command again to resume")
        return 3
    for record in write(settings, given.out)["results"]:
        print(
            f"{record['run']}: loss {record['validation_loss_nats']:.4f} "
            f"({record['validation_loss_gap_ratio']:+.2%}), "
            f"{record['median_tokens_per_second']:,.0f} tokens/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
