"""train(config): from a config to runs/NAME, stopped and taken up as often as need be.

    restore or begin ─ for every step:  batch(step) ─ update ─┬─ events, every so many steps
                                                              ├─ a new plan, when one is due
                                                              ├─ evaluation
                                                              └─ checkpoint
                       until: steps done | signal | seconds | bad steps in a row

What happens after a step happens in this order, and the checkpoint is last: it holds the plan of
its step, and all events up to it are on the disk. Killed anywhere, the run goes on from the
checkpoint and says the later events again, the same to the last bit on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from xsake import _jax
from xsake.data.stream import Stream
from xsake.data.tokens import TokenFile
from xsake.hads import Plan
from xsake.observe import events, provenance, sinks
from xsake.parallel import mesh as devices
from xsake.train import flops, planning
from xsake.train import step as stepping
from xsake.train.checkpoint import Checkpoints, Restored
from xsake.train.config import Config, differences


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int
    reason: str  # finished | signal | seconds | stop_at
    folder: Path


class NotFiniteError(ArithmeticError):
    """Loss or gradient was not finite for too many steps in a row."""


def train(config: Config, *more: sinks.Sink) -> Outcome:
    """Trains until it is done or stopped; called again with the same config, goes on.

    Args:
      config: what to do.
      more: sinks beside those that the config asks for.
    """
    stream = _stream(config, _files(config), config.seed)
    others = {Path(x).name: _stream(config, [_checked(config, x)]) for x in config.evaluation.files}
    with _claimed(config), _stop_signals() as stop:
        return _Session(config, stream, others, more).run(stop)


class _Session:
    """One process's part of a run: the state, and everyone who is told of it."""

    def __init__(
        self, config: Config, stream: Stream, others: dict[str, Stream], more: Any
    ) -> None:
        self.config, self.stream, self.others = config, stream, others
        pieces = config.optimizer.accumulate
        self.mesh = devices.make_mesh(config.run.devices, config.data.rows, pieces)
        self.checkpoints = Checkpoints(config, stream.hash)
        sharding = devices.everywhere(self.mesh)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: stepping.initial(config)),
        )
        found = self.checkpoints.restore(like)
        begun = found is not None
        if found is None:
            found = Restored(jax.device_put(stepping.initial(config), sharding), None)
        self.state, self.plan = found.state, found.plan
        self.argument = planning.argument(self.plan, sharding)
        self.step = int(self.state.step)
        self.file = sinks.EventFile(config.place / "events.jsonl", self.step if begun else -1)
        self.sinks: list[sinks.Sink] = [self.file, *_asked_for(config, self.step), *more]
        self.waiting: list[tuple[int, Any, Any]] = []  # steps whose metrics were not looked at yet
        self.clock = time.perf_counter()
        self.began = time.monotonic()
        if begun:
            self._resume(found.note)
        else:
            self._begin()

    def run(self, stop: list[int]) -> Outcome:
        """Steps until there is a reason not to."""
        config = self.config
        try:
            while (reason := self._reason(stop)) is None:
                batch = self.stream.batch(self.step, config.data.rows)
                self.state, metrics = stepping.compiled_update(
                    self.state,
                    devices.dealt(batch, self.mesh),
                    self.argument,
                    config=config.essence,
                    mesh=self.mesh,
                )
                self.step += 1
                self.waiting.append((self.step, metrics, batch.segment_ids))
                self._after()
            self._save()
            self.checkpoints.wait()
            if reason == "finished" and config.checkpoint.export:
                self._export()
            self.tell(events.Stopped(step=self.step, reason=reason))
            return Outcome(self.step, reason, config.place)
        finally:
            self.checkpoints.close()
            for sink in self.sinks:
                sink.close()

    def tell(self, event: events.Event) -> None:
        """Hands an event to every sink."""
        for sink in self.sinks:
            sink.write(event)

    # ------------------------------------------------------------------------------ after a step

    def _after(self) -> None:
        config, step = self.config, self.step
        is_last = step == config.schedule.steps
        if self._is_told(step):
            self._look()
        if config.hads.is_due(step) and not is_last:
            self._swap()
        loss = None
        if self.others and (step % config.evaluation.every == 0 or is_last):
            loss = self._evaluate()
        if step % config.checkpoint.every == 0 or is_last:
            self._save(loss)

    def _is_told(self, step: int) -> bool:
        return step % self.config.observe.every == 0 or step == self.config.schedule.steps

    def _look(self) -> None:
        """Waits for the steps since the last look, and tells of those that are due."""
        if not self.waiting:
            return
        seen = jax.device_get(self.waiting)
        now = time.perf_counter()
        seconds, self.clock = (now - self.clock) / len(seen), now
        self.waiting.clear()
        for step, metrics, segment_ids in seen:
            if self._is_told(step):
                self.tell(self._told(step, metrics, seconds, segment_ids))
        if (worst := max(int(x.bad_steps) for _, x, _ in seen)) >= self.config.run.bad_steps:
            self._give_up(worst)

    def _told(
        self, step: int, metrics: stepping.Metrics, seconds: float, segment_ids: np.ndarray
    ) -> events.TrainStep:
        config, count = self.config, 1 if self.mesh is None else self.mesh.size
        each = config.data.rows * config.data.length
        density = planning.density(self.plan)
        cost = flops.per_token(config.model, config.data.length, density)
        return events.TrainStep(
            step=step,
            loss_nats=float(metrics.loss),
            learning_rate=float(metrics.learning_rate),
            gradient_norm=float(metrics.gradient_norm),
            skipped_steps=int(metrics.skipped_steps),
            density_ratio=density,
            visited_density_ratio=planning.visited_density(config, self.plan, segment_ids),
            tokens_seen=step * each,
            step_seconds=seconds,
            tokens_per_second=each / seconds,
            mfu_ratio=flops.utilisation(each / seconds / count, cost, config.compute.dtype),
            peak_bytes=_peak_bytes(),
        )

    def _swap(self) -> None:
        with self._off_the_clock():
            began = time.perf_counter()
            plan = planning.new_plan(self.config, self.state.parameters, self.stream, self.step)
            seconds = time.perf_counter() - began
            self.plan = plan
            self.argument = planning.argument(plan, devices.everywhere(self.mesh))
            path = Path("plans") / f"step-{self.step:06}.safetensors"
            (self.config.place / "plans").mkdir(exist_ok=True)
            plan.save(self.config.place / path)
            self.tell(
                events.PlanSwapped(
                    step=self.step,
                    path=str(path),
                    plan_hash=planning.plan_hash(plan),
                    requested_density_ratio=plan.terms.density,
                    density_ratio=plan.density,
                    head_density_ratios=np.round(plan.shares, 4).tolist(),
                    calibration_seconds=seconds,
                )
            )

    def _evaluate(self) -> float | None:
        """Tells of every file, and returns the first one's loss if it is finite."""
        losses = []
        with self._off_the_clock():
            weights = self.state.average or self.state.parameters
            for name, stream in self.others.items():
                loss, targets = evaluate(self.config, weights, self.argument, stream, self.mesh)
                losses.append(loss)
                self.tell(
                    events.Evaluated(
                        step=self.step,
                        file=name,
                        data_hash=stream.hash,
                        loss_nats=loss,
                        perplexity=math.exp(min(loss, 700.0)),
                        targets=targets,
                        density_ratio=planning.density(self.plan),
                    )
                )
        return losses[0] if math.isfinite(losses[0]) else None

    def _save(self, loss: float | None = None) -> None:
        """Saves this step if it is not saved, once all that was said of it is on the disk."""
        with self._off_the_clock():
            self._look()
            self.checkpoints.wait()
            if self.step in self.checkpoints.steps():
                return
            self.tell(events.CheckpointSaved(step=self.step, path=f"checkpoints/{self.step}"))
            self.file.sync()
            self.checkpoints.save(self.state, self.plan, loss)

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """What is done inside does not count as time of the steps."""
        self._look()
        yield
        self.clock = time.perf_counter()

    # ------------------------------------------------------------------------- beginning and end

    def _begin(self) -> None:
        config = self.config
        self.tell(
            events.RunStarted(
                step=0,
                run=config.run.name,
                config_hash=config.hash,
                data_hash=self.stream.hash,
                commit=provenance.commit(),
                device=_jax.device_kind(),
                devices=1 if self.mesh is None else self.mesh.size,
                versions=provenance.versions("flax", "optax", "orbax-checkpoint"),
                parameters=sum(x.size for x in self.state.parameters.values()),
                steps=config.schedule.steps,
                tokens_per_step=config.data.rows * config.data.length,
            )
        )
        if config.hads.is_due(0):
            self._swap()

    def _resume(self, note: str) -> None:
        device = _jax.device_kind()
        self.tell(
            events.Resumed(step=self.step, commit=provenance.commit(), device=device, note=note)
        )

    def _reason(self, stop: list[int]) -> str | None:
        config = self.config
        if self.step >= config.schedule.steps:
            return "finished"
        if stop:
            return "signal"
        if config.run.stop_at and self.step >= config.run.stop_at:
            return "stop_at"
        if config.run.seconds and time.monotonic() - self.began >= config.run.seconds:
            return "seconds"
        return None

    def _give_up(self, count: int) -> None:
        self.tell(events.Stopped(step=self.step, reason="not finite"))
        saved = self.checkpoints.steps()
        place = f"checkpoint {saved[-1]}" if saved else "no checkpoint"
        raise NotFiniteError(
            f"loss or gradient was not finite for {count} steps in a row at step {self.step}; "
            f"{place} is the last good one: lower optimizer.learning_rate and begin another run"
        )

    def _export(self) -> None:
        """The folder `model`: safetensors, config and the tokenizer of the training text."""
        from xsake.data.tokenizer import read_tokenizer
        from xsake.model import huggingface

        out = self.config.place / "model"
        if (out / "config.json").exists():
            return
        weights = self.state.average or self.state.parameters
        dtype = self.config.checkpoint.export_dtype
        model = stepping.transformer(self.config, {x: y.astype(dtype) for x, y in weights.items()})
        file = self.stream.files[0]
        ends = () if file.header.end is None else (file.header.end,)
        tokenizer = read_tokenizer(file.tokenizer, next(iter(ends), None), ends)
        huggingface.save(out, model, tokenizer)


