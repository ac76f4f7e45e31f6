"""Kernels of hopper/lanes.py on the CPU, in NumPy: the bodies that run on the card, as they are.

    CTAs one after another ─ every lane at once ─ gather, scatter: checked for bounds and for races
    of lanes (shared memory) and of CTAs (global memory)

JAX's interpreter of Mosaic GPU has no loads and stores by lane. Here the functions of lanes.py that
touch memory are replaced, arithmetic is NumPy's, and loops and conditions are Python's. What
remains for a GPU is how the bodies are compiled, and how fast they are.
"""

import itertools
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper import (
    best_blocks,
    interval_transpose,
    lanes,
    layouts,
    outliers,
    transpose,
    work_table,
)
from xsake.backends.hopper.layouts import THREADS
from xsake.backends.hopper.sampled import compare, means, queries
from xsake.backends.hopper.selected import top

UNWRITTEN = -(1 << 30)  # of results and shared memory before the first store
LANE = np.arange(THREADS, dtype=np.int32)
OCTET_LANE = LANE.repeat(lanes.OCTET)  # of every value of an octet
EVERY_LANE = -1  # in place of a lane: all lanes, as in a load of a scalar
MODULES = (
    *(layouts, lanes, transpose, work_table, interval_transpose, top, best_blocks, outliers),
    *(compare, means, queries),
)


class Race(AssertionError):
    """Two lanes used an element of shared memory, one of them stored, with no barrier between.

    Or two lanes or CTAs stored different values to one element of global memory, or a CTA loaded an
    element that another one of the same launch stored. No kernel of lanes.py waits for another CTA;
    `add_one` to global memory, which none uses, is not checked.
    """


class Memory:
    """Elements of shared or global memory. A lane's own accesses are in order, others are not."""

    def __init__(self, values: np.ndarray, is_shared: bool = False):
        self.values = values
        self.writer = self.reader = None
        self.is_stored, self.is_loaded = np.zeros((2, values.size), bool)  # by an earlier CTA
        self.stored: list[np.ndarray] = []  # by this one
        self.loaded: list[np.ndarray] = []
        if is_shared:
            self.forget()

    def next_cta(self) -> None:
        """What was stored and loaded so far, in global memory, is no longer this CTA's."""
        for used, by_earlier in ((self.stored, self.is_stored), (self.loaded, self.is_loaded)):
            for at in used:
                by_earlier[at] = True
            used.clear()

    def forget(self) -> None:
        """A barrier: all accesses before it come before all accesses after it."""
        self.writer, self.reader = ({} for _ in range(2))

    def load(self, indices: np.ndarray, lane: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices)
        outside = (indices < 0) | (indices >= self.values.size)
        if outside.any():
            raise IndexError(f"a load of {indices[outside]} from {self.values.size} elements")
        if self.writer is not None:
            for at, who in _pairs(indices, lane):
                if self.writer.get(at, who) != who:
                    raise Race(f"lane {who} loads {at}, which {self.writer[at]} stored")
                self.reader.setdefault(at, who)
                if self.reader[at] != who:
                    self.reader[at] = EVERY_LANE
        if self.is_stored[indices].any():
            raise Race("a CTA loads what another one stored")
        self.loaded.append(indices)
        return self.values[indices]

    def store(self, indices: np.ndarray, values: Any, lane: np.ndarray) -> None:
        if (indices >= self.values.size).any():
            raise IndexError(f"a store to {indices.max()} of {self.values.size} elements")
        valid = indices >= 0
        at, values = indices[valid], np.broadcast_to(values, indices.shape)[valid]
        unique, number = np.unique(at, return_index=True)
        if not np.array_equal(values, values[number][np.searchsorted(unique, at)], equal_nan=True):
            raise Race("lanes store different values to one element")
        if self.writer is not None:
            for element, who in _pairs(at, lane[valid]):
                others = self.writer.get(element, who), self.reader.get(element, who)
                if others != (who, who):
                    raise Race(f"lane {who} stores {element}, which {others} stored, loaded")
                self.writer[element] = who
        earlier = self.is_stored[at]
        if not np.array_equal(values[earlier], self.values[at[earlier]], equal_nan=True):
            raise Race("CTAs store different values to one element")
        if self.is_loaded[at].any():
            raise Race("a CTA stores what another one loaded")
        self.stored.append(at)
        self.values[at] = values


