"""Checkpoints: everything that a run needs to resume exactly, written by Orbax.

    checkpoints/STEP/state   every array of the state, by name
                     plan    the plan's arrays, if there is a plan
                     facts   JSON: config and data hash, the plan's terms, a checksum of each array

No data-loader or RNG state is saved: both are functions of (seed, step). Orbax writes in the
background to a temporary folder and renames it when it is complete. Checksums detect damage to a
complete checkpoint; it is moved to damaged/, and the previous one is used. Any other error, such as
missing permissions or memory, is raised and moves nothing.

Of several processes, each writes and reads the parts of the arrays that its devices hold. Any mesh
and any number of processes can read a checkpoint. A checkpoint that one process cannot read is
damaged for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax
from orbax.checkpoint.checkpoint_managers import preservation_policy as preserve

from xsake import _files, _jax
from xsake.hads import Plan
from xsake.parallel import processes
from xsake.train import planning
from xsake.train.config import Config
from xsake.train.step import State


@dataclasses.dataclass(frozen=True)
class Restored:
    """The restored state and plan, and a note about damaged checkpoints that were skipped."""

    state: State
    plan: Plan | None
    note: str = ""
    steps: int | None = None  # schedule.steps when the checkpoint was saved


class Checkpoints:
    """The checkpoints of one run; `close` waits until all are written."""

    def __init__(self, config: Config, data_hash: str, steps_before: int | None = None) -> None:
        self.folder = (config.run_folder / "checkpoints").absolute()
        self._config, self._data_hash = config, data_hash
        # for checkpoints that do not say how long their schedule was
        self._steps_before = config.schedule.steps if steps_before is None else steps_before
        kept: list[Any] = [preserve.LatestN(config.checkpoint.keep)]
        if config.checkpoint.best:
            kept.append(
                preserve.BestN(
                    get_metric_fn=lambda metrics: metrics["loss_nats"],
                    reverse=True,
                    n=config.checkpoint.best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preserve.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=("state", "plan", "facts")
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, state: State, plan: Plan | None, loss: float | None = None) -> None:
        """Starts to write a checkpoint; `loss` ranks the best ones, None if not evaluated."""
        step = int(state.step)
        arrays = _named(state)
        if _jax.platform() == "cpu":  # NumPy may share memory that the next step overwrites
            arrays = jax.tree.map(jnp.copy, arrays)
        found = planning.arrays(plan)
        facts = {
            "config_hash": self._config.hash,
            "data_hash": self._data_hash,
            "steps": self._config.schedule.steps,
            "terms": None if plan is None else dataclasses.asdict(plan.terms),
            "checksums": _checksums(arrays)
            | _checksums({f"plan {x}": y for x, y in found.items()}),
        }
        items = {"state": ocp.args.StandardSave(arrays), "facts": ocp.args.JsonSave(facts)}
        if plan is not None:
            items["plan"] = ocp.args.StandardSave(found)
        metrics = None if loss is None else {"loss_nats": loss}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(self, shapes: State) -> Restored | None:
        """The newest checkpoint that can be read; None if there is no checkpoint at all.

        `shapes` is a State of `jax.ShapeDtypeStruct`s. A damaged checkpoint is moved to `damaged/`
        and named in the note.
        """
        notes: list[str] = []
        for step in reversed(self.steps()):
            read, why = self._attempt(step, functools.partial(self._read, step, shapes))
            # a process that could not read its part must not leave the others alone in a sum
            why = next(filter(None, processes.everyone(why)), "")
            if not why:
                restored, why = self._attempt(step, functools.partial(_verified, read, shapes))
                if not why:
                    return dataclasses.replace(restored, note="; ".join(notes))
            aside = self._set_aside(step)
            notes.append(f"checkpoint {step} is damaged and set aside in {aside}: {why}")
        if notes:
            raise ValueError(
                f"no checkpoint of {self.folder.parent} can be read ({'; '.join(notes)}); "
                "run.restart begins at step 0 and keeps the old files in replaced/"
            )
        return None

    def _attempt(self, step: int, work: Callable[[], Any]) -> tuple[Any, str]:
        """(its result, "") or (None, what is wrong with the checkpoint); raises other errors."""
        try:
            return work(), ""
        except Exception as error:
            why = self._damage(step, error)
            if why is None and type(error) is Exception:  # Orbax's wrapper
                cause = str(list(_causes(error))[-1]).split("\n")[0]
                raise OSError(
                    f"checkpoint {step} of {self.folder.parent} cannot be read, and nothing "
                    f"was moved: {cause}"
                ) from error
            if why is None:
                raise
            return None, why

    def _damage(self, step: int, error: Exception) -> str | None:
        """What is wrong with a checkpoint that failed to load; None if it is not its contents."""
        for cause in _causes(error):
            is_damage = isinstance(cause, _DamagedError | json.JSONDecodeError | FileNotFoundError)
            if is_damage or str(cause).startswith(FORMAT_ERRORS):
                _check_readable(self.folder / str(step))
                return str(cause).split("\n")[0][:120]
            if type(cause) not in (Exception, ValueError):  # in which Orbax wraps TensorStore's
                return None
        return None

    def _read(self, step: int, like: State) -> _Read:
        facts = self._facts(step)
        arrays = self._item(step, "state", ocp.args.StandardRestore(_named(like)))
        found: dict[str, Any] = {}
        if facts["terms"] is not None:
            found = jax.tree.map(np.asarray, self._item(step, "plan", ocp.args.StandardRestore()))
        return _Read(facts, arrays, found)

    def _facts(self, step: int) -> dict[str, Any]:
        """The facts of a checkpoint of this run, with `steps`."""
        facts = self._item(step, "facts", ocp.args.JsonRestore())
        kinds: dict[str, Any] = {"config_hash": str, "data_hash": str, "checksums": dict[str, int]}
        kinds |= {"terms": dict[str, Any] | None, "steps": int}
        if isinstance(facts, dict):
            facts = {"steps": self._steps_before} | facts
        if not isinstance(facts, dict) or not all(
            name in facts and _files.fits(facts[name], kind) for name, kind in kinds.items()
        ):
            raise _DamagedError("its facts are not those of a checkpoint")
        if facts["steps"] > self._config.schedule.steps:
            expected = f"with schedule.steps {self._config.schedule.steps}"
            self._refuse(step, f"schedule.steps {facts['steps']}", expected)
        expected = self._config.with_steps(facts["steps"]).hash
        if facts["config_hash"] != expected:
            self._refuse(step, f"config_hash {facts['config_hash']}", expected)
        if facts["data_hash"] != self._data_hash:
            self._refuse(step, f"data_hash {facts['data_hash']}", self._data_hash)
        return facts

    def _refuse(self, step: int, has: str, expected: str) -> NoReturn:
        raise ValueError(
            f"checkpoint {step} of {self.folder.parent} has {has}, this run {expected}; "
            "name another run with run.name"
        )

    def _item(self, step: int, name: str, how: Any) -> Any:
        if not (self.folder / str(step) / name).is_dir():
            raise _DamagedError(f"it has no folder {name}")
        # not by the manager, which waits for all processes: this one may fail to read its part
        is_json = isinstance(how, ocp.args.JsonRestore)
        handler = ocp.JsonCheckpointHandler() if is_json else ocp.StandardCheckpointHandler()
        return handler.restore(self.folder / str(step) / name, args=how)

    def _set_aside(self, step: int) -> Path:
        aside = self.folder.parent / "damaged" / str(step)
        if processes.is_writer():
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            shutil.move(self.folder / str(step), aside)
        processes.barrier("set aside")
        self._manager.reload()
        return Path("damaged") / str(step)

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then stops the background threads."""
        self._manager.close()