def evaluate(
    config: Config, weights: Any, plan: Plan | None, stream: Stream, mesh: Mesh | None = None
) -> tuple[float, int]:
    """Mean loss in nats over the config's evaluation windows, and how many targets they have."""
    how, each = config.evaluation, 1 if mesh is None else mesh.size
    rows = -(-how.rows // each) * each  # rows of weight 0 fill up what devices share
    total = count = 0.0
    for batch in stream.in_order(rows, how.windows or None):
        loss, targets = stepping.compiled_loss(
            weights, devices.dealt(batch, mesh), plan, config=config.essence, mesh=mesh
        )
        total, count = total + float(loss), count + float(targets)
    return total / max(count, 1), int(count)


# ------------------------------------------------------------------------------------------- inputs


def _files(config: Config) -> list[TokenFile]:
    if not config.data.train:
        raise ValueError(
            "data.train names no token file; `xsake tokenize` writes one, "
            "--data.train FOLDER names it"
        )
    return [_checked(config, path) for path in config.data.train]


def _stream(config: Config, files: list[TokenFile], seed: int = 0) -> Stream:
    data = config.data
    return Stream(files, data.length, seed, data.separate, config.model.bos if data.bos else None)


def _checked(config: Config, path: str) -> TokenFile:
    file = TokenFile.open(path, verify=config.data.verify)
    if file.header.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path} has a vocabulary of {file.header.vocab_size:,}, the model one of "
            f"{config.model.vocab_size:,}; set model.vocab_size"
        )
    return file


