"""train(config): runs training in runs/NAME; it can be interrupted and resumed at any time.

    restore or start ─ for every step:  batch(step) ─ update ─┬─ TrainStep event, if one is due
                                                              ├─ a new plan, if one is due
                                                              ├─ evaluation
                                                              └─ checkpoint
                       until: last step | signal | time limit | too many bad steps in a row

The actions after a step run in this order. The checkpoint is last: it contains the plan of its
step, and all earlier events are on disk before it. After a kill at any point, the run resumes from
the checkpoint and logs the later events again, bit-identical on the same machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from xsake import _extras, _jax
from xsake.data.stream import Stream
from xsake.data.tokenizer import read_tokenizer
from xsake.hads import Plan
from xsake.model import huggingface
from xsake.observe import events, provenance, sinks
from xsake.parallel.mesh import make_mesh, replicated, shard_batch
from xsake.train import flops, folder, inputs, optimizer, planning, samples, warm_start
from xsake.train import step as stepping
from xsake.train.checkpoint import Checkpoints, Restored
from xsake.train.config import Config


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a call of `train`."""

    step: int
    reason: str  # finished | signal | seconds | stop_at
    folder: Path


class NotFiniteError(ArithmeticError):
    """Loss or gradient was not finite for too many steps in a row."""


def train(config: Config, *extra_sinks: sinks.Sink) -> Outcome:
    """Trains until the last step or a stop condition; called again with the same config, resumes.

    Args:
      config: the settings.
      extra_sinks: receive every event, in addition to the sinks that the config names.
    """
    _check_sinks(config)
    stream = inputs.training_stream(config)
    held_out = inputs.held_out(config)
    with folder.locked(config) as steps_before, _stop_signals() as signals:
        return _Session(config, stream, held_out, extra_sinks, steps_before).run(signals)


class _Pending(NamedTuple):
    """A step whose metrics are still on the device."""

    step: int
    metrics: stepping.Metrics
    segment_ids: np.ndarray


