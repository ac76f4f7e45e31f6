"""xsake demo: calibrate, plan, compare and train on the shipped model, in minutes on two cores."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from xsake.observe.events import Event

LENGTH, BLOCK = 2048, 64
SELECTOR, POLICY = "mean_query", "output"  # of the plan
HADS = f"{SELECTOR}/{POLICY}"  # the same in the table, by the name that `evaluate.methods` gives it
BASELINE = "sink_window"  # what HADS is compared with, document by document
# all methods of the table, and how they are shown
NAMES = {
    HADS: "HADS",
    BASELINE: "sink + window",
    "bigbird": "BigBird",
}


class Compared(NamedTuple):
    """One method at one density on held-out text; gaps are ratios - 1."""

    method: str
    density: float
    gap: tuple[float, float | None]  # perplexity against dense attention: mean, standard error
    paired: tuple[float, float | None]  # perplexity against BASELINE at the same density


def demo(
    folder: Path = Path("runs"),
    density: float = 0.43,
    low_density: float = 0.2,
    calibration: int = 4,
    documents: int = 6,
    steps: int = 45,
) -> None:
    """Calibrates the shipped model, compares HADS with fixed patterns, trains a tiny model.

    Args:
      folder: where the plan and the training run are written; an earlier demo's are replaced,
        other folders of the same names are refused.
      density: density of the plan, and of all methods in the comparison.
      low_density: a lower density to compare all methods at.
      calibration: number of documents of 2,048 tokens to calibrate on.
      documents: number of other documents to measure the methods on.
      steps: steps of the training run.
    """
    from xsake.data import documents as texts
    from xsake.data import text
    from xsake.data.tokenizer import read_tokenizer
    from xsake.model import huggingface
    from xsake.model.observer import Observer

    at_least(1, calibration=calibration, documents=documents, steps=steps)
    for asked in (density, low_density):
        row_blocks.blocks_of_density(asked, row_blocks.count_blocks(LENGTH, BLOCK), 1)
    make_folder(folder)
    plans = folder / "demo-plan"
    for made in (plans, folder / "demo"):
        _check_replaceable(made)
    began = time.perf_counter()
    console.print(
        "HADS (head-adaptive dynamic sparsity) measures how many blocks each attention head of a "
        "model needs, and gives every head its own budget. This demo does so with a small model, "
        "compares the result with fixed patterns, and trains a tiny model. It takes a few minutes; "
        "pauses are XLA compiling."
    )
    with _part("1. A mask, one row for each 128 queries: blocks of keys marked · are skipped"):
        rule = masks.causal() & (masks.first(16) | masks.sliding_window(256))
        console.print(str(BlockMask.from_rule(rule, (1536, 1536))), soft_wrap=True)
    subject = Observer(huggingface.load(shipped.FOLDER, tokenizer=False).model)
    encode = read_tokenizer(shipped.FOLDER / "tokenizer.json").encode

    def cut(path: Path, count: int) -> list[np.ndarray]:
        (whole,) = text.documents([path])
        return texts.disjoint_documents(whole, encode, LENGTH, count)

    _replace(plans)
    with _part(
        f"2. Calibrate: the shipped model reads {calibration} × {LENGTH:,} tokens of Persuasion"
    ):
        profile = _profile(subject, cut(shipped.CALIBRATION_TEXT, calibration))
        profile.save(plans / "profile.safetensors")
        console.print(_focus(profile))
    with _part(f"3. Plan: all heads together visit {density:.0%} of the blocks; dark heads more"):
        plan = _plan(profile, density)
        plan.save(plans / "plan.safetensors")
        console.print(str(plan), soft_wrap=True)
    held_out = cut(shipped.HELD_OUT_TEXT, documents)
    with _part(
        f"4. Compare with fixed patterns on {documents} × {LENGTH:,} tokens of Moby-Dick, which "
        "the plan has not seen"
    ):
        found = _compare(subject, profile, (low_density, density), held_out)
        console.print(_comparison(found, _times(subject, profile, density, held_out[0]), density))
        for line in (*_verdicts(found, documents), *_published((low_density, density))):
            console.print(line)
    with _part(f"5. Train a tiny model on Persuasion for {steps} steps, a third of them dense"):
        run = _train(folder, steps)
    console.print(f"\n{time.perf_counter() - began:.0f} s in all. What to run next:")
    evaluation = shipped.HELD_OUT_TEXT
    for line in (
        "doctor",
        f"runs {folder}",
        f"plan {plans}/profile.safetensors --density 0.3 -o {plans}/plan-0.3.safetensors",
        f"evaluate shipped --plan {plans}/plan.safetensors --text {evaluation} --documents 2",
        "generate --model shipped --prompt 'It was a'",
        f"train --config {run}/config.json --run.name longer --schedule.steps 400",
    ):
        console.print(f"  {runnable()} {line}", soft_wrap=True)


@contextmanager
def _part(title: str) -> Iterator[None]:
    """Prints a title, and at the end the time if it is at least a second."""
    began = time.perf_counter()
    console.print(f"\n[bold]{title}[/]")
    yield
    if (seconds := time.perf_counter() - began) >= 1:
        console.print(f"[dim]({seconds:.0f} s)[/]")


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


def _profile(subject: Observer, documents: list[np.ndarray]) -> Profile:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("calibrating", total=len(documents))
        return subject.profile(
            documents,
            block=BLOCK,
            curves=(SELECTOR,),
            report=lambda done: progress.update(task, completed=done),
        )


def _focus(profile: Profile, mass: float = 0.95) -> str:
    """How much heads differ, in one sentence."""
    from xsake.hads.statistics import DENSITIES

    retained = np.asarray(profile.statistics.retained)  # [layers, N, densities], rising
    needed = DENSITIES[np.argmax(retained >= mass - 1e-6, axis=-1)]
    return (
        f"To keep {mass:.0%} of its attention, the most focused of {needed.size} heads needs "
        f"{needed.min():.0%} of its blocks, the median head {np.median(needed):.0%} and the "
        f"broadest {needed.max():.0%}."
    )


def _plan(profile: Profile, density: float) -> Plan:
    from xsake import hads

    return hads.make(profile, density, POLICY, SELECTOR)


def _compare(
    subject: Observer, profile: Profile, densities: Sequence[float], documents: list[np.ndarray]
) -> list[Compared]:
    """Perplexity of every method of NAMES at these densities, best first within a density."""
    from xsake.evaluate.methods import at_density
    from xsake.evaluate.quality import paired_gap
    from xsake.evaluate.table import measure_losses

    methods = [
        (density, method)
        for density in dict.fromkeys(densities)  # each once
        for method in at_density(profile, density, LENGTH)
        if method.name in NAMES
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("documents", total=len(documents))
        losses, dense = measure_losses(
            subject,
            [method for _, method in methods],
            documents,
            BLOCK,
            lambda done: progress.update(task, completed=done),
        )
    baseline = {density: losses[m] for m, (density, x) in enumerate(methods) if x.name == BASELINE}
    found = [
        Compared(
            method.name,
            density,
            paired_gap(losses[m], dense),
            paired_gap(losses[m], baseline[density]),
        )
        for m, (density, method) in enumerate(methods)
    ]
    return sorted(found, key=lambda x: (x.density, x.gap[0]))


def _times(
    subject: Observer, profile: Profile, density: float, tokens: np.ndarray
) -> dict[str, float]:
    """Seconds of all layers' attention under a few methods, and of "dense"."""
    from xsake.bench.method_times import time_attention
    from xsake.evaluate.methods import at_density

    timed = [x for x in at_density(profile, density, LENGTH) if x.name in (HADS, BASELINE)]
    with Progress(console=console, transient=True) as progress:
        progress.add_task("timing attention", total=None)
        found = time_attention(subject, tokens, timed, BLOCK)
    return {name: timing.median_seconds for name, timing in found.items()}


