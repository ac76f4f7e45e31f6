"""Training config: one nested dataclass defines the Python API, the flags and config.json.

    Config ─┬─ model, seed, data, optimizer, schedule, hads, compute    affect the results: hashed
            │  (and index_loss, with model.attention = "msa")
            └─ evaluation, checkpoint, observe, run, mesh, processes    may change on resume

`xsake train --preset tiny --optimizer.learning-rate 1e-3` sets one field. runs/NAME/config.json
holds all of them, and `Config.read` reads it.
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

from xsake import _files
from xsake.model import PRESETS as MODELS
from xsake.model import Config as Model
from xsake.model import Sparse
from xsake.parallel.mesh import MeshSizes
from xsake.parallel.processes import Processes
from xsake.train import checks


@dataclasses.dataclass(frozen=True)
class Data:
    """Training text. A tokenized dataset is a folder written by `xsake tokenize`."""

    train: tuple[str, ...] = ()  # tokenized datasets, concatenated in this order
    length: int = 256  # T, tokens per sequence
    rows: int = 8  # sequences per update, over all micro-batches
    separate: bool = True  # documents in a sequence do not attend to each other
    bos: bool = False  # every sequence begins with the model's bos token
    verify: bool = True  # check the hash of the datasets at the start


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW after gradient clipping; weight decay on the kernels of linear layers only."""

    learning_rate: float = 1e-3  # peak learning rate
    beta1: float = 0.9  # decay of Adam's first moment
    beta2: float = 0.95  # decay of Adam's second moment
    epsilon: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0.1  # on kernels; embeddings, norms and biases are not decayed
    clip_norm: float = 1.0  # maximum global gradient norm; 0 disables clipping
    accumulate: int = 1  # micro-batches per update
    ema_decay: float = 0.0  # decay of a moving average of the parameters; 0 keeps none


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak learning rate, then a cosine to final_ratio of it."""

    steps: int = 100  # updates in all
    warmup_steps: int = 10  # updates of the warm-up
    final_ratio: float = 0.1  # last learning rate ÷ peak


@dataclasses.dataclass(frozen=True)
class Hads:
    """Dense attention for warmup_steps, then sparse with a plan recalibrated periodically."""

    density: float | None = None  # over all layers and heads; None: always dense
    warmup_steps: int = 50  # dense steps before the first plan
    every: int = 50  # steps between two plans
    from_density: float = 1.0  # density of the first plan, if ramp_steps > 0
    ramp_steps: int = 0  # steps of the linear ramp from from_density to density
    documents: int = 4  # windows of training text to calibrate on
    policy: str = "output"  # uniform | entropy | kl | output
    # One of hads.statistics.SELECTORS. Only static and past_query are strictly causal; the other
    # run-time selectors leak information about future tokens
    selector: str = "past_query"
    block: int = 64  # tokens per block of a plan; smaller ones allow lower densities
    band: int = 0  # blocks before the diagonal that are always kept

    def density_at(self, step: int) -> float | None:
        """Target density of a plan made after `step` updates; None while attention is dense."""
        if self.density is None or step < self.warmup_steps:
            return None
        if not self.ramp_steps:
            return self.density
        done = min(1.0, (step - self.warmup_steps) / self.ramp_steps)
        return self.from_density + done * (self.density - self.from_density)

    def is_due(self, step: int) -> bool:
        """Whether a new plan is made after `step` updates."""
        return self.density_at(step) is not None and (step - self.warmup_steps) % self.every == 0


@dataclasses.dataclass(frozen=True)
class Compute:
    """Precision, memory and backend of a step."""

    dtype: str = "float32"  # of activations; parameters and sums are float32
    scan: bool = True  # scan over layers: compiles faster, runs slower
    remat: bool = False  # recompute activations in the backward to save memory
    loss_tokens: int = 0  # tokens whose logits are in memory at once; 0: a whole micro-batch
    implementation: str | None = None  # attention backend; None: the fastest that can run


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and perplexity on held-out text, with the attention in use at that step."""

    files: tuple[str, ...] = ()  # tokenized datasets, each evaluated separately
    every: int = 50  # steps between evaluations; there is always one after the last step
    windows: int = 32  # sequences per file, from its beginning; 0: all
    rows: int = 8  # sequences per batch


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are saved, and which are kept."""

    every: int = 50  # steps between checkpoints; one is also saved when a run stops
    keep: int = 2  # how many of the newest to keep
    best: int = 1  # how many with the lowest loss on the first evaluation file to keep
    export: bool = True  # write a folder `model` of safetensors at the end
    export_dtype: str = "float32"  # float32 | bfloat16


@dataclasses.dataclass(frozen=True)
class Observe:
    """Where events are logged, in addition to events.jsonl."""

    every: int = 1  # steps between two TrainStep events
    prometheus_port: int = 0  # port that serves /metrics; 0: none
    wandb: bool = False  # log to an offline W&B run in the run's folder
    trackio: bool = False  # log to the local Trackio project `xsake`
    tensorboard: bool = False  # log to TensorBoard files in the run's folder
    sample_every: int = 0  # steps between two samples of the model's text; 0: none
    sample_tokens: int = 48  # new tokens of a sample
    # steps between two HeadsObserved events, each a dense pass over one sequence; 0: none
    heads_every: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """Output folder and early-stop conditions."""

    name: str = "first"  # name of the run
    folder: str = "runs"  # folder that contains the runs
    seconds: float = 0.0  # save and stop after this time; 0: no limit
    stop_at: int = 0  # save and stop at this step; 0: no limit
    bad_steps: int = 5  # raise after this many non-finite losses or gradients in a row
    restart: bool = False  # begin at step 0; what the folder holds is moved to replaced/


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a training run."""

    model: Model = MODELS["tiny"]
    # start from the weights of a folder of safetensors or a .gguf file; model is then its config
    init: str | None = None
    seed: int = 0  # of initial weights, data order and calibration text
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    hads: Hads = Hads()
    index_loss: float = 1.0  # weight of the indexer's loss (KL), with model.attention = "msa"
    compute: Compute = Compute()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    run: Run = Run()
    # devices that share batches, parameters, heads and sequences
    mesh: MeshSizes = dataclasses.field(default_factory=MeshSizes)
    # how the processes of a run find and watch each other
    processes: Processes = dataclasses.field(default_factory=Processes)

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def run_folder(self) -> Path:
        """runs/NAME."""
        return Path(self.run.folder) / self.run.name

    @property
    def hash(self) -> str:
        """Hash of all settings that affect results, without paths; the data has its own hash."""
        values = self.hashed_settings()
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def static(self) -> Config:
        """This config with defaults for all fields that are not hashed.

        Compiled functions take it as their static argument, so that changing other settings does
        not trigger a recompilation.
        """
        return Config(
            model=self.model,
            seed=self.seed,
            data=dataclasses.replace(self.data, train=(), verify=True),
            optimizer=self.optimizer,
            schedule=self.schedule,
            hads=self.hads,
            index_loss=self.index_loss,
            compute=self.compute,
        )

    def hashed_settings(self) -> dict[str, Any]:
        """The settings that `hash` covers, as plain values."""
        names = ("model", "seed", "data", "optimizer", "schedule", "hads", "compute")
        values = self.static.to_dict()
        found = {name: values[name] for name in names}
        found["model"] = _hashed_model(self.model)
        if self.model.attention == "msa":
            found["index_loss"] = self.index_loss
        # the path may change, as those of the data
        return found | ({"init": True} if self.init else {})

    def with_steps(self, steps: int) -> Config:
        """This config with a schedule of so many steps."""
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, steps=steps))

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values for JSON; the inverse of `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """A Config of plain values; absent keys have their defaults, unknown keys raise.

        >>> Config.from_dict({"data": {"lenght": 3}})
        Traceback (most recent call last):
        ValueError: data has no 'lenght'; did you mean 'length'?
        """
        run = values.get("run")
        if isinstance(run, Mapping) and "devices" in run:  # what mesh.data was before
            run = dict(run)
            mesh = {"data": run.pop("devices")} | dict(values.get("mesh", {}))
            values = {**values, "run": run, "mesh": mesh}
        return _from_dict(cls, values, "Config")

    def write(self, path: Path) -> None:
        """Writes config.json."""
        with _files.replaced(path) as part:
            part.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Config:
        """Reads config.json."""
        values = _files.read_object(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


# Fields of `Model` that runs before them did not have, with their defaults.
LATER = dict(
    window_rope=None,
    scale=None,
    soft_cap=None,
    sinks=False,
    post_norms=False,
    scaled_embedding=False,
    final_soft_cap=None,
)


def _hashed_model(model: Model) -> dict[str, Any]:
    """The model's settings; what old runs did not have is left out unless used: hashes stay."""
    values = model.to_dict()
    if not model.is_sparse:
        values = {name: x for name, x in values.items() if name not in ("attention", "sparse")}
    if model.rope.truncate:
        values["rope"] = {name: x for name, x in values["rope"].items() if name != "truncate"}
    return {name: x for name, x in values.items() if name not in LATER or x != LATER[name]}


def _from_dict(cls: Any, values: Mapping[str, Any], path: str) -> Any:
    types = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(types)}"
            raise ValueError(f"{path} has no {key!r}; {hint}")
        kind = types[key]
        name = key if path == "Config" else f"{path}.{key}"
        if dataclasses.is_dataclass(kind) and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, got {value!r:.60}")
        if not _files.fits(value, kind):
            raise ValueError(f"{name} must be {_files.describe(kind)}, got {value!r:.60}")
        if kind is Model:
            value = Model.from_dict(value)
        elif dataclasses.is_dataclass(kind):
            value = _from_dict(kind, value, key)
        elif isinstance(value, list):
            value = tuple(value)
        given[key] = value
    return cls(**given)


def _model(**sizes: Any) -> Model:
    return Model(**{"tied": True, "bos": 0, "eos": (0,), **sizes})


# 8 layers of 8 heads, 5.5 M parameters, 11 MB in bfloat16; its own BPE tokenizer
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

# GPT-2's vocabulary padded to a multiple of 128; 37 M parameters, 19 M of them embeddings
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

# The same text at 4,096 tokens a sequence, with dense attention and two that are sparse: a query
# sees 1,024 selected keys in both. A sequence is one text, so that there is much to select from;
# four query heads share a kv head, and with it their blocks. 37 M parameters each.
_LONG = dataclasses.replace(
    _GPT,
    model=dataclasses.replace(_GPT.model, context=4096, heads=8, kv_heads=2, mlp_width=1088),
    data=Data(length=4096, rows=8, separate=False),
    schedule=Schedule(steps=2000, warmup_steps=200, final_ratio=0.1),
    hads=Hads(),
    compute=Compute(dtype="bfloat16", loss_tokens=8192),
    evaluation=Evaluation(every=500, windows=128, rows=8),
    checkpoint=Checkpoint(every=250),
    run=Run(name="gpt-37m-4k"),
)


def _sparse_long(attention: str, **settings: Any) -> Config:
    model = dataclasses.replace(_LONG.model, attention=attention, sparse=Sparse(**settings))
    return dataclasses.replace(_LONG, model=model, run=Run(name=f"gpt-37m-{attention}"))


# for first steps on a CPU, with any tokenizer of up to 8,192 entries
_TINY = Config(model=dataclasses.replace(MODELS["tiny"], vocab_size=8192), run=Run(name="tiny"))

PRESETS: dict[str, Config] = {
    "tiny": _TINY,
    "shipped": _SHIPPED,
    "gpt-37m": _GPT,
    "gpt-37m-4k": _LONG,
    "gpt-37m-nsa": _sparse_long("nsa"),
    "gpt-37m-msa": _sparse_long("msa", num_selected=8),
}
