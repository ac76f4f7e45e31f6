"""The device mesh: which devices share what, by four named axes.

    data      every group of devices has a copy of the model and batch rows of its own
    fsdp      devices of a group keep a part of every parameter, and have batch rows of their own
    context   devices share a sequence
    tensor    devices share the heads and the hidden units of a layer

    --mesh.fsdp 2 --mesh.tensor 2 on eight devices:  data 2 × fsdp 2 × context 1 × tensor 2

Sizes come from the settings, then from XSAKE_MESH="fsdp=2,tensor=2", then: data takes all remaining
devices, the others have one. With one device there is no mesh. `sharding.py` says which axis of an
array lies on which axis of the mesh.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

# Outermost first. Devices that are neighbours in this order are on one host, where communication is
# fastest: those of a tensor axis wait for each other most often.
AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
VARIABLE = "XSAKE_MESH"


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Devices along each axis of the mesh; 0: as XSAKE_MESH says, else chosen."""

    data: int = 0  # copies of the model; chosen: all devices that the other axes leave
    fsdp: int = 0  # devices that share the parameters of a copy; chosen: 1
    tensor: int = 0  # devices that share the heads of a layer; chosen: 1
    context: int = 0  # devices that share a sequence; chosen: 1

    def check(self) -> None:
        """Raises for a negative size; not in `__post_init__`, where tyro would add words."""
        for name, size in dataclasses.asdict(self).items():
            if size < 0:
                raise ValueError(f"mesh.{name} must not be negative, got {size}; 0 has it chosen")

    @property
    def size(self) -> int:
        """The number of devices; 0 while a size is open."""
        return math.prod(dataclasses.astuple(self))

    def __str__(self) -> str:
        return " × ".join(f"{name} {getattr(self, name)}" for name in AXES)


ONE_DEVICE = MeshSizes()  # of commands: unless flags or XSAKE_MESH say otherwise


def parse(text: str) -> MeshSizes:
    """The sizes of "fsdp=4,context=2", as in XSAKE_MESH and `xsake inspect --mesh`.

    >>> parse("fsdp=4,context=2")
    MeshSizes(data=0, fsdp=4, tensor=0, context=2)
    """
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = (x.strip() for x in part.partition("="))
        if name not in AXES or not size.isdigit() or name in found:
            raise ValueError(
                f"the mesh {text!r} has {part!r}; give each of {', '.join(AXES)} at most once, as "
                "in fsdp=4,context=2"
            )
        found[name] = int(size)
    return MeshSizes(**found)


def given(asked: MeshSizes, environment: Mapping[str, str] = os.environ) -> MeshSizes:
    """The sizes of the settings, and where those are 0, of XSAKE_MESH; raises for negative ones.

    >>> given(MeshSizes(fsdp=2), {"XSAKE_MESH": "fsdp=4,tensor=2"})
    MeshSizes(data=0, fsdp=2, tensor=2, context=0)
    """
    asked.check()
    other = parse(environment.get(VARIABLE, ""))
    return MeshSizes(**{name: getattr(asked, name) or getattr(other, name) for name in AXES})


def resolved(
    asked: MeshSizes,
    devices: int,
    rows: int | None = None,
    accumulate: int = 1,
    *,
    all_devices: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> MeshSizes:
    """The size of every axis.

    Args:
      asked: the settings; 0 leaves a size to the environment or to this function.
      devices: how many there are.
      rows: batch rows of one update, which data × fsdp × accumulate must divide; None: any.
      accumulate: micro-batches into which an update is split.
      all_devices: every device must take part, as with several processes.
      environment: has XSAKE_MESH or not.

    >>> resolved(MeshSizes(), 8, 20, 2, environment={})
    MeshSizes(data=5, fsdp=1, tensor=1, context=1)
    """
    known = dataclasses.asdict(given(asked, environment))
    inner = {name: known[name] or 1 for name in AXES if name != "data"}
    copies = math.prod(inner.values())
    sizes = MeshSizes(data=known["data"] or max(1, devices // copies), **inner)
    if sizes.size > devices or (all_devices and sizes.size != devices):
        there = f"there {'are' if devices > 1 else 'is'} {devices}"
        remedy = "ask for fewer" if sizes.size > devices else "all of them must take part"
        raise ValueError(
            f"the mesh {sizes} has {sizes.size} devices, but {there}; {remedy}, by mesh.data, "
            f"mesh.fsdp, mesh.tensor, mesh.context or {VARIABLE}"
        )
    if rows is None:
        return sizes
    each = inner["fsdp"] * accumulate
    if not known["data"] and not all_devices and rows % each == 0:
        most = max(n for n in range(1, sizes.data + 1) if rows % (n * each) == 0)
        return dataclasses.replace(sizes, data=most)
    if rows % (sizes.data * each):
        raise ValueError(
            f"data.rows = {rows} is not divisible by mesh.data × mesh.fsdp × optimizer.accumulate "
            f"= {sizes.data} × {inner['fsdp']} × {accumulate}; make it a multiple of "
            f"{sizes.data * each}, or change the mesh"
        )
    return sizes


def make_mesh(sizes: MeshSizes, devices: Sequence[Any] | None = None) -> Mesh | None:
    """A mesh of these sizes, or None for one device.

    Args:
      sizes: of every axis.
      devices: which devices; default the first of all, in the order of processes.
    """
    if unset := [name for name in AXES if getattr(sizes, name) < 1]:
        raise ValueError(f"the axis {unset[0]!r} has no size yet; `resolved` divides the devices")
    if sizes.size == 1:
        return None
    shape = tuple(getattr(sizes, name) for name in AXES)
    auto = (AxisType.Auto,) * len(AXES)
    if devices is None:
        devices = jax.devices()[: sizes.size]
        if len(devices) == jax.device_count():  # on a TPU, in an order that suits its network
            return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)
    return Mesh(np.asarray(devices[: sizes.size]).reshape(shape), AXES, axis_types=auto)


def abstract_mesh(sizes: MeshSizes) -> AbstractMesh:
    """A mesh of these sizes without devices, which says where arrays would lie."""
    shape = tuple(getattr(sizes, name) for name in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sizes_of(mesh: Mesh | AbstractMesh | None) -> MeshSizes:
    """The sizes of a mesh; all 1 without one."""
    return MeshSizes(**(dict.fromkeys(AXES, 1) if mesh is None else dict(mesh.shape)))


def check_divides(sizes: MeshSizes, divided: Mapping[str, tuple[str, int]]) -> None:
    """Raises unless every axis divides what is split over it.

    Args:
      sizes: of the mesh.
      divided: by axis of the mesh, the setting that it splits and its value; an axis may be there
        several times as "tensor", "tensor 2" ….
    """
    for key, (name, value) in divided.items():
        axis = key.split()[0]
        size = getattr(sizes, axis)
        if value % size:
            fits = [n for n in range(1, size) if value % n == 0]
            raise ValueError(
                f"{name} = {value} is not divisible by mesh.{axis} = {size}; choose mesh.{axis} = "
                f"{fits[-1]}, or another {name}"
            )