def _pairs(indices: np.ndarray, lane: np.ndarray) -> Any:
    indices, lane = np.broadcast_arrays(indices, lane)
    return zip(indices.ravel().tolist(), lane.ravel().tolist(), strict=True)


class Ref:
    """A reference to a run of a Memory, as bodies use one: ref[i], ref[...] = x, ref.at[pl.ds]."""

    def __init__(self, memory: Memory, first: int = 0, size: int | None = None):
        self.memory, self.first = memory, int(first)
        self.size = memory.values.size - self.first if size is None else int(size)

    @property
    def dtype(self) -> np.dtype:
        return self.memory.values.dtype

    @property
    def at(self) -> Any:
        class At:
            def __getitem__(_, run: pl.Slice) -> Ref:
                assert 0 <= run.start <= run.start + run.size <= self.size
                return Ref(self.memory, self.first + run.start, run.size)

        return At()

    def inside(self, indices: Any) -> np.ndarray:
        """Indices into the memory. Those outside of this run are outside of the memory, too."""
        indices = np.asarray(indices)
        is_inside = (indices >= 0) & (indices < self.size)
        return np.where(is_inside, indices + self.first, self.memory.values.size)

    def __getitem__(self, index: Any) -> Any:
        assert np.ndim(index) == 0
        return self.memory.load(self.inside(index), np.int32(EVERY_LANE))

    def __setitem__(self, where: Any, values: Any) -> None:
        run = self if where is Ellipsis else self.at[where]
        run.memory.store(run.first + np.arange(run.size), np.asarray(values), run.lane)

    def load(self) -> np.ndarray:
        return self.memory.load(self.first + np.arange(self.size), self.lane)

    @property
    def lane(self) -> np.ndarray:
        """Which lane has each element when all of them are loaded: one, or eight in a row."""
        return {LANE.size: LANE, OCTET_LANE.size: OCTET_LANE}[self.size]


def unwritten(shape: Any, dtype: Any) -> np.ndarray:
    """An array before the first store; float16 cannot hold UNWRITTEN."""
    return np.full(shape, np.nan if dtype == np.float16 else UNWRITTEN, dtype)


