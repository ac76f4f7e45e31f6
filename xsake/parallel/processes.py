"""Several processes: JAX's distributed runtime, started by the flags or as JAX detects it.

    srun, JobSet, mpirun, Cloud TPU ─ one process per host or device ─ start() ─ jax.distributed
    --processes.coordinator host:port --processes.count 4 --processes.id 2 ──┘

Process 0 is the coordinator and the only one that writes events, config.json, plans and `model/`.
All processes write checkpoints. `agreed` lets process 0 decide for all. `watch.py` notices a
process that died or hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from xsake import _jax


@dataclasses.dataclass(frozen=True)
class Processes:
    """How the processes of a run find and watch each other."""

    # host:port of process 0, with count and id; empty: as JAX detects it (Slurm, Kubernetes,
    # Open MPI, Cloud TPU), else there is one process
    coordinator: str = ""
    count: int = 0  # how many processes
    id: int = -1  # the number of this one, from 0
    detect: bool = True  # let JAX look for a cluster; False: one process unless coordinator is set
    lost_seconds: float = 30.0  # a process that is silent for so long has died or hangs
    start_seconds: int = 300  # how long to wait for the others at the start

    def __post_init__(self) -> None:
        given = (bool(self.coordinator), self.count != 0, self.id != -1)
        if any(given) != all(given):
            raise ValueError(
                f"processes.coordinator = {self.coordinator!r}, processes.count = {self.count} and "
                f"processes.id = {self.id} are given together or not at all; give all three"
            )
        if all(given) and not 0 <= self.id < self.count:
            raise ValueError(
                f"processes.id = {self.id} is not from 0 to processes.count - 1 = "
                f"{self.count - 1}; number the processes from 0"
            )
        if self.coordinator and not self.coordinator.rpartition(":")[2].isdigit():
            raise ValueError(
                f"processes.coordinator must be host:port, got {self.coordinator!r}; add the port"
            )
        if not 2 <= self.lost_seconds <= 60:
            raise ValueError(
                f"processes.lost_seconds must be from 2 to 60, got {self.lost_seconds}"
            )


def start(settings: Processes) -> None:
    """Joins the other processes, if there are any; called before JAX is used, once or more."""
    if _jax.coordination_client() is not None:
        return
    how: dict[str, Any] = {}
    if settings.coordinator:
        how = {
            "coordinator_address": settings.coordinator,
            "num_processes": settings.count,
            "process_id": settings.id,
        }
    elif not (settings.detect and _jax.in_cluster()):
        return
    # SIGTERM is ours: the processes stop together after a step, see `train.loop`
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        **how,
        initialization_timeout=settings.start_seconds,
        # `watch` ends the processes earlier, and says why
        heartbeat_timeout_seconds=round(2 * settings.lost_seconds + 30),
        shutdown_timeout_seconds=60,
    )


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def is_writer() -> bool:
    """Whether this process writes what all processes share: process 0."""
    return jax.process_index() == 0


_number = itertools.count()  # all processes agree on something in the same order
WAIT_SECONDS = 600


class RefusedError(ValueError):
    """All processes raise this at the same place; none is left waiting for another."""


def agreed(decide: Callable[[], str]) -> str:
    """What process 0 decides, in all processes; its ValueError or OSError is refused in all."""
    if count() == 1:
        return decide()
    client = _jax.coordination_client()
    key = f"xsake/agreed/{next(_number)}"
    if not is_writer():
        kind, _, text = client.blocking_key_value_get(key, WAIT_SECONDS * 1000).partition(":")
        if kind == "error":
            raise RefusedError(f"process 0: {text}")
        return text
    try:
        found = decide()
    except (ValueError, OSError) as error:
        client.key_value_set(key, f"error:{error}")
        raise RefusedError(str(error)) from error
    client.key_value_set(key, f"value:{found}")
    return found


def everyone(text: str) -> list[str]:
    """What each process passes, in the order of their numbers; waits for all."""
    if count() == 1:
        return [text]
    client = _jax.coordination_client()
    folder = f"xsake/everyone/{next(_number)}/"
    client.key_value_set(f"{folder}{jax.process_index():06}", f":{text}")
    client.wait_at_barrier(folder, WAIT_SECONDS * 1000)
    return [value[1:] for _, value in sorted(client.key_value_dir_get(folder))]


def check_same(values: Mapping[str, Any]) -> None:
    """Raises in all processes, and names it, if one has another value than process 0.

    Args:
      values: by the names that users know; compared as text.
    """
    texts = everyone(json.dumps({name: str(value) for name, value in values.items()}))
    wanted, *others = (json.loads(text) for text in texts)
    for number, other in enumerate(others, 1):
        for name in wanted | other:
            if other.get(name) != wanted.get(name):
                raise RefusedError(
                    f"process {number} has {name} = {other.get(name)}, process 0 has "
                    f"{wanted.get(name)}; start all processes with the same settings and data"
                )


def barrier(name: str) -> None:
    """Waits for all processes."""
    if count() > 1:
        client = _jax.coordination_client()
        client.wait_at_barrier(f"xsake/{name}/{next(_number)}", WAIT_SECONDS * 1000)


@contextlib.contextmanager
def held_by_writer(hold: Callable[[], Any]) -> Iterator[str]:
    """Process 0 enters `hold()`; all processes have what it yields, as a str.

    What process 0 raises while it enters is raised in all processes.
    """
    with contextlib.ExitStack() as stack:
        yield agreed(lambda: str(stack.enter_context(hold())))