class _Session:
    """Training state and event sinks of one process."""

    def __init__(
        self,
        config: Config,
        stream: Stream,
        held_out: dict[str, Stream],
        extra_sinks: tuple[sinks.Sink, ...],
        steps_before: int,
    ) -> None:
        self.config, self.stream, self.held_out = config, stream, held_out
        pieces = config.optimizer.accumulate
        self.mesh = make_mesh(config.run.devices, config.data.rows, pieces)
        self.sampler = None
        if config.observe.sample_every:
            self.sampler = samples.Sampler(config, next(iter(held_out.values()), stream))
        self.checkpoints = Checkpoints(config, stream.hash, steps_before)
        restored = self._restore()
        is_new = restored is None
        self.init_hash = ""
        if restored is None:
            folder.check_history(config.run_folder)
            restored = Restored(self._initial(), None)
        self.state = restored.state
        self._use_plan(restored.plan)
        self.step = self.first_step = int(self.state.step)
        path = config.run_folder / "events.jsonl"
        self.event_file = sinks.EventFile(path, -1 if is_new else self.step)
        self.sinks: list[sinks.Sink] = [
            self.event_file,
            *_configured_sinks(config, self.step),
            *extra_sinks,
        ]
        self.pending: list[_Pending] = []
        self.timer = time.perf_counter()  # when the first pending step began
        self.started = time.monotonic()
        if is_new:
            self._start()
        else:
            self._log_resume(restored)

    def _initial(self) -> stepping.State:
        parameters = None
        if self.config.init:
            parameters, self.init_hash = warm_start.load(self.config, self.stream.files[0])
        return jax.device_put(stepping.initial(self.config, parameters), replicated(self.mesh))

    def _restore(self) -> Restored | None:
        sharding = replicated(self.mesh)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: stepping.initial(self.config)),
        )
        return self.checkpoints.restore(shapes)

    def _use_plan(self, plan: Plan | None) -> None:
        self.plan = plan
        self.device_plan = planning.argument(plan, replicated(self.mesh))

    def run(self, signals: list[int]) -> Outcome:
        """Runs training steps until a stop condition holds."""
        config = self.config
        try:
            while (reason := self._stop_reason(signals)) is None:
                batch = self.stream.batch(self.step, config.data.rows)
                self.state, metrics = stepping.compiled_update(
                    self.state,
                    shard_batch(batch, self.mesh),
                    self.device_plan,
                    config=config.static,
                    mesh=self.mesh,
                )
                self.step += 1
                self.pending.append(_Pending(self.step, metrics, np.asarray(batch.segment_ids)))
                self._after_step()
            self._save()
            self.checkpoints.wait()
            if reason == "finished" and config.checkpoint.export:
                self._export()
            self.emit(events.Stopped(step=self.step, reason=reason))
            return Outcome(self.step, reason, config.run_folder)
        finally:
            self.checkpoints.close()
            for sink in self.sinks:
                sink.close()

    def emit(self, event: events.Event) -> None:
        """Writes an event to every sink."""
        for sink in self.sinks:
            sink.write(event)

    # ------------------------------------------------------------------------------ after a step

    def _after_step(self) -> None:
        config, step = self.config, self.step
        is_last = step == config.schedule.steps
        if self._is_logged(step):
            self._log_pending()
        if config.hads.is_due(step) and not is_last:
            self._swap_plan()
        loss = None
        if self.held_out and (step % config.evaluation.every == 0 or is_last):
            loss = self._evaluate()
        every = config.observe.sample_every
        if self.sampler is not None and (step % every == 0 or is_last):
            self._sample(self.sampler)
        if step % config.checkpoint.every == 0 or is_last:
            self._save(loss)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.observe.every == 0 or step == self.config.schedule.steps

    def _log_pending(self) -> None:
        """Fetches pending metrics from the device and emits the TrainStep events that are due."""
        if not self.pending:
            return
        fetched = jax.device_get(self.pending)
        now = time.perf_counter()
        seconds, self.timer = (now - self.timer) / len(fetched), now
        self.pending.clear()
        for pending in fetched:
            if self._is_logged(pending.step):
                self.emit(self._step_event(pending, seconds))
        worst = max(int(x.metrics.bad_steps) for x in fetched)
        if worst >= self.config.run.bad_steps:
            self._fail(worst)

    def _step_event(self, pending: _Pending, seconds: float) -> events.TrainStep:
        config, metrics = self.config, pending.metrics
        device_count = 1 if self.mesh is None else self.mesh.size
        tokens = config.data.rows * config.data.length
        density = planning.used_density(config, self.plan)
        cost = flops.per_token(config.model, config.data.length, density)
        return events.TrainStep(
            step=pending.step,
            loss_nats=float(metrics.loss),
            learning_rate=float(metrics.learning_rate),
            gradient_norm=float(metrics.gradient_norm),
            skipped_steps=int(metrics.skipped_steps),
            density_ratio=density,
            visited_density_ratio=planning.visited_density(config, self.plan, pending.segment_ids),
            tokens_seen=pending.step * tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu_ratio=flops.utilisation(
                tokens / seconds / device_count, cost, config.compute.dtype
            ),
            peak_bytes=_peak_bytes(),
            index_loss_nats=float(metrics.index_loss) if config.model.attention == "msa" else None,
        )

    def _swap_plan(self) -> None:
        """Calibrates a new plan, saves it and uses it from the next step on."""
        with self._untimed():
            began = time.perf_counter()
            plan = planning.new_plan(self.config, self.state.parameters, self.stream, self.step)
            seconds = time.perf_counter() - began
            self._use_plan(plan)
            path = Path("plans") / f"step-{self.step:06}.safetensors"
            (self.config.run_folder / "plans").mkdir(exist_ok=True)
            plan.save(self.config.run_folder / path)
            self.emit(
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
        """Evaluates every file, emits an event for each, returns the first loss if it is finite."""
        losses = []
        with self._untimed():
            weights = self.state.average or self.state.parameters
            for name, stream in self.held_out.items():
                loss, targets = evaluate(self.config, weights, self.device_plan, stream, self.mesh)
                losses.append(loss)
                self.emit(
                    events.Evaluated(
                        step=self.step,
                        file=name,
                        data_hash=stream.hash,
                        loss_nats=loss,
                        perplexity=math.exp(min(loss, 700.0)),
                        targets=targets,
                        density_ratio=planning.used_density(self.config, self.plan),
                    )
                )
        return losses[0] if math.isfinite(losses[0]) else None

    def _sample(self, sampler: samples.Sampler) -> None:
        with self._untimed():
            prompt, text = sampler.text(self.state.average or self.state.parameters)
            self.emit(events.Sampled(step=self.step, prompt=prompt, text=text))

    def _save(self, loss: float | None = None) -> None:
        """Saves a checkpoint of this step unless there is one, after all events are on disk."""
        with self._untimed():
            self._log_pending()
            self.checkpoints.wait()
            if self.step in self.checkpoints.steps():
                return
            self.emit(events.CheckpointSaved(step=self.step, path=f"checkpoints/{self.step}"))
            self.event_file.sync()
            self.checkpoints.save(self.state, self.plan, loss)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes what runs inside from the time of the steps."""
        self._log_pending()
        yield
        self.timer = time.perf_counter()

    # ------------------------------------------------------------------------- start and stop

    def _start(self) -> None:
        config = self.config
        self.emit(
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
                init=config.init or "",
                init_hash=self.init_hash,
                note=inputs.vocabulary_note(config, self.stream),
            )
        )
        if config.hads.is_due(0):
            self._swap_plan()

    def _log_resume(self, restored: Restored) -> None:
        config, notes = self.config, [restored.note]
        is_longer = restored.steps not in (None, config.schedule.steps)
        if is_longer and restored.steps is not None:
            notes.append(optimizer.longer_note(config, restored.steps, self.step))
        self.emit(
            events.Resumed(
                step=self.step,
                commit=provenance.commit(),
                device=_jax.device_kind(),
                note=". ".join(filter(None, notes)),
                steps=config.schedule.steps if is_longer else None,
            )
        )
        # after what was the last step there was no new plan
        if is_longer and self.step == restored.steps and config.hads.is_due(self.step):
            self._swap_plan()

    def _stop_reason(self, signals: list[int]) -> str | None:
        config = self.config
        if self.step >= config.schedule.steps:
            return "finished"
        if signals:
            return "signal"
        if config.run.stop_at and self.step >= config.run.stop_at:
            return "stop_at"
        if config.run.seconds and time.monotonic() - self.started >= config.run.seconds:
            return "seconds"
        return None

    def _fail(self, count: int) -> None:
        self.emit(events.Stopped(step=self.step, reason="not finite"))
        saved = self.checkpoints.steps()
        raise NotFiniteError(
            f"loss or gradient was not finite for {count} steps in a row at step {self.step}; "
            f"last good checkpoint: {saved[-1] if saved else 'none'}; "
            "lower optimizer.learning_rate and start a new run"
        )

    def _export(self) -> None:
        """Writes the folder `model`: safetensors, config and the tokenizer of the training text."""
        out = self.config.run_folder / "model"
        if self.step == self.first_step and (out / "config.json").exists():
            return
        weights = self.state.average or self.state.parameters
        dtype = self.config.checkpoint.export_dtype
        model = stepping.transformer(self.config, {x: y.astype(dtype) for x, y in weights.items()})
        file = self.stream.files[0]
        ends = () if file.header.end is None else (file.header.end,)
        tokenizer = read_tokenizer(file.tokenizer, next(iter(ends), None), ends)
        layout = "xsake" if self.config.model.is_sparse else "huggingface"
        huggingface.save(out, model, tokenizer, replace=True, layout=layout)


def evaluate(
    config: Config,
    weights: Mapping[str, Array],
    plan: Plan | None,
    stream: Stream,
    mesh: Mesh | None = None,
) -> tuple[float, int]:
    """Mean loss in nats over the evaluation windows of a file, and their number of targets."""
    settings, device_count = config.evaluation, 1 if mesh is None else mesh.size
    # batches are padded with sequences of weight 0 to a multiple of the device count
    rows = -(-settings.rows // device_count) * device_count
    total = count = 0.0
    for batch in stream.in_order(rows, settings.windows or None):
        loss, targets = stepping.compiled_loss(
            weights, shard_batch(batch, mesh), plan, config=config.static, mesh=mesh
        )
        total, count = total + float(loss), count + float(targets)
    return total / max(count, 1), int(count)


# ------------------------------------------------------------------------------- sinks and signals


def _check_sinks(config: Config) -> None:
    """Raises if a sink's package is not installed, before a folder is made."""
    settings = config.observe
    for name, is_on, extra, module in (
        ("prometheus_port", settings.prometheus_port, "serve", "prometheus_client"),
        ("wandb", settings.wandb, "wandb", "wandb"),
        ("trackio", settings.trackio, "trackio", "trackio"),
        ("tensorboard", settings.tensorboard, "tensorboard", "tensorboardX"),
    ):
        if is_on:
            _extras.require(f"observe.{name}", extra, module)


def _configured_sinks(config: Config, step: int) -> Iterator[sinks.Sink]:
    settings, folder = config.observe, config.run_folder
    if settings.prometheus_port:
        yield sinks.Prometheus(settings.prometheus_port, config.run.name)
    if settings.wandb:
        yield sinks.Wandb(folder, config.run.name, config.to_dict(), step)
    if settings.trackio:
        yield sinks.Trackio(config.run.name, config.to_dict(), step)
    if settings.tensorboard:
        yield sinks.TensorBoard(folder / "tensorboard", step)


def _peak_bytes() -> int | None:
    found = jax.devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use")


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that collects SIGTERM and SIGINT; the second SIGINT interrupts at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        previous = {number: signal.signal(number, handle) for number in numbers}
    except ValueError:
        # Only the main thread may set handlers. In another thread the caller must stop training.
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
