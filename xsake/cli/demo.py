"""xsake demo: calibrate, plan, compare and train on the shipped model, in minutes on two cores."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Column, Table

from xsake import BlockMask, _jax, masks, shipped
from xsake.cli.terminal import at_least, console, make_folder, runnable
from xsake.hads import row_blocks

if TYPE_CHECKING:
    from xsake.hads import Plan, Profile
    from xsake.model.observer import Observer

LENGTH, BLOCK = 2048, 64
HADS = ("mean_query/output", "mean_query/kl", "static/kl")  # SELECTOR/POLICY pairs in the table


def demo(
    folder: Path = Path("runs"),
    density: float = 0.43,
    calibration: int = 4,
    documents: int = 3,
    steps: int = 60,
) -> None:
    """Calibrates the shipped model, compares HADS with fixed patterns, trains a tiny model.

    Args:
      folder: where the plan and the training run are written; an earlier demo's are replaced,
        other folders of the same names are refused.
      density: density of the plan and of all methods.
      calibration: number of documents of 2,048 tokens to calibrate on.
      documents: number of other documents to measure the methods on.
      steps: steps of the training run.
    """
    from xsake.data import documents as texts
    from xsake.data.tokenizer import read_tokenizer
    from xsake.model import huggingface
    from xsake.model.observer import Observer

    at_least(1, calibration=calibration, documents=documents, steps=steps)
    row_blocks.blocks_of_density(density, row_blocks.count_blocks(LENGTH, BLOCK), 1)
    make_folder(folder)
    began = time.perf_counter()
    plans = folder / "demo-plan"
    for made in (plans, folder / "demo"):
        _check_replaceable(made)
    with _part("example mask, 1,536 tokens: the first keys and a sliding window"):
        rule = masks.causal() & (masks.first(16) | masks.sliding_window(256))
        console.print(str(BlockMask.from_rule(rule, (1536, 1536))))
    subject = Observer(huggingface.load(shipped.FOLDER, tokenizer=False).model)
    encode = read_tokenizer(shipped.FOLDER / "tokenizer.json").encode

    def cut(path: Path, count: int) -> list[np.ndarray]:
        return texts.load_documents([path], encode, LENGTH, count)

    _replace(plans)
    with _part(f"calibrate the shipped model on {calibration} × {LENGTH:,} tokens of Persuasion"):
        profile = _profile(subject, cut(shipped.CALIBRATION_TEXT, calibration))
        profile.save(plans / "profile.safetensors")
    with _part(
        f"plan a budget for every head at density {density}; blocks are selected at run time"
    ):
        plan = _plan(profile, density)
        plan.save(plans / "plan.safetensors")
        console.print(str(plan))
    held_out = cut(shipped.HELD_OUT_TEXT, documents)
    with _part(f"compare with fixed patterns on {documents} × {LENGTH:,} tokens of Moby-Dick"):
        console.print(_comparison(subject, profile, density, held_out))
    with _part("train a tiny model on Persuasion: dense warm-up, then HADS plans"):
        run = _train(folder, steps)
    console.print(f"\n{time.perf_counter() - began:.0f} s in all. What to run next:")
    model, text = shipped.FOLDER, shipped.HELD_OUT_TEXT
    for line in (
        f"xsake runs {folder}",
        f"xsake plan {plans}/profile.safetensors --density 0.3 -o {plans}/plan-0.3.safetensors",
        f"xsake evaluate {model} --plan {plans}/plan.safetensors --text {text} --documents 2",
        f"xsake generate --model {model} --prompt 'It was a'",
        f"xsake train --config {run}/config.json --run.name longer --schedule.steps 400",
    ):
        console.print(f"  {line.replace('xsake', runnable(), 1)}", soft_wrap=True)


MARK = ".made-by-xsake-demo"  # a file in every folder that the demo makes and may replace


def _check_replaceable(folder: Path) -> None:
    """Raises unless the folder is absent, empty, or an earlier demo's."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder} is not a folder of `xsake demo`; name another --folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise FileExistsError(
            f"{folder} was not made by `xsake demo`, which would replace it; rename it, or name "
            "another --folder"
        )


