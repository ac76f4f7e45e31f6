"""Config: everything that a run is told. One tree of dataclasses is API, flags and config.json.

    Config ─┬─ model, seed, data, optimizer, schedule, hads, compute    change the numbers: hashed
            └─ evaluation, checkpoint, observe, run                     do not: free on resume

`xsake train --preset tiny --optimizer.learning-rate 1e-3` sets one leaf; runs/NAME/config.json
holds the whole tree, and `Config.read` takes it back.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsake.hads import budget, row_blocks
from xsake.hads.statistics import SELECTORS
from xsake.model import PRESETS as MODELS
from xsake.model import Config as Model


@dataclasses.dataclass(frozen=True)
class Data:
    """What is read. Files are folders that `xsake tokenize` wrote."""

    train: tuple[str, ...] = ()  # read as one text, in this order
    length: int = 256  # T, tokens of a row
    rows: int = 8  # of one update, over all micro-batches
    separate: bool = True  # documents in a row do not see each other
    bos: bool = False  # every row begins with the model's bos token
    verify: bool = True  # read every byte once at the start and compare its hash


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW on matrices and Adam on the rest, after clipping."""

    learning_rate: float = 1e-3  # at its peak
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of kernels; embeddings, norms and biases are not decayed
    clip_norm: float = 1.0  # longest gradient over all parameters; 0: never clipped
    accumulate: int = 1  # micro-batches of one update
    ema_decay: float = 0.0  # of an average of the parameters; 0: none is kept


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then a cosine down to final_ratio of it."""

    steps: int = 100
    warmup_steps: int = 10
    final_ratio: float = 0.1


@dataclasses.dataclass(frozen=True)
class Hads:
    """Dense for warmup_steps, then by a plan that is made anew every so many steps."""

    density: float | None = None  # of all layers and heads together; None: dense to the end
    warmup_steps: int = 50  # dense before the first plan
    every: int = 50  # steps from one plan to the next
    from_density: float = 1.0  # of the first plan, if ramp_steps > 0
    ramp_steps: int = 0  # from from_density down to density, in a straight line
    documents: int = 4  # windows to calibrate on
    policy: str = "output"  # uniform | entropy | kl | output
    # static | pooled | antidiagonal | gaussian | mean_query | past_query, which looks at no later
    # token: the others let a model see, by what it may see, a little of what it is to predict
    selector: str = "past_query"
    block: int = 64
    band: int = 0  # blocks before the diagonal that are always kept

    def density_at(self, step: int) -> float | None:
        """What a plan made after `step` updates has; None while attention is dense."""
        if self.density is None or step < self.warmup_steps:
            return None
        if not self.ramp_steps:
            return self.density
        done = min(1.0, (step - self.warmup_steps) / self.ramp_steps)
        return self.from_density + done * (self.density - self.from_density)

    def is_due(self, step: int) -> bool:
        """Whether a plan is made after `step` updates."""
        return self.density_at(step) is not None and (step - self.warmup_steps) % self.every == 0


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a step is computed."""

    dtype: str = "float32"  # of activations; parameters and their sums are float32
    scan: bool = True  # one compiled layer for all: compiles sooner, runs slower
    remat: bool = False  # compute activations again in the backward, for memory
    loss_tokens: int = 0  # whose logits are in memory at once; 0: all of a micro-batch
    implementation: str | None = None  # of attention; None: the fastest that can run


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and perplexity on other text, as the model attends at that step."""

    files: tuple[str, ...] = ()  # each is measured on its own
    every: int = 50  # steps; the last step is always followed by one
    windows: int = 32  # of each file, from its beginning; 0: all
    rows: int = 8


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is kept to go on from."""

    every: int = 50  # steps; a stop, whatever its cause, saves one too
    keep: int = 2  # the newest
    best: int = 1  # and those of lowest loss on the first evaluation file
    export: bool = True  # at the end, a folder `model` of safetensors
    export_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Observe:
    """Who is told. events.jsonl always is."""

    every: int = 1  # steps from one TrainStep event to the next
    prometheus_port: int = 0  # serves /metrics; 0: not
    wandb: bool = False  # offline, in the run's folder
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a run is, and when it stops before its time."""

    name: str = "first"
    folder: str = "runs"
    seconds: float = 0.0  # stops with a checkpoint after so long; 0: never
    stop_at: int = 0  # the same at this step
    devices: int = 0  # that share the rows of a batch evenly; 0: as many as can
    bad_steps: int = 5  # in a row without a finite loss and gradient, before it gives up


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole tree."""

    model: Model = MODELS["tiny"]
    seed: int = 0  # of initial weights, the order of data and the choice of calibration text
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    hads: Hads = Hads()
    compute: Compute = Compute()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    run: Run = Run()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def place(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder) / self.run.name

    @property
    def hash(self) -> str:
        """Of all that changes the numbers; where files lie does not, and data has its own hash."""
        values = self.numbers()
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def essence(self) -> Config:
        """This config with defaults for all that is not hashed: compiled code goes by it."""
        return Config(
            model=self.model,
            seed=self.seed,
            data=dataclasses.replace(self.data, train=(), verify=True),
            optimizer=self.optimizer,
            schedule=self.schedule,
            hads=self.hads,
            compute=self.compute,
        )

    def numbers(self) -> dict[str, Any]:
        """What is hashed, as plain values."""
        names = ("model", "seed", "data", "optimizer", "schedule", "hads", "compute")
        values = self.essence.to_dict()
        return {name: values[name] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """A Config of plain values; what is absent has its default, an unknown key is refused.

        >>> Config.from_dict({"data": {"lenght": 3}})
        Traceback (most recent call last):
        ValueError: data has no 'lenght'; did you mean 'length'?
        """
        return _from_dict(cls, values, "Config")

    def write(self, path: Path) -> None:
        """Writes config.json."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Reads config.json."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error


def _from_dict(cls: Any, values: Mapping[str, Any], place: str) -> Any:
    types = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(types)}"
            raise ValueError(f"{place} has no {key!r}; {hint}")
        kind = types[key]
        if kind is Model:
            value = Model.from_dict(value)
        elif dataclasses.is_dataclass(kind):
            value = _from_dict(kind, value, key)
        elif isinstance(value, list):
            value = tuple(value)
        given[key] = value
    return cls(**given)


def _check(config: Config) -> None:
    data, hads, optimizer = config.data, config.hads, config.optimizer
    counts = {
        "data.length": data.length,
        "data.rows": data.rows,
        "optimizer.accumulate": optimizer.accumulate,
        "schedule.steps": config.schedule.steps,
        "hads.every": hads.every,
        "hads.documents": hads.documents,
        "hads.block": hads.block,
        "evaluation.every": config.evaluation.every,
        "evaluation.rows": config.evaluation.rows,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "observe.every": config.observe.every,
        "run.bad_steps": config.run.bad_steps,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    for name, size in {
        "run.devices": config.run.devices,
        "hads.warmup_steps": hads.warmup_steps,
        "hads.ramp_steps": hads.ramp_steps,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
        "optimizer.learning_rate": optimizer.learning_rate,
    }.items():
        if not size >= 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if data.rows % optimizer.accumulate:
        raise ValueError(
            f"data.rows = {data.rows} is not a multiple of optimizer.accumulate = "
            f"{optimizer.accumulate}, into which they are split"
        )
    if config.schedule.warmup_steps > config.schedule.steps:
        raise ValueError(
            f"schedule.warmup_steps = {config.schedule.warmup_steps} is more than "
            f"schedule.steps = {config.schedule.steps}"
        )
    if not 0 <= optimizer.ema_decay < 1:
        raise ValueError(
            f"optimizer.ema_decay must be at least 0 and below 1, got {optimizer.ema_decay}"
        )
    if data.length > config.model.context:
        raise ValueError(
            f"data.length = {data.length} is more than model.context = {config.model.context}; "
            "raise the context"
        )
    if data.bos and config.model.bos is None:
        raise ValueError(
            "data.bos begins every row with model.bos, which is None; set model.bos to the id of "
            "a token, or data.bos to False"
        )
    for name, choice, choices in (
        ("compute.dtype", config.compute.dtype, ("float32", "bfloat16", "float16")),
        ("checkpoint.export_dtype", config.checkpoint.export_dtype, ("float32", "bfloat16")),
        ("hads.policy", hads.policy, budget.POLICIES),
        ("hads.selector", hads.selector, SELECTORS),
    ):
        if choice not in choices:
            raise ValueError(f"{name} {choice!r} is not one of {list(choices)}")
    if hads.density is not None:
        blocks = row_blocks.count_blocks(data.length, hads.block)
        heads = config.model.layers * config.model.heads
        row_blocks.blocks_of_density(hads.density, blocks, heads, hads.band)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], place: str = "") -> list[str]:
    """Leaves that differ, as "optimizer.beta1: 0.9 → 0.8"."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        a, b, where = old.get(key), new.get(key), f"{place}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, where + ".")
        elif a != b:
            found.append(f"{where}: {a} → {b}")
    return found


