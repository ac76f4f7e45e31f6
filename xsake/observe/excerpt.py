"""A downsampled event log: fewer TrainStep events, no CheckpointSaved, all the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from xsake.observe import sinks
from xsake.observe.events import CheckpointSaved, Event, TrainStep


def excerpt(events: Iterable[Event], every: int) -> Iterator[Event]:
    """Downsamples TrainStep events.

    Keeps the first and the last TrainStep, one every `every` steps, and those of steps that have
    another event. All other events are kept except CheckpointSaved, because an excerpt has no
    checkpoints.
    """
    kept, skipped = None, None  # step of the last TrainStep kept; the TrainStep skipped since
    for event in events:
        if isinstance(event, CheckpointSaved):
            continue
        if not isinstance(event, TrainStep):
            if skipped is not None and event.step == skipped.step:
                yield skipped  # the TrainStep comes before other events of its step
                kept, skipped = skipped.step, None
            yield event
        elif kept is None or event.step - kept >= every:
            kept, skipped = event.step, None
            yield event
        else:
            skipped = event
    if skipped is not None:
        yield skipped


def write_excerpt(run: str | Path, out: str | Path, every: int) -> None:
    """Writes the excerpt of runs/NAME/events.jsonl to `out`."""
    events = excerpt(sinks.read(Path(run) / "events.jsonl"), every)
    Path(out).write_text("".join(event.to_json() + "\n" for event in events), encoding="utf-8")
