"""Checkpoints: everything that a run needs to resume exactly, written by Orbax.

    checkpoints/STEP/state   every array of the state, by name
                     plan    the plan's arrays, if there is a plan
                     facts   JSON: config and data hash, the plan's terms, a checksum of each array

No data-loader or RNG state is saved: both are functions of (seed, step). Orbax writes in the
background to a temporary folder and renames it when it is complete. Checksums detect damage to a
complete checkpoint; it is moved to damaged/, and the previous one is used.
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
    """The restored state and plan, and a note about damaged checkpoints that were skipped."""

    state: State
    plan: Plan | None
    note: str = ""


class Checkpoints:
    """The checkpoints of one run; `close` waits until all are written."""

    def __init__(self, config: Config, data_hash: str) -> None:
        self.folder = (config.run_folder / "checkpoints").absolute()
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
            **self._hashes,
            "terms": None if plan is None else dataclasses.asdict(plan.terms),
            "checksums": _checksums({**arrays, **{f"plan {x}": y for x, y in found.items()}}),
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
            try:
                state, plan = self._read(step, shapes)
                return Restored(state, plan, "; ".join(notes))
            except _OtherRunError:
                raise
            except Exception as error:  # a damaged file may raise anything
                aside = self._set_aside(step)
                why = str(error).split("\n")[0][:120]
                notes.append(f"checkpoint {step} is damaged and set aside in {aside}: {why}")
        if notes:
            raise ValueError(
                f"no checkpoint of {self.folder.parent} can be read ({'; '.join(notes)}); "
                "remove the folder to start again"
            )
        return None

    def _read(self, step: int, like: State) -> tuple[State, Plan | None]:
        facts = self._item(step, "facts", ocp.args.JsonRestore())
        for name, value in self._hashes.items():
            if facts[name] != value:
                raise _OtherRunError(
                    f"checkpoint {step} of {self.folder.parent} has {name} {facts[name]}, this "
                    f"run {value}; name another run with run.name"
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
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then stops the background threads."""
        self._manager.close()


class _OtherRunError(ValueError):
    """An undamaged checkpoint of another config or other data."""


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
    """Σ bits[i] · odd[i] mod 2³² for each array: detects any single changed element."""

    def one(x: Array) -> Array:
        bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
        odd = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435762) + jnp.uint32(1)
        return (bits * odd).sum(dtype=jnp.uint32)

    return {name: one(x) for name, x in arrays.items()}
