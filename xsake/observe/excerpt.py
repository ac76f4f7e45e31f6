"""A run's events with fewer steps: small enough to be kept, whole enough to be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from xsake.observe import sinks
from xsake.observe.events import CheckpointSaved, Event, TrainStep


def excerpt(events: Iterable[Event], every: int) -> Iterator[Event]:
    """The first TrainStep, each that is `every` steps after the last one kept, and the last.

    Other events stay, but for those of checkpoints, which are not kept with it.
    """
    kept, waiting = None, None
    for event in events:
        if isinstance(event, CheckpointSaved):
            continue
        if not isinstance(event, TrainStep):
            if waiting is not None and event.step == waiting.step:
                yield waiting  # what is said of a step stands after it
                kept, waiting = waiting.step, None
            yield event
        elif kept is None or event.step - kept >= every:
            kept, waiting = event.step, None
            yield event
        else:
            waiting = event
    if waiting is not None:
        yield waiting


def write_excerpt(run: str | Path, out: str | Path, every: int) -> None:
    """Writes the excerpt of runs/NAME/events.jsonl to `out`."""
    events = excerpt(sinks.read(Path(run) / "events.jsonl"), every)
    Path(out).write_text("".join(event.to_json() + "\n" for event in events), encoding="utf-8")
