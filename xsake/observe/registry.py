"""The list of runs: a run is a folder with config.json; its state is read from events.jsonl.

    runs/NAME/config.json, events.jsonl, checkpoints/STEP/, plans/*.safetensors, model/

Runs, checkpoints, plans and results are linked by content hashes in the events: those of config,
data and plan, and the commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xsake.observe import sinks
from xsake.observe.events import (
    Evaluated,
    Event,
    PlanSwapped,
    Resumed,
    RunStarted,
    Stopped,
    TrainStep,
)


@dataclasses.dataclass(frozen=True)
class Summary:
    """One line of `xsake runs`."""

    name: str
    config_hash: str = ""
    data_hash: str = ""
    commit: str = ""
    device: str = ""
    state: str = "not started"  # or "running", "dead", or the reason of the last stop
    step: int = 0
    steps: int = 0
    loss_nats: float | None = None
    density_ratio: float = 1.0
    checkpoints: tuple[int, ...] = ()
    plan: str = ""  # hash of the current plan
    plans: int = 0
    perplexity: dict[str, float] = dataclasses.field(default_factory=dict)  # by file


def runs(folder: str | Path) -> Iterator[Summary]:
    """The runs in a folder, sorted by name."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; `xsake train` creates it")
    for config in sorted(folder.glob("*/config.json")):
        yield summary(config.parent)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Locks a run's folder for this process until the end; yields False if another has it."""
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_live(folder: Path) -> bool:
    """Whether a process trains in this folder; a process that was killed holds no lock."""
    path = folder / "lock"
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    with path.open() as file:
        try:
            # shared, so that two of these calls do not take each other for a run
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def summary(folder: Path) -> Summary:
    """The summary of a run's folder; a damaged run is reported as damaged, not skipped."""
    return summarised(folder, sinks.read)


def summarised(folder: Path, read: Callable[[Path], list[Event]]) -> Summary:
    """The summary of a run from the events that `read` returns.

    With `event_log.newest` it takes as little time for a long run as for a short one.
    """
    path = folder / "events.jsonl"
    try:
        events = read(path) if path.is_file() else []
    except ValueError as error:
        return Summary(folder.name, state=str(error))
    except OSError as error:
        return Summary(folder.name, state=f"events.jsonl cannot be read: {error}")
    saved = (folder / "checkpoints").glob("*")
    return dataclasses.replace(
        of_events(folder.name, events, is_live(folder)),
        checkpoints=tuple(sorted(int(x.name) for x in saved if x.name.isdigit())),
        plans=len(list((folder / "plans").glob("*.safetensors"))),
    )


def of_events(name: str, events: list[Event], live: bool = False) -> Summary:
    """The summary of a run's events, without what else is in its folder."""
    # a run that was killed or crashed has not logged that it stopped
    values: dict[str, Any] = {"state": "running" if live else "dead"} if events else {}
    perplexity: dict[str, float] = {}
    for event in events:
        values["step"] = event.step
        if isinstance(event, RunStarted):
            for field in ("config_hash", "data_hash", "commit", "device", "steps"):
                values[field] = getattr(event, field)
        elif isinstance(event, Resumed):
            values |= {"commit": event.commit, "device": event.device}
            values |= {} if event.steps is None else {"steps": event.steps}
        elif isinstance(event, TrainStep):
            values |= {"loss_nats": event.loss_nats, "density_ratio": event.density_ratio}
        elif isinstance(event, Evaluated) and event.perplexity is not None:
            perplexity[event.file] = event.perplexity
        elif isinstance(event, PlanSwapped):
            values["plan"] = event.plan_hash
        elif isinstance(event, Stopped):
            values["state"] = event.reason
    return Summary(name, perplexity=perplexity, **values)
