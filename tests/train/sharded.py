"""Training on 8 CPU devices and on one: `python -m tests.train.sharded FOLDER`.

It runs in a separate process, because the number of devices is fixed when JAX starts. It prints one
line per claim and exits with 1 if any does not hold.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import jax
import numpy as np

from tests.train.corpus import changed, config, token_file
from xsake.observe import sinks
from xsake.observe.events import Evaluated, PlanSwapped, RunStarted, TrainStep
from xsake.parallel.mesh import MeshSizes
from xsake.train import loop


def losses(place: Path, kind: type) -> list[float]:
    return [event.loss_nats for event in sinks.read(place / "events.jsonl") if type(event) is kind]


def far(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(a, b) / np.asarray(b))))


def main(folder: Path) -> int:
    assert len(jax.devices()) == 8
    whole = config(
        folder,
        token_file(folder),
        data__rows=8,
        schedule__steps=6,
        hads__warmup_steps=0,
        hads__every=3,
        hads__policy="uniform",  # whose calibration compiles soonest
        evaluation__every=6,
        checkpoint__every=3,
    )
    one = changed(whole, mesh=MeshSizes(data=1), run__name="one")
    eight = changed(whole, mesh=MeshSizes(fsdp=2), run__name="eight")
    moved = changed(whole, mesh=MeshSizes(data=1), run__name="moved")
    loop.train(one)
    loop.train(eight)
    loop.train(changed(moved, mesh=MeshSizes(fsdp=2), run__stop_at=4))
    loop.train(moved)
    said = sinks.read(eight.run_folder / "events.jsonl")
    places = one.run_folder, eight.run_folder, moved.run_folder
    steps = [losses(place, TrainStep) for place in places]
    tests = [losses(place, Evaluated) for place in places]
    try:
        loop.train(changed(whole, mesh=MeshSizes(data=3), run__name="uneven"))
        refused = ""
    except ValueError as error:
        refused = str(error)
    # float32 sums in another order, through six updates of Adam
    claims = {
        "eight devices take part": isinstance(said[0], RunStarted)
        and (said[0].devices, said[0].mesh) == (8, "data 4 × fsdp 2 × context 1 × tensor 1"),
        "plans are swapped": sum(isinstance(event, PlanSwapped) for event in said) == 2,
        "six steps are logged": [len(x) for x in steps] == [6, 6, 6],
        f"the losses are those of one device: {far(steps[1], steps[0]):.1e}": far(*steps[1::-1])
        < 1e-5,
        f"the evaluation losses too: {far(tests[1], tests[0]):.1e}": far(tests[1], tests[0]) < 1e-5,
        f"begun on eight, ended on one: {far(steps[2], steps[0]):.1e}": far(steps[2], steps[0])
        < 1e-5,
        f"three devices for eight rows raise: {refused}": "data.rows = 8 is not divisible"
        in refused,
    }
    for claim, holds in claims.items():
        print(f"{claim}: {'ok' if holds else 'WRONG'}", flush=True)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