def _percent(gap: tuple[float, float | None]) -> str:
    mean, error = gap
    return f"{100 * mean:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _comparison(found: list[Compared], seconds: dict[str, float], density: float) -> Table:
    table = Table(
        "density",
        Column("method", no_wrap=True),
        Column("perplexity against dense, %", justify="right"),
        Column("against sink + window, %", justify="right"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="How much higher (+, worse) or lower (-, better) the perplexity is: mean over the "
        "documents ± its standard error. Sink + window visits the first block and the nearest "
        "ones; BigBird also random ones. The last column compares each method with sink + window "
        "document by document, which is more precise. Time of attention "
        f"in all layers at density {density}, block selection included: "
        f"HADS {1e3 * seconds[HADS]:.0f} ms, sink + window {1e3 * seconds[BASELINE]:.0f} ms, "
        f"dense {1e3 * seconds['dense']:.0f} ms on {_jax.device_kind()}.",
        caption_justify="left",
    )
    previous = None
    for row in found:
        if previous not in (None, row.density):
            table.add_section()
        table.add_row(
            "" if row.density == previous else f"{row.density:.2f}",
            NAMES[row.method],
            _percent(row.gap),
            "" if row.method == BASELINE else _percent(row.paired),
            style="bold" if row.method == HADS else None,
        )
        previous = row.density
    return table


def _verdicts(found: list[Compared], documents: int) -> list[str]:
    """For each density: is HADS better than BASELINE by more than two standard errors?"""
    lines = []
    windows = {row.density: row.gap[0] for row in found if row.method == BASELINE}
    for row in found:
        if row.method != HADS:
            continue
        mean, error = row.paired
        by = f"{abs(100 * mean):.2f}" + ("" if error is None else f" ± {100 * error:.2f}") + "%"
        if error is None:
            word = f"differs from sink + window's by {by}; one document has no standard error"
        elif abs(mean) < 2 * error:
            word = (
                f"differs from sink + window's by {by}, which is within chance: sink + window "
                f"itself loses {100 * windows[row.density]:.2f}%"
            )
        else:
            word = f"is {by} {'lower' if mean < 0 else 'higher'} than sink + window's"
        lines.append(
            f"At density {row.density:.2f}, HADS's perplexity {word} ({documents} documents)."
        )
    return lines


def _published(densities: Sequence[float]) -> list[str]:
    """The published comparison on a larger model, from the file that comes with the package."""
    table = json.loads(shipped.PUBLISHED.read_text())
    model = table["provenance"]["model"].partition(".")[0]
    size = f"{table['documents']} novels of {table['length']:,} tokens"
    file = f"{table['source']}, in the package as {shipped.PUBLISHED.name}"
    lines = [f"Published, perplexity against dense attention on {model}, {size} ({file}):"]
    for density in densities:
        rows = {x["method"]: x for x in table["densities"].get(str(density), {"rows": ()})["rows"]}
        if not rows:
            continue
        shown = (
            f"{NAMES[name]} "
            + _percent((rows[name]["perplexity_gap"], rows[name]["perplexity_gap_standard_error"]))
            + "%"
            for name in (HADS, BASELINE)
        )
        lines.append(f"  density {density:.2f}: {', '.join(shown)}")
    return lines


class _Narration:
    """An event sink for the demo's run: its loss now and then, its plans, what the loss means."""

    def __init__(self, steps: int, vocabulary: int) -> None:
        self._steps, self._vocabulary = steps, vocabulary
        self._has_plan = False

    def write(self, event: Event) -> None:
        """Prints what a newcomer can use; no speeds, because the first steps compile."""
        from xsake.observe.events import Evaluated, PlanSwapped, RunStarted, TrainStep

        if isinstance(event, RunStarted):
            console.print(
                f"{event.parameters:,} parameters, {event.tokens_per_step:,} tokens per step; "
                "the first steps compile."
            )
        elif isinstance(event, TrainStep) and event.loss_nats is not None:
            if event.step in (1, self._steps) or event.step % max(1, self._steps // 6) == 0:
                console.print(f"step {event.step:3d}: loss {event.loss_nats:.2f}")
        elif isinstance(event, PlanSwapped):
            then = f"from here on attention visits {event.density_ratio:.0%} of the blocks"
            again = "the new plan replaces the old one without compiling again"
            console.print(f"step {event.step:3d}: calibrated; {again if self._has_plan else then}")
            self._has_plan = True
        elif isinstance(event, Evaluated) and event.loss_nats is not None:
            console.print(
                f"On Moby-Dick the loss is {event.loss_nats:.2f}; guessing among "
                f"{self._vocabulary:,} tokens has {math.log(self._vocabulary):.2f}. This shows the "
                "steps of a run, not a trained model, which takes thousands of steps."
            )

    def close(self) -> None:
        """Nothing to close."""


def _train(folder: Path, steps: int) -> Path:
    """A run of the preset `tiny` on the shipped text, in folder/demo."""
    from xsake.data import text, tokens
    from xsake.data.tokenizer import read_tokenizer
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
    narration: Any = _Narration(steps, config.model.vocab_size)
    return loop.train(config, narration).folder