def emulate(monkeypatch: Any) -> None:
    """Lets kernels of lanes.py run here. What calls them must not be compiled: jax.disable_jit."""
    shared: list[Memory] = []
    copies: list[tuple[Ref, np.ndarray]] = []  # that were not awaited yet
    cell: dict[str, np.int32] = {}

    def launch(body, name, out_type, grid, operands, approx_math=False, **scratch):
        results = [unwritten(x.shape, x.dtype) for x in out_type]
        given = [np.asarray(x) for x in operands]
        refs = [Ref(Memory(x)) for x in (*given, *results)]
        for place in itertools.product(*map(range, grid.values())):
            cell.update(zip(grid, map(np.int32, place), strict=True))
            smem = {name: Ref(shared_memory(x)) for name, x in scratch.items()}
            body(*refs, **smem)
            shared.clear()
            for ref in refs:
                ref.memory.next_cta()
        return [jnp.asarray(x) for x in results]

    def shared_memory(kind: Any) -> Memory:
        (size,) = kind.shape
        shared.append(Memory(unwritten(size, kind.dtype), is_shared=True))
        return shared[-1]

    def barrier() -> None:
        for memory in shared:
            memory.forget()

    def scatter(ref, indices, values):
        indices = np.where(np.asarray(indices) < 0, -1, ref.inside(indices))
        ref.memory.store(indices, np.asarray(values), LANE)

    def add_one(ref, indices):
        indices = np.asarray(indices)
        valid = indices >= 0
        if ref.memory.writer is not None:
            for at, _ in _pairs(ref.inside(indices[valid]), LANE[valid]):
                ref.memory.writer[at] = EVERY_LANE  # additions may mix, loads and stores may not
        np.add.at(ref.memory.values, ref.inside(indices[valid]), 1)

    def gather(ref, indices):
        return ref.memory.load(ref.inside(indices), LANE)

    def octets(indices):
        return (np.asarray(indices)[:, None] * lanes.OCTET + np.arange(lanes.OCTET)).ravel()

    def copy_octets(ref, first, stride, count, to, valid=None):
        for row in range(count):
            is_valid = True if valid is None else (valid > row).repeat(lanes.OCTET)
            at = np.where(is_valid, octets(first + row * stride), 0)
            loaded = ref.memory.load(ref.inside(at), OCTET_LANE)
            run = to.at[pl.ds(row * OCTET_LANE.size, OCTET_LANE.size)]
            copies.append((run, np.where(is_valid, loaded, np.zeros_like(loaded))))

    def await_copies():
        for run, values in copies:
            run[...] = values
        copies.clear()

    def exchange(values, distance):
        assert 0 < distance < layouts.WARP
        return values[LANE ^ distance]

    def float_octets(ref, count):
        size = OCTET_LANE.size
        return [ref.at[pl.ds(r * size, size)].load().astype(np.float32) for r in range(count)]

    def squared_distances(ref, octets, count):
        away = [x - octets for x in float_octets(ref, count)]
        return [np.square(x).reshape(THREADS, lanes.OCTET).sum(1) for x in away]

    def gather_octets(ref, indices):
        return ref.memory.load(ref.inside(octets(indices)), OCTET_LANE)

    def scatter_octets(ref, indices, values):
        ref.memory.store(ref.inside(octets(indices)), values, OCTET_LANE)

    def count_in_warp(flags):
        by_warp = np.asarray(flags).reshape(-1, layouts.WARP)
        total = by_warp.cumsum(1)
        together = np.broadcast_to(total[:, -1:], total.shape)
        return tuple(x.astype(np.int32).reshape(-1) for x in (total - by_warp, together))

    def gather_eight(ref, indices):
        found = (ref.memory.load(ref.inside(8 * indices + i), LANE) for i in range(8))
        return tuple(x.astype(np.float32) for x in found)

    def copy_eight(source, indices, target, places):
        valid = places >= 0
        for i in range(8):
            values = source.memory.load(source.inside(np.where(valid, 8 * indices + i, 0)), LANE)
            scatter(target, np.where(valid, 8 * places + i, -1), values)

    replaced = {
        "count_in_warp": count_in_warp,
        "copy_octets": copy_octets,
        "await_copies": await_copies,
        "gather_octets": gather_octets,
        "scatter_octets": scatter_octets,
        "sum_octets": lambda ref, count: sum(float_octets(ref, count)),
        "squared_distances": squared_distances,
        "exchange": exchange,
        "launch": launch,
        "gather": gather,
        "scatter": scatter,
        "gather_eight": gather_eight,
        "copy_eight": copy_eight,
        "add_one": add_one,
        "lane_index": lambda: LANE,
        "every_lane": lambda value: np.full(THREADS, value, np.int32),
        "jnp": np,
        "lax": types.SimpleNamespace(
            axis_index=cell.__getitem__,
            div=np.floor_divide,  # of numbers that are not negative
            rem=np.remainder,
            shift_right_logical=np.right_shift,
            fori_loop=_fori_loop,
        ),
    }
    for module, (name, function) in itertools.product(MODULES, replaced.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(plgpu, "commit_smem", barrier)
    monkeypatch.setattr(plgpu, "load", lambda ref, layout: ref.load())
    monkeypatch.setattr(pl, "when", _when)
    monkeypatch.setattr(pl, "loop", _loop)


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda body: body() if condition else None


def _loop(first: Any, end: Any) -> Callable[[Callable[[Any], None]], None]:
    def run(body: Callable[[Any], None]) -> None:
        _fori_loop(first, end, lambda i, _: body(i), None)

    return run


def _fori_loop(first: Any, end: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    for i in range(int(first), int(end)):
        state = body(np.int32(i), state)
    return state