def _replace(folder: Path) -> None:
    """Makes the folder empty but for MARK."""
    _check_replaceable(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


@contextmanager
def _part(title: str) -> Iterator[None]:
    began = time.perf_counter()
    console.print(f"\n[bold]{title}[/]")
    yield
    console.print(f"[dim]{time.perf_counter() - began:.1f} s[/]")


def _profile(subject: Observer, documents: list[np.ndarray]) -> Profile:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("calibrating", total=len(documents))
        return subject.profile(
            documents,
            block=BLOCK,
            curves=("static", "mean_query"),
            report=lambda done: progress.update(task, completed=done),
        )


def _plan(profile: Profile, density: float) -> Plan:
    from xsake import hads

    selector, policy = HADS[0].split("/")
    return hads.make(profile, density, policy, selector)


def _comparison(
    subject: Observer, profile: Profile, density: float, documents: list[np.ndarray]
) -> Table:
    """Quality and time of every fixed pattern and of HADS at one density."""
    from xsake.bench.method_times import time_attention
    from xsake.evaluate.methods import at_density
    from xsake.evaluate.table import measure_methods

    methods = [
        method
        for method in at_density(profile, density, LENGTH)
        if method.kind in ("fixed", "seed") or method.name in HADS
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        found = measure_methods(
            subject,
            methods,
            documents,
            BLOCK,
            lambda what: progress.update(task, description=what),
        )
        progress.update(task, description="timing attention")
        times = time_attention(subject, documents[0], methods, BLOCK)
    table = Table(
        Column("method", no_wrap=True),
        *"density|KL|error|perplexity|ms|÷ dense".split("|"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Sorted by error, the error of attention's output. KL and error are measured on "
        "the dense model's activations. Perplexity is the end-to-end change relative to dense, ± "
        "its standard error over documents. ms is the time of attention in all layers, with block "
        f"selection, on {_jax.device_kind()}.",
    )
    dense = times["dense"].median_seconds
    table.add_row("dense", "1.000", "0", "0", "+0.00%", f"{1e3 * dense:.0f}", "1.00")
    for row in sorted(found, key=lambda row: row["error"]):
        error = row["perplexity_gap_standard_error"]
        spread = "" if error is None else f" ± {100 * error:.2f}"
        seconds = times[row["method"]].median_seconds
        is_ours = row["method"] in HADS
        table.add_row(
            ("HADS " if is_ours else "") + row["method"],
            f"{row['realised_density_ratio']:.3f}",
            f"{row['kl']:.4f}",
            f"{row['error']:.4f}",
            f"{row['perplexity_gap']:+.2%}{spread}",
            f"{1e3 * seconds:.0f}",
            f"{seconds / dense:.2f}",
            style="bold" if is_ours else None,
        )
    return table


def _train(folder: Path, steps: int) -> Path:
    """A run of the preset `tiny` on the shipped text, in folder/demo."""
    from xsake.data import text, tokens
    from xsake.data.tokenizer import read_tokenizer
    from xsake.observe.sinks import Terminal
    from xsake.train import config as settings
    from xsake.train import loop

    tiny = settings.PRESETS["tiny"]
    run = folder / "demo"
    _replace(run)
    tokenizer = tokens.end_token(read_tokenizer(shipped.FOLDER / "tokenizer.json"))
    files = []
    for path in (shipped.CALIBRATION_TEXT, shipped.HELD_OUT_TEXT):
        out = run / "text" / path.name.partition(".")[0]
        made = tokens.tokenize(text.documents([path]), tokenizer, out, sources=[path.name])
        files.append(str(made.folder))
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, context=512),
        data=settings.Data(train=tuple(files[:1]), length=512, rows=2),
        schedule=settings.Schedule(steps=steps, warmup_steps=steps // 10),
        hads=settings.Hads(
            density=0.5, warmup_steps=steps // 3, every=max(1, steps // 3), documents=2, block=32
        ),
        evaluation=settings.Evaluation(files=tuple(files[1:]), every=steps, windows=8, rows=2),
        checkpoint=settings.Checkpoint(every=steps),
        run=settings.Run(name="demo", folder=str(folder)),
    )
    return loop.train(config, Terminal(steps)).folder
