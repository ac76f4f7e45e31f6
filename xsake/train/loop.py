"""train(config): runs training in runs/NAME; it can be interrupted and resumed at any time.

    restore or start ─ for every step:  batch(step) ─ update ─┬─ TrainStep event, if one is due
                                                              ├─ a new plan, if one is due
                                                              ├─ evaluation
                                                              └─ checkpoint
                       until: last step | signal | time limit | too many bad steps in a row

The actions after a step run in this order. The checkpoint is last: it contains the plan of its
step, and all earlier events are on disk before it. After a kill at any point, the run resumes from
the checkpoint and logs the later events again, bit-identical on the same machine. Of several
processes, all run this loop and write their parts of checkpoints; process 0 writes everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from xsake import _jax
from xsake.data.stream import Stream
from xsake.data.tokenizer import read_tokenizer
from xsake.hads import Plan
from xsake.model import huggingface
from xsake.observe import events, provenance, sinks
from xsake.parallel import processes, sharding
from xsake.parallel.mesh import make_mesh, sizes_of
from xsake.parallel.watch import Watch
from xsake.train import (
    flops,
    folder,
    heads,
    inputs,
    optimizer,
    planning,
    run_sinks,
    samples,
    stopping,
    warm_start,
)
from xsake.train import step as stepping
from xsake.train.checkpoint import Checkpoints, Restored
from xsake.train.config import Config
from xsake.train.evaluation import evaluate
from xsake.train.stragglers import Stragglers


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
      extra_sinks: receive every event, in addition to the sinks that the config names; of several
        processes, those of process 0.
    """
    processes.start(config.processes)
    position = functools.partial(folder.position, config.run_folder)
    with contextlib.closing(Watch(config.processes.lost_seconds, position)) as watch:
        try:
            run_sinks.check(config)
            stream, held_out = inputs.opened(config)
            with (
                processes.held_by_writer(functools.partial(folder.locked, config)) as steps_before,
                stopping.stop_signals() as signals,
            ):
                session = _Session(config, stream, held_out, extra_sinks, int(steps_before), watch)
                return session.run(signals)
        except processes.RefusedError:  # all processes raise it
            raise
        except Exception as error:  # outside of `locked`, which then has cleared up
            watch.fail(error)
            raise


class _Pending(NamedTuple):
    """A step whose metrics are still on the device."""

    step: int
    metrics: stepping.Metrics


