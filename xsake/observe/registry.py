"""The list of runs: a run is a folder with config.json; its state is read from events.jsonl.

    runs/NAME/config.json, events.jsonl, checkpoints/STEP/, plans/*.safetensors, model/

Runs, checkpoints, plans and results are linked by content hashes in the events: those of config,
data and plan, and the commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from xsake.observe import sinks
from xsake.observe.events import Evaluated, PlanSwapped, Resumed, RunStarted, Stopped, TrainStep


@dataclasses.dataclass(frozen=True)
class Summary:
    """One line of `xsake runs`."""

    name: str
    config_hash: str = ""
    data_hash: str = ""
    commit: str = ""
    device: str = ""
    state: str = "not started"  # or "running", or the reason of the last stop
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


def summary(folder: Path) -> Summary:
    """The summary of a run's folder; a damaged run is reported as damaged, not skipped."""
    path = folder / "events.jsonl"
    try:
        events = sinks.read(path) if path.is_file() else []
    except ValueError as error:
        return Summary(folder.name, state=f"events.jsonl is damaged: {error}")
    values: dict[str, object] = {"state": "running"} if events else {}
    perplexity: dict[str, float] = {}
    for event in events:
        values["step"] = event.step
        if isinstance(event, RunStarted):
            for name in ("config_hash", "data_hash", "commit", "device", "steps"):
                values[name] = getattr(event, name)
        elif isinstance(event, Resumed):
            values |= {"commit": event.commit, "device": event.device}
        elif isinstance(event, TrainStep):
            values |= {"loss_nats": event.loss_nats, "density_ratio": event.density_ratio}
        elif isinstance(event, Evaluated) and event.perplexity is not None:
            perplexity[event.file] = event.perplexity
        elif isinstance(event, PlanSwapped):
            values["plan"] = event.plan_hash
        elif isinstance(event, Stopped):
            values["state"] = event.reason
    saved = (folder / "checkpoints").glob("*")
    return Summary(
        folder.name,
        checkpoints=tuple(sorted(int(x.name) for x in saved if x.name.isdigit())),
        plans=len(list((folder / "plans").glob("*.safetensors"))),
        perplexity=perplexity,
        **values,  # type: ignore[arg-type]
    )
