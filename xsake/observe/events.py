"""Events logged by a training run: one JSON object per line of events.jsonl.

Units are in the names, ratios run from 0 to 1, losses are in nats; null means unknown or not
finite. `step` is the number of completed updates when the event is written. A run that resumes at
step s keeps the events up to s and logs the later ones again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any, ClassVar

from xsake import _files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """The fields that every event has."""

    step: int
    time_unix_seconds: float = dataclasses.field(default_factory=time.time)
    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def to_json(self) -> str:
        """One JSON line without the trailing newline."""
        values = {"event": type(self).__name__, **dataclasses.asdict(self)}
        return json.dumps(_finite(values), allow_nan=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run starts, at step 0."""

    run: str
    config_hash: str
    data_hash: str
    commit: str
    device: str
    versions: dict[str, str]
    parameters: int
    steps: int
    tokens_per_step: int
    devices: int = 1  # number of devices, over all processes
    processes: int = 1
    mesh: str = ""  # "data 2 × fsdp 2 × context 1 × tensor 2"; empty with one device
    init: str = ""  # the checkpoint that the weights are from, and its hash
    init_hash: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A run resumes from a checkpoint.

    `note` names damaged checkpoints that were skipped, and says what a longer schedule changes.
    """

    commit: str
    device: str
    note: str = ""
    steps: int | None = None  # of the schedule, if it is longer than before
    devices: int = 1
    processes: int = 1
    mesh: str = ""  # as that of RunStarted


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep(Event):
    """Metrics of one step; times are the mean over the steps since the previous TrainStep.

    density_ratio is that of the selected branch, if the model has sparse attention.
    """

    loss_nats: float | None
    learning_rate: float
    gradient_norm: float | None
    # total so far of steps whose loss or gradient was not finite
    skipped_steps: int = dataclasses.field(metadata={"is_counter": True})
    density_ratio: float  # of the plan; 1 without a plan
    tokens_seen: int = dataclasses.field(metadata={"is_counter": True})
    step_seconds: float
    tokens_per_second: float
    mfu_ratio: float | None = None
    peak_bytes: int | None = None
    # Density that this batch visited, with its document boundaries; None if unknown.
    visited_density_ratio: float | None = None
    # KL of the indexer, the mean over layers; None unless model.attention is "msa".
    index_loss_nats: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Loss on held-out text; perplexity is e to the loss."""

    file: str
    data_hash: str
    loss_nats: float | None
    perplexity: float | None
    targets: int
    density_ratio: float  # as that of TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSwapped(Event):
    """A new plan is used from the next step on."""

    path: str
    plan_hash: str
    requested_density_ratio: float
    density_ratio: float
    head_density_ratios: list[list[float]]  # by layer and head
    calibration_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsObserved(Event):
    """What every head attends to, in a dense pass over one window of training text.

    Lists are by layer and head. An entropy is divided by its maximum, the logarithm of the keys
    (blocks) that a query sees: 0 attends to one key, 1 to all alike.
    """

    tokens: int
    block: int  # tokens of a block
    entropy_ratios: list[list[float]]  # over keys, mean over queries
    block_entropy_ratios: list[list[float]]  # over blocks
    top_density_ratio: float
    # share of attention in the best blocks of every row block, at that density
    top_mass_ratios: list[list[float]]
    observe_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """Text that the model continues a prompt with."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is being written; an incomplete one is ignored on resume."""

    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A step took ten times the median of the steps before it.

    `process` is the one that the others waited for; None: there is one, or it does not show.
    """

    step_seconds: float
    median_seconds: float
    process: int | None = None


LOST = "process lost"  # the reason of a Stopped that another process caused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """The run stops: "finished", "signal", "seconds", "stop_at", "not finite", "process lost".

    `note` names the process that was lost.
    """

    reason: str
    note: str = ""


def parse(line: str) -> Event:
    """The event of a JSON line; fields that this version does not know are ignored.

    >>> parse(Stopped(step=3, reason="finished").to_json()).reason
    'finished'
    """
    values = _files.parse_object(line, "the event")
    name = values.pop("event", None)
    kind = Event.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"no such event: {line[:60]!r}")
    known = {field.name for field in dataclasses.fields(kind)}
    found = {name: value for name, value in values.items() if name in known}
    _files.check_fields(kind, found, kind.__name__)
    return kind(**found)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return value