def _model(**sizes: Any) -> Model:
    return Model(**{"tied": True, "bos": 0, "eos": (0,), **sizes})


# 8 layers of 8 heads in 5.5 M parameters, 11 MB in bfloat16; tokens of its own BPE
_SHIPPED = Config(
    model=_model(
        vocab_size=8192,
        context=2048,
        layers=8,
        width=192,
        heads=8,
        kv_heads=8,
        head_size=32,
        mlp_width=512,
    ),
    data=Data(length=2048, rows=32, bos=True),
    optimizer=Optimizer(learning_rate=3e-3, ema_decay=0.999),
    schedule=Schedule(steps=8000, warmup_steps=500, final_ratio=0.02),
    compute=Compute(dtype="bfloat16", scan=False),
    evaluation=Evaluation(every=1000, windows=128, rows=32),
    checkpoint=Checkpoint(every=1000, export_dtype="bfloat16"),
    observe=Observe(every=20),
    run=Run(name="shipped"),
)

# GPT-2's vocabulary filled up to a multiple of 128, 38 M parameters of which 19 M are embeddings
_GPT = Config(
    model=_model(
        vocab_size=50_304,
        context=2048,
        layers=10,
        width=384,
        heads=6,
        kv_heads=6,
        head_size=64,
        mlp_width=1024,
        bos=50_256,
        eos=(50_256,),
    ),
    data=Data(length=2048, rows=8),
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(steps=10_000, warmup_steps=500, final_ratio=0.1),
    hads=Hads(warmup_steps=1000, every=1000, documents=8),
    compute=Compute(dtype="bfloat16", scan=False),
    evaluation=Evaluation(every=500, windows=256, rows=16),
    checkpoint=Checkpoint(every=1000),
    observe=Observe(every=20),
    run=Run(name="gpt-37m"),
)

# for first steps on a CPU, with room for any tokenizer of up to 8,192 entries
_TINY = Config(model=dataclasses.replace(MODELS["tiny"], vocab_size=8192), run=Run(name="tiny"))

PRESETS: dict[str, Config] = {"tiny": _TINY, "shipped": _SHIPPED, "gpt-37m": _GPT}