class _Session:
    """Training state and event sinks of one process."""

    def __init__(
        self,
        config: Config,
        stream: Stream,
        held_out: dict[str, Stream],
        extra_sinks: tuple[sinks.Sink, ...],
        steps_before: int,
        watch: Watch,
    ) -> None:
        self.config, self.stream, self.held_out = config, stream, held_out
        self.mesh = make_mesh(inputs.mesh_sizes(config, jax.device_count(), processes.count()))
        self.is_writer, self.process_count = processes.is_writer(), processes.count()
        self.sampler = None
        if config.observe.sample_every:
            self.sampler = samples.Sampler(config, next(iter(held_out.values()), stream))
        self.checkpoints = Checkpoints(config, stream.hash, steps_before)
        restored = self._restore()
        is_new = restored is None
        self.init_hash = ""
        if restored is None:
            processes.agreed(functools.partial(folder.checked_history, config.run_folder))
            restored = Restored(self._initial(), None)
        self.state = restored.state
        self._use_plan(restored.plan)
        self.step = self.first_step = int(self.state.step)
        since = -1 if is_new else self.step
        self.log = run_sinks.Log(config, since, extra_sinks, self.is_writer)
        self.watch = watch
        watch.on_lost = self._log_loss
        self.pending: list[_Pending] = []
        self.timer = time.perf_counter()  # when the first pending step began
        self.started = time.monotonic()
        self.stragglers = Stragglers()
        self.compiled: set[bool] = set()  # whether dense and sparse steps are
        self.is_timed = False  # whether the time since `timer` is that of steps alone
        self.stop_requests: list[Array] = []  # of the newest two steps, on the devices
        self.request_time: float | None = None  # when the last of them was read
        if is_new:
            self._start()
        else:
            self._log_resume(restored)

    def _initial(self) -> stepping.State:
        parameters = None
        if self.config.init:
            parameters, self.init_hash = warm_start.load(self.config, self.stream.files[0])
            processes.check_same({"the hash of init": self.init_hash})
        return stepping.initial_on(self.config, self.mesh, parameters)

    def _restore(self) -> Restored | None:
        like = jax.eval_shape(lambda: stepping.initial(self.config))
        where = jax.tree.map(lambda _: sharding.replicated(None), like)
        if self.mesh is not None:
            where = stepping.state_shardings(self.config, self.mesh)
        shapes = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like, where
        )
        return self.checkpoints.restore(shapes)

    def _use_plan(self, plan: Plan | None) -> None:
        self.plan = plan
        self.device_plan = planning.argument(plan, self.mesh)

    def run(self, signals: list[int]) -> Outcome:
        """Runs training steps until a stop condition holds."""
        config = self.config
        try:
            while (reason := self._stop_reason(signals)) is None:
                batch = inputs.training_batch(config, self.stream, self.step, self.mesh)
                stop_requests = None
                if self.process_count > 1 and self.mesh is not None:
                    stop_requests = stopping.requests(self._local_reason(signals), self.mesh)
                    if self.request_time is not None:
                        late = time.perf_counter() - self.request_time
                        self.watch.report_late(self.step, late)
                self.state, metrics = stepping.compiled_update(
                    self.state,
                    batch,
                    self.device_plan,
                    stop_requests,
                    config=config.static,
                    mesh=self.mesh,
                )
                self.step += 1
                self.pending.append(_Pending(self.step, metrics))
                self.stop_requests = [*self.stop_requests[-1:], metrics.stop_request]
                self._after_step()
            self._save()
            self.checkpoints.wait()
            if reason == "finished" and config.checkpoint.export:
                self._export()
            self.log.write(events.Stopped(step=self.step, reason=reason))
            return Outcome(self.step, reason, config.run_folder)
        except Exception as error:
            self.watch.fail(error)
            raise
        finally:
            self.checkpoints.close()
            self.log.close()

    def _log_loss(self, note: str) -> None:
        self.log.write_loss(self.step, note)

    # ------------------------------------------------------------------------------ after a step

    def _after_step(self) -> None:
        config, step = self.config, self.step
        is_last = step == config.schedule.steps
        if (self.plan is None) not in self.compiled:  # which took most of the time of this step
            self.compiled.add(self.plan is None)
            self.is_timed, self.request_time = False, None
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
        if heads.is_due(config, step):
            with self._untimed():
                weights = self.state.parameters
                self.log.write(heads.observe(config, weights, self.stream, step, self.mesh))
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
        if self.process_count == 1 and self.is_timed:
            self._check_time(fetched[-1].step, seconds)
        self.is_timed = True
        for pending in fetched:
            if self.is_writer and self._is_logged(pending.step):
                self.log.write(self._step_event(pending, seconds))
        worst = max(int(x.metrics.bad_steps) for x in fetched)
        if worst >= self.config.run.bad_steps:
            self._fail(worst)

    def _step_event(self, pending: _Pending, seconds: float) -> events.TrainStep:
        config, metrics = self.config, pending.metrics
        device_count = sizes_of(self.mesh).size
        tokens = config.data.rows * config.data.length
        density = planning.used_density(config, self.plan)
        ids = self.stream.batch(pending.step - 1, config.data.rows).segment_ids  # of all processes
        cost = flops.per_token(config.model, config.data.length, density)
        return events.TrainStep(
            step=pending.step,
            loss_nats=float(metrics.loss),
            learning_rate=float(metrics.learning_rate),
            gradient_norm=float(metrics.gradient_norm),
            skipped_steps=int(metrics.skipped_steps),
            density_ratio=density,
            visited_density_ratio=planning.visited_density(config, self.plan, np.asarray(ids)),
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
            plan = planning.new_plan(
                self.config, self.state.parameters, self.stream, self.step, self.mesh
            )
            seconds = time.perf_counter() - began
            self._use_plan(plan)
            path = Path("plans") / f"step-{self.step:06}.safetensors"
            if self.is_writer:
                (self.config.run_folder / "plans").mkdir(exist_ok=True)
                plan.save(self.config.run_folder / path)
            self.log.write(
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
                self.log.write(
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
            weights = sharding.whole(self.state.average or self.state.parameters, self.mesh)
            if self.is_writer:
                prompt, text = sampler.text(weights)
                self.log.write(events.Sampled(step=self.step, prompt=prompt, text=text))

    def _save(self, loss: float | None = None) -> None:
        """Saves a checkpoint of this step unless there is one, after all events are on disk."""
        with self._untimed():
            self._log_pending()
            self.checkpoints.wait()
            if self.step in self.checkpoints.steps():
                return
            self.log.write(events.CheckpointSaved(step=self.step, path=f"checkpoints/{self.step}"))
            self.log.sync()
            self.checkpoints.save(self.state, self.plan, loss)

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Excludes what runs inside from the time of the steps."""
        self._log_pending()
        yield
        self.timer, self.request_time = time.perf_counter(), None

    # ------------------------------------------------------------------------- start and stop

    def _start(self) -> None:
        config = self.config
        self.log.write(
            events.RunStarted(
                step=0,
                run=config.run.name,
                config_hash=config.hash,
                data_hash=self.stream.hash,
                commit=provenance.commit(),
                device=_jax.device_kind(),
                **self._devices(),
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
        self.log.write(
            events.Resumed(
                step=self.step,
                commit=provenance.commit(),
                device=_jax.device_kind(),
                note=". ".join(filter(None, notes)),
                steps=config.schedule.steps if is_longer else None,
                **self._devices(),
            )
        )
        # after what was the last step there was no new plan
        if is_longer and self.step == restored.steps and config.hads.is_due(self.step):
            self._swap_plan()

    def _devices(self) -> dict[str, Any]:
        """What events say of the devices."""
        found = {"devices": sizes_of(self.mesh).size, "processes": self.process_count}
        if self.mesh is None:
            return found
        order = stepping.token_order(self.config, self.mesh)
        tokens = f", {order} tokens" if self.mesh.shape["context"] > 1 else ""
        return found | {"mesh": f"{sizes_of(self.mesh)}{tokens}"}

    def _stop_reason(self, signals: list[int]) -> str | None:
        """Why no further step is made; the same in all processes."""
        if self.step >= self.config.schedule.steps:
            return "finished"
        if self.process_count == 1:
            return self._local_reason(signals)
        return self._common_reason()

    def _common_reason(self) -> str | None:
        """Why all processes stop: what one of them asked for in the step before the newest.

        That step has ended or is about to, while the devices work on the newest.
        """
        if self._is_at_stop():
            return "stop_at"
        if len(self.stop_requests) < 2:
            return None
        reason = stopping.REASONS[int(self.stop_requests[0])] or None
        now = time.perf_counter()
        if self.request_time is not None:
            self._check_time(self.step - 1, now - self.request_time)
        self.request_time = now
        return reason

    def _is_at_stop(self) -> bool:
        return bool(self.config.run.stop_at) and self.step >= self.config.run.stop_at

    def _check_time(self, step: int, seconds: float) -> None:
        """Logs a step that took ten times the median."""
        median = self.stragglers.median_if_slow(seconds)
        if median is not None:
            process = self.watch.slowest(step, seconds) if self.is_writer else None
            self.log.write(
                events.Straggler(
                    step=step, step_seconds=seconds, median_seconds=median, process=process
                )
            )

    def _local_reason(self, signals: list[int]) -> str | None:
        """Why this process wants to stop."""
        config = self.config
        if signals:
            return "signal"
        if self._is_at_stop():
            return "stop_at"
        if config.run.seconds and time.monotonic() - self.started >= config.run.seconds:
            return "seconds"
        return None

    def _fail(self, count: int) -> None:
        self.log.write(events.Stopped(step=self.step, reason="not finite"))
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
        weights = sharding.whole(weights, self.mesh)
        if not self.is_writer:
            return
        model = stepping.transformer(self.config, {x: y.astype(dtype) for x, y in weights.items()})
        file = self.stream.files[0]
        ends = () if file.header.end is None else (file.header.end,)
        tokenizer = read_tokenizer(file.tokenizer, next(iter(ends), None), ends)
        layout = "xsake" if self.config.model.is_sparse else "huggingface"
        huggingface.save(out, model, tokenizer, replace=True, layout=layout)


def _peak_bytes() -> int | None:
    found = jax.devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use")
