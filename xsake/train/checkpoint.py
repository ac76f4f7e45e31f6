"""Checkpoints: all that a run needs to go on as if it had never stopped, written by Orbax.

    checkpoints/STEP/state   every array of the state, by name
                     plan    the plan's arrays, where there is one
                     facts   JSON: config and data hash, the plan's terms, a checksum of each array

The step is the position in the data, and all randomness is a function of (seed, step): neither
needs more. Orbax writes beside the run, in the background, and renames when all is there. What
disks do to a finished checkpoint is found by the checksums: it is set aside, and the one before it
is used.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax
from orbax.checkpoint.checkpoint_managers import preservation_policy as preserve

from xsake import _jax
from xsake.hads import Plan
from xsake.train import planning
from xsake.train.config import Config
from xsake.train.step import State


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was read, and what had to be passed over."""

    state: State
    plan: Plan | None
    note: str = ""


class Checkpoints:
    """The checkpoints of one run; `close` waits for what is being written."""

    def __init__(self, config: Config, data_hash: str) -> None:
        self.folder = (config.place / "checkpoints").absolute()
        self._hashes = {"config_hash": config.hash, "data_hash": data_hash}
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
        """Of the finished ones, rising."""
        return sorted(self._manager.all_steps())

    def save(self, state: State, plan: Plan | None, loss: float | None = None) -> None:
        """Begins to write; `loss` is what the best are chosen by, None if it was not measured."""
        step = int(state.step)
        arrays = _named(state)
        if _jax.platform() == "cpu":  # where NumPy may share memory that the next step overwrites
            arrays = jax.tree.map(jnp.copy, arrays)
        found = planning.arrays(plan)
        facts = {
            **self._hashes,
            "terms": None if plan is None else dataclasses.asdict(plan.terms),
            "checksums": _checksums({**arrays, **{f"plan {x}": y for x, y in found.items()}}),
        }
        items = {"state": ocp.args.StandardSave(arrays), "facts": ocp.args.JsonSave(facts)}
        if plan is not None:
            items["plan"] = ocp.args.StandardSave(found)
        metrics = None if loss is None else {"loss_nats": loss}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(self, like: Any) -> Restored | None:
        """The newest that can be read, None if there is none at all.

        `like` is a State of shapes. A damaged one is moved to `damaged/` and named in the note.
        """
        notes: list[str] = []
        for step in reversed(self.steps()):
            try:
                state, plan = self._read(step, like)
                return Restored(state, plan, "; ".join(notes))
            except _OtherRunError:
                raise
            except Exception as error:  # whatever a damaged file makes its reader raise
                aside = self._set_aside(step)
                why = str(error).split("\n")[0][:120]
                notes.append(f"checkpoint {step} is damaged and set aside in {aside}: {why}")
        if notes:
            raise ValueError(
                f"no checkpoint of {self.folder.parent} can be read ({'; '.join(notes)}); "
                "remove the folder to begin anew"
            )
        return None

    def _read(self, step: int, like: Any) -> tuple[State, Plan | None]:
        facts = self._item(step, "facts", ocp.args.JsonRestore())
        for name, value in self._hashes.items():
            if facts[name] != value:
                raise _OtherRunError(
                    f"checkpoint {step} of {self.folder.parent} has {name} {facts[name]}, this "
                    f"run {value}; give the run another name"
                )
        shapes = _named(like)
        arrays = self._item(step, "state", ocp.args.StandardRestore(shapes))
        found: dict[str, Any] = {}
        if facts["terms"] is not None:
            found = jax.tree.map(np.asarray, self._item(step, "plan", ocp.args.StandardRestore()))
        sums = _checksums({**arrays, **{f"plan {x}": y for x, y in found.items()}})
        if sums != facts["checksums"]:
            wrong = [x for x in sums if sums[x] != facts["checksums"].get(x)]
            raise ValueError(f"the checksum of {wrong[0] if wrong else 'an array'} is wrong")
        plan = None if facts["terms"] is None else planning.rebuilt(found, facts["terms"])
        structure = jax.tree.structure(like)
        return jax.tree.unflatten(structure, [arrays[name] for name in shapes]), plan

    def _item(self, step: int, name: str, how: Any) -> Any:
        args = ocp.args.Composite(**{name: how})
        return self._manager.restore(step, args=args)[name]

    def _set_aside(self, step: int) -> Path:
        aside = self.folder.parent / "damaged" / str(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        shutil.move(self.folder / str(step), aside)
        self._manager.reload()
        return Path("damaged") / str(step)

    def wait(self) -> None:
        """Returns when everything is on the disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends the threads."""
        self._manager.close()


class _OtherRunError(ValueError):
    """A sound checkpoint that belongs to another config or other data."""


def _named(state: Any) -> dict[str, Any]:
    """Every leaf by its path, in the order of the tree."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="|"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _checksums(arrays: dict[str, Any]) -> dict[str, int]:
    found = jax.device_get(_sums({name: jnp.asarray(x) for name, x in arrays.items()}))
    return {name: int(x) for name, x in found.items()}


@jax.jit
def _sums(arrays: dict[str, Array]) -> dict[str, Array]:
    """Σ bits · (odd number of the place) mod 2³²: any one changed number changes it."""

    def one(x: Array) -> Array:
        bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
        odd = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435762) + jnp.uint32(1)
        return (bits * odd).sum(dtype=jnp.uint32)

    return {name: one(x) for name, x in arrays.items()}
