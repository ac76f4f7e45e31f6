"""Train with sparse attention, crash, resume: the loss curve is that of a run without the crash.

python examples/train_and_resume.py

On the command line this is `xsake train …`; run the same command again to resume. Here an exception
in the middle of a run stands for kill -9: nothing is saved when it happens, so the second call goes
back to the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xsake.data import tokens
from xsake.model import PRESETS
from xsake.observe import sinks
from xsake.observe.events import Event, PlanSwapped, Resumed, TrainStep
from xsake.train import loop
from xsake.train.config import Checkpoint, Config, Data, Hads, Run, Schedule


class PowerCut(Exception):
    """Stands for kill -9."""


class CutAt:
    """An event sink that ends the process's work at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def write(self, event: Event) -> None:
        """Raises at the step."""
        if isinstance(event, TrainStep) and event.step == self.step:
            raise PowerCut(f"at step {event.step}")

    def close(self) -> None:
        """Nothing to close."""


def config_of(folder: Path, name: str, steps: int, length: int) -> Config:
    """A tiny model on folder/text: two dense steps, then plans of density 0.6, renewed."""
    return Config(
        model=dataclasses.replace(PRESETS["tiny"], vocab_size=300),
        data=Data(train=(str(folder / "text"),), length=length, rows=2),
        schedule=Schedule(steps=steps, warmup_steps=2),
        hads=Hads(density=0.6, warmup_steps=2, every=4, documents=2, block=16),
        checkpoint=Checkpoint(every=4, export=False),
        run=Run(name=name, folder=str(folder)),
    )


def losses(run: Path) -> dict[int, float | None]:
    """The logged loss of every step."""
    found = sinks.read(run / "events.jsonl")
    return {event.step: event.loss_nats for event in found if isinstance(event, TrainStep)}


def main(folder: Path = Path("runs/resume-example"), steps: int = 24, length: int = 128) -> bool:
    """Trains twice, once with a crash; returns whether the losses are equal to the last bit."""
    texts = [
        f"Cat number {i} sat on the mat and looked at cat number {i + 1}. " * 20 for i in range(9)
    ]
    tokens.tokenize(texts, tokens.train_tokenizer(texts, 300), folder / "text")
    undisturbed = loop.train(config_of(folder, "undisturbed", steps, length)).folder

    config = config_of(folder, "crashed", steps, length)
    try:
        loop.train(config, CutAt(steps - 2))
    except PowerCut as cut:
        print(f"power cut {cut}")
    outcome = loop.train(config)  # the same call again
    for event in sinks.read(outcome.folder / "events.jsonl"):
        if isinstance(event, Resumed):
            print(f"resumed at step {event.step}")
        if isinstance(event, PlanSwapped):
            print(f"step {event.step}: new plan of density {event.density_ratio:.2f}")
    first, second = losses(undisturbed), losses(outcome.folder)
    print(f"loss at steps 1 and {steps}: {second[1]:.3f} and {second[steps]:.3f}")
    print(f"equal to the run without the crash, bit for bit: {first == second}")
    return first == second


if __name__ == "__main__":
    main()