class _Read(NamedTuple):
    """What is in a checkpoint's files, not yet verified."""

    facts: dict[str, Any]
    arrays: dict[str, Any]  # of the state, by name
    plan: dict[str, Any]  # the plan's arrays


def _verified(read: _Read, like: State) -> Restored:
    """The state and plan, if the checksums are right; all processes compute them together."""
    facts, arrays, found = read
    sums = _checksums(arrays) | _checksums({f"plan {x}": y for x, y in found.items()})
    if sums != facts["checksums"]:
        wrong = [x for x in sums if sums[x] != facts["checksums"].get(x)]
        raise _DamagedError(f"the checksum of {wrong[0] if wrong else 'an array'} is wrong")
    plan = None
    if facts["terms"] is not None:
        try:
            plan = planning.rebuilt(found, facts["terms"])
        except (KeyError, TypeError, ValueError) as error:
            raise _DamagedError(f"its plan cannot be read: {error}") from None
    leaves = [arrays[name] for name in _named(like)]
    return Restored(
        jax.tree.unflatten(jax.tree.structure(like), leaves), plan, steps=facts["steps"]
    )


class _DamagedError(ValueError):
    """A checkpoint whose contents are wrong."""


# How TensorStore's errors begin if a file is cut off, missing or has other bytes than were written.
FORMAT_ERRORS = (
    "DATA_LOSS",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_readable(folder: Path) -> None:
    """Reads every file, and raises the system's error if one cannot be read."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            with (Path(parent) / name).open("rb") as file:
                while file.read(1 << 24):
                    pass


def _named(state: State) -> dict[str, Any]:
    """The leaves of the state by their paths, in tree order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="|"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _checksums(arrays: dict[str, Any]) -> dict[str, int]:
    found = jax.device_get(_sums({name: jnp.asarray(x) for name, x in arrays.items()}))
    return {name: int(x) for name, x in found.items()}


@jax.jit
def _sums(arrays: dict[str, Array]) -> dict[str, Array]:
    """Σ bits[i] · odd[i] mod 2³² for each array: detects any single changed element.

    i counts the elements in row-major order, axis by axis: sharded arrays are not gathered.
    """

    def one(x: Array) -> Array:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
        for axis in reversed(range(bits.ndim)):
            count = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            index, stride = index + count * jnp.uint32(stride % 2**32), stride * bits.shape[axis]
        odd = index * jnp.uint32(2654435762) + jnp.uint32(1)
        return (bits * odd).sum(dtype=jnp.uint32)

    return {name: one(x) for name, x in arrays.items()}
