"""A run's folder: locked by one process, with one config.json, and never begun anew in silence.

runs/NAME ─ lock ─┬─ run.restart: everything in it is moved to replaced/1, replaced/2 …
                  ├─ config.json of other settings: refused, but for more schedule.steps
                  └─ new: removed again if the run is refused before its first step
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xsake.observe import registry, sinks
from xsake.observe.events import LOST, CheckpointSaved, Resumed, Stopped, TrainStep
from xsake.train.config import Config

KEPT = ("lock", "replaced")  # what run.restart leaves where it is


@contextlib.contextmanager
def locked(config: Config) -> Iterator[int]:
    """Locks the run's folder for this process, checks its config.json and writes the new one.

    Yields schedule.steps of the old config.json, which may be fewer than now.
    """
    folder = config.run_folder
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        aside = _set_aside(folder) if config.run.restart else None
        try:
            before = _checked_steps(config)
            run = dataclasses.replace(config.run, restart=False)
            dataclasses.replace(config, run=run).write(folder / "config.json")
            yield before
        except Exception:
            # a refused setting must not keep the name, nor replace the run that has it
            if not _has_begun(folder):
                if is_new:
                    shutil.rmtree(folder)
                elif aside is not None:
                    _bring_back(folder, aside)
            raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    for attempt in range(3):
        with registry.lock(folder) as has_lock:
            if has_lock:
                yield
                return
        if attempt < 2:
            time.sleep(0.1)  # `xsake runs` holds the lock for an instant
    raise ValueError(f"{folder} is in use by another process; wait for it or name another run")


def _checked_steps(config: Config) -> int:
    """schedule.steps of config.json; raises if other settings differ in a run that has begun."""
    folder = config.run_folder
    if not (folder / "config.json").exists():
        return config.schedule.steps
    old = Config.read(folder / "config.json")
    if (old.hash, old.init) == (config.hash, config.init) or not _has_begun(folder):
        return config.schedule.steps
    longer = old.with_steps(max(old.schedule.steps, config.schedule.steps))
    if (longer.hash, longer.init) == (config.hash, config.init):
        return old.schedule.steps
    changes = differences(
        old.hashed_settings() | {"init": old.init}, config.hashed_settings() | {"init": config.init}
    )
    raise ValueError(
        f"{folder} was started with other settings ({'; '.join(changes)}); "
        "name another run with run.name, or begin this one anew with run.restart"
    )


def _has_begun(folder: Path) -> bool:
    """Whether a step was made or a checkpoint saved."""
    if any(x.name.isdigit() for x in (folder / "checkpoints").glob("*")) or _damaged(folder):
        return True
    path = folder / "events.jsonl"
    try:
        return path.exists() and any(isinstance(x, TrainStep) for x in sinks.read(path))
    except ValueError:  # damaged: events of something
        return True


def _damaged(folder: Path) -> list[str]:
    return sorted(x.name for x in (folder / "damaged").glob("*"))


def checked_history(folder: Path) -> str:
    """Refuses to begin at step 0 in a folder whose run had a complete checkpoint.

    Only a run that was killed, or lost a process, before its first checkpoint was complete begins
    again: a second CheckpointSaved is logged after the first checkpoint is complete, and a stop
    after the last, unless a process was lost. Returns "", for `processes.agreed`.
    """
    path = folder / "events.jsonl"
    events = sinks.read(path) if path.exists() else []
    saved = sum(isinstance(x, CheckpointSaved) for x in events)
    went_on = any(
        isinstance(x, Resumed) or (isinstance(x, Stopped) and x.reason != LOST) for x in events
    )
    if aside := _damaged(folder):
        why = f"its checkpoints are damaged ({', '.join(aside)} in damaged/)"
    elif saved > 1 or went_on:
        why = "its checkpoints are gone" if saved else "it saved no checkpoint"
    else:
        return ""
    raise ValueError(
        f"{folder} has events of a run up to step {max((x.step for x in events), default=0)}, but "
        f"{why}; bring one back to checkpoints/, or begin at step 0 with run.restart, "
        "which keeps the old files in replaced/"
    )


def position(folder: Path) -> str:
    """Where a run resumes, in words, for a process that ends because another one is lost."""
    saved = (x.name for x in (folder / "checkpoints").glob("*"))
    newest = max((int(name) for name in saved if name.isdigit()), default=None)
    at = "none, it begins at step 0" if newest is None else f"step {newest}"
    return f"Newest checkpoint of {folder}: {at}"


def _set_aside(folder: Path) -> Path | None:
    """Moves what a folder holds to the next free replaced/NUMBER, and returns that."""
    old = [x for x in folder.iterdir() if x.name not in KEPT]
    if not old:
        return None
    taken = [int(x.name) for x in (folder / "replaced").glob("*") if x.name.isdigit()]
    aside = folder / "replaced" / str(max(taken, default=0) + 1)
    aside.mkdir(parents=True)
    for path in old:
        path.rename(aside / path.name)
    return aside


def _bring_back(folder: Path, aside: Path) -> None:
    """Undoes `_set_aside`; what was written since is removed."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in KEPT:
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """The fields that differ, as "optimizer.beta1: 0.9 → 0.8"."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        a, b, name = old.get(key), new.get(key), f"{path}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, name + ".")
        elif a != b:
            found.append(f"{name}: {a} → {b}")
    return found