def _asked_for(config: Config, step: int) -> Iterator[sinks.Sink]:
    how, place = config.observe, config.place
    if how.prometheus_port:
        yield sinks.Prometheus(how.prometheus_port, config.run.name)
    if how.wandb:
        yield sinks.Wandb(place, config.run.name, config.to_dict())
    if how.tensorboard:
        yield sinks.TensorBoard(place / "tensorboard", step)


def _peak_bytes() -> int | None:
    found = jax.devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use")


@contextlib.contextmanager
def _claimed(config: Config) -> Iterator[None]:
    """The run's folder for this process alone, with this config in it and no other."""
    place = config.place
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{place} is in use by another process; wait for it or name another run"
            ) from None
        path = place / "config.json"
        if path.exists():
            old = Config.read(path)
            if old.hash != config.hash:
                changes = differences(old.numbers(), config.numbers())
                raise ValueError(
                    f"{place} was begun with other settings ({'; '.join(changes)}); "
                    "name another run with run.name"
                )
        part = path.with_suffix(".part")
        config.write(part)
        part.replace(path)
        yield


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT are put in; the second SIGINT interrupts at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever runs it has to stop it
        yield seen
        return
    try:
        yield seen
    finally:
        for number, old in before.items():
            signal.signal(number, old)
