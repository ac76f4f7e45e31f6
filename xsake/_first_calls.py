"""First calls on GPUs: kernels of Mosaic GPU are lowered faster, and compile side by side.

    lowering    functions of Mosaic's layout inference, replaced by faster equal ones
    compiling   each kernel in a thread, as soon as it is lowered; large ones are lowered first

All of it changes private functions of JAX, in the versions that it was tested with.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import thread as pools
from typing import Any

import jax

from xsake import _jax

FASTER_IN = ((0, 11, 2), (0, 12, 0))  # in other versions these functions may differ


def speed_up_first_calls() -> None:
    """Replaces functions of Mosaic GPU, in the versions of JAX that this was tested with."""
    if _jax.version() in FASTER_IN:
        lower_kernels_faster()
        compile_kernels_early()
        lower_large_kernels_first()


def lower_kernels_faster() -> None:
    """Makes layout inference faster; the layouts that it finds are the same.

    Much of the time that lowering a kernel takes goes to a sort of variables by the text of their
    operations, for which whole loops are printed; to a search of variables in a list; to their
    hashes; to copies of all constraints for each operation; to reducing all of them again after
    each guess; and to reading the same layouts from attributes again. JAX 0.12 has neither the
    sort nor the search; the rest still applies.
    """
    from jax.experimental.mosaic.gpu import constraints, dialect_lowering, layout_inference, layouts

    constraints.compute_transitively_equal_vars = instead_of(
        constraints.compute_transitively_equal_vars, equal_variables
    )
    constraints.reduce_constraint = reduce_once(constraints.reduce_constraint)
    layout_inference.find_assignments_for = with_set(layout_inference.find_assignments_for)
    hashed: list[Any] = [constraints.Variable, layout_inference.ValueSite]
    for cls in hashed:
        cls.__hash__ = hash_once(cls.__hash__)
    system: Any = constraints.ConstraintSystem
    system.__iand__ = join
    dialect_lowering.lower_mgpu_dialect = with_cache(
        dialect_lowering.lower_mgpu_dialect, layouts, "from_layout_attr"
    )


def instead_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, with `theirs` as its `__wrapped__`, which tests compare it with."""

    @functools.wraps(theirs)
    def faster(*args: Any) -> Any:
        return ours(*args)

    return faster


def equal_variables(system: Any) -> dict[Any, list[Any]]:
    """For each variable of a layout problem, those it is equal to, directly or through others."""
    from jax.experimental.mosaic.gpu import constraints

    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        if not isinstance(constraint, constraints.Equals):
            continue
        sides = constraint.lhs, constraint.rhs
        if all(isinstance(x, constraints.Variable) for x in sides):
            one, two = (groups.setdefault(x, [x]) for x in sides)
            if one is not two:
                one.extend(two)
                groups.update(dict.fromkeys(two, one))
    return {x: [y for y in group if y is not x] for x, group in groups.items()}


class ListWithSet(list[Any]):
    """A list in which `in` does not search."""

    def __init__(self, values: Iterable[Any]):
        super().__init__(values)
        self._set = set(self)

    def __contains__(self, x: Any) -> bool:
        return x in self._set


def with_set(find: Callable[..., Any]) -> Callable[..., Any]:
    """`find_assignments_for` of layout inference, with its unknowns in a ListWithSet."""

    @functools.wraps(find)
    def faster(unknowns: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unknowns, ListWithSet):
            unknowns = ListWithSet(unknowns)
        return find(unknowns, *args, **kwargs)

    return faster


def hash_once(hash_of: Callable[[Any], int]) -> Callable[[Any], int]:
    """The hash of a frozen dataclass that is kept after its first use."""

    @functools.wraps(hash_of)
    def faster(self: Any) -> int:
        found = self.__dict__.get("_xsake_hash")
        if found is None:
            found = self.__dict__["_xsake_hash"] = hash_of(self)
        return found

    return faster


def reduce_once(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_constraint` of layout inference, which skips constraints that cannot change.

    If a constraint was its own result, it is so again until one of its variables is assigned.
    """

    @functools.wraps(reduce)
    def faster(constraint: Any, assignments: dict[Any, Any]) -> Any:
        free = constraint.__dict__.get("_xsake_free")
        if free is not None and not any(x in assignments for x in free):
            return constraint
        reduced = reduce(constraint, assignments)
        if reduced != constraint:
            return reduced
        constraint.__dict__["_xsake_free"] = free_variables(constraint)
        return constraint

    return faster


def join(system: Any, other: Any) -> Any:
    """`system &= other` of layout constraints, without a copy of `system`."""
    from jax.experimental.mosaic.gpu import constraints

    if isinstance(other, constraints.Unsatisfiable):
        return other
    for x, layout in other.assignments.items():
        if system.assignments.setdefault(x, layout) != layout:
            return constraints.Unsatisfiable()
    system.constraints.extend(other.constraints)
    return system


def with_cache(run: Callable[..., Any], module: Any, name: str) -> Callable[..., Any]:
    """`run` with a cache for a module's function, which is dropped afterwards.

    Layout attributes belong to an MLIR context, which a lasting cache would keep alive.
    """
    uncached = getattr(module, name)

    @functools.wraps(run)
    def faster(*args: Any, **kwargs: Any) -> Any:
        setattr(module, name, functools.cache(uncached))
        try:
            return run(*args, **kwargs)
        finally:
            setattr(module, name, uncached)

    return faster


def free_variables(constraint: Any) -> list[Any]:
    """The variables in the expressions of a layout constraint."""
    from jax.experimental.mosaic.gpu import constraints

    return constraints.ConstraintSystem(constraints=[constraint]).unknowns()


def compile_kernels_early() -> None:
    """Compiles XSAKE's kernels in threads when they are lowered, for a GPU.

    A program's kernels are otherwise compiled one after another when the whole program is lowered.
    Compiling needs no lock of Python's, so that it takes place beside the lowering of the next
    kernels. Mosaic GPU keeps compiled kernels by the hash of their modules; the program then
    finds them there.
    """
    from jax.experimental.mosaic.gpu import core

    core._mosaic_gpu_lowering_rule = with_early_compilation(core._mosaic_gpu_lowering_rule)


def with_early_compilation(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Mosaic GPU's lowering rule, which also starts to compile a new kernel of XSAKE's."""
    from jax.experimental.mosaic.gpu import core

    @functools.wraps(lower)
    def lower_and_start(ctx: Any, *args: Any, module: Any, **kwargs: Any) -> Any:
        known = set(core.KNOWN_KERNELS)
        results = lower(ctx, *args, module=module, **kwargs)
        ours = "xsake_" in str(module.operation.attributes["sym_name"])
        if ours and _jax.platform() == "gpu":
            # More than one where other threads lower kernels too.
            new = {x: core.KNOWN_KERNELS[x] for x in core.KNOWN_KERNELS.keys() - known}
            collected = getattr(_lowering, "collected", None)
            if collected is None:
                start_compiling(new)
            else:
                collected.update(new)
        return results

    return lower_and_start


MAX_WAIT_SECONDS = 0.3  # for the other kernels of a group
_lowering = threading.local()  # .collected: kernels that `compiled_together` waits for


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Kernels that this thread lowers meanwhile begin to compile at the end, at the same time."""
    collected: dict[bytes, bytes] = {}
    outer = getattr(_lowering, "collected", None)
    _lowering.collected = collected
    try:
        yield
    finally:
        _lowering.collected = outer
        start_compiling(collected)


LARGE_KERNELS = "xsake_forward", "xsake_backward"  # how their names begin


def lower_large_kernels_first() -> None:
    """Lowers the kernels of a program that take the longest to compile before all others.

    They are compiled together, beside the lowering of the others. A kernel that came later would
    have to wait for them: XLA and Mosaic GPU compile with different options of LLVM, which are the
    process's own, and take turns; the program of a kernel needs first one, then the other.

    Where a gradient is taken around shard_map, forward and backward are programs of their own, and
    only the kernels of the forward come first.
    """
    from jax._src.interpreters import mlir

    mlir.jaxpr_subcomp = with_large_kernels_first(mlir.jaxpr_subcomp)


def with_large_kernels_first(lower: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxpr_subcomp`, whose first call for a program, or for a mesh in it, lowers such kernels.

    Every equation is lowered once to a function, in a cache of the program's; the program then
    finds it there.
    """
    from jax._src.interpreters import mlir

    @functools.wraps(lower)
    def lower_in_order(ctx: Any, jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        begun = "xsake", ctx.axis_context
        if tuple(ctx.platforms) == ("cuda",) and begun not in ctx.cached_primitive_lowerings:
            ctx.cached_primitive_lowerings[begun] = None
            with compiled_together():
                for equation in kernels_of(jaxpr, LARGE_KERNELS, set()):
                    lower_to_cache(ctx, equation)
        return lower(ctx, jaxpr, *args, **kwargs)

    def lower_to_cache(ctx: Any, equation: Any) -> None:
        avals = tuple(x.aval for x in equation.invars)
        key = mlir.LoweringCacheKey(
            primitive=equation.primitive,
            eqn_ctx=equation.ctx,
            avals_in=avals,
            effects=frozenset(equation.effects),
            params=tuple(sorted(equation.params.items())),
            platforms=tuple(ctx.platforms),
        )
        if key not in ctx.lowering_cache:
            mlir._cached_lowering_miss(ctx, equation, key, avals, **equation.params)

    return lower_in_order


def kernels_of(jaxpr: Any, names: tuple[str, ...], seen: set[int]) -> Iterator[Any]:
    """The equations of kernels whose names begin so, also inside of others, in a program's order.

    Not those inside shard_map, which is lowered with a mesh of its own, and not those of branches
    by platform, of which only one is lowered. Each inner program is visited once: layers that are
    alike share it.
    """
    from jax.extend import core

    for equation in jaxpr.eqns:
        if equation.primitive.name == "mpmd_map":
            if str(equation.params["name"]).startswith(names):
                yield equation
        elif equation.primitive.name != "shard_map" and not (
            equation.params.get("branches_platforms")
        ):
            for inner in core.jaxprs_in_params(equation.params):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    yield from kernels_of(inner, names, seen)


_started: set[bytes] = set()  # hashes of kernels
_failed = threading.Event()


def start_compiling(kernels: Mapping[bytes, bytes]) -> None:
    """Has threads compile kernels by their hashes, at the same time.

    Each kernel once in a process, and not while Python is ending.
    """
    new = {x: lowered for x, lowered in kernels.items() if x not in _started}
    if not new:
        return
    _started.update(new)
    device = jax.local_devices()[0]
    together = threading.Barrier(len(new))
    for kernel_hash, lowered in new.items():
        try:
            future = _compilers().submit(_compile_if_needed, kernel_hash, lowered, device, together)
        except RuntimeError as error:
            # "… after shutdown" or "… after interpreter shutdown"
            if "cannot schedule new futures after" not in str(error):
                raise
        else:
            future.add_done_callback(_warn_of_failure)


@functools.cache
def _compilers() -> Executor:
    # observe/compiling.py knows the threads by this name.
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="xsake-compile")


def _compile_if_needed(
    kernel_hash: bytes, lowered: bytes, device: Any, together: threading.Barrier
) -> None:
    """Compiles a kernel unless Python is ending, which waits for all that is queued in pools."""
    if not pools._shutdown:
        compile_kernel(kernel_hash, lowered, device, together)


def _warn_of_failure(future: Future[None]) -> None:
    """Logs the first error of a process."""
    error = future.exception()
    if error is not None and not _failed.is_set():
        _failed.set()
        logging.getLogger("xsake").warning(
            "A Hopper kernel could not be compiled in a thread; it is compiled later as usual, "
            "with its program, and further errors like this are not reported: %s: %s",
            type(error).__name__,
            error,
        )


def compile_kernel(
    kernel_hash: bytes, lowered: bytes, device: Any, together: threading.Barrier
) -> None:
    """Compiles a kernel of Mosaic GPU by a program of its own, which is dropped.

    If this raises, nothing is lost: the program that the kernel is for compiles it again.
    """
    call = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct((), "int32"))

    def xsake_kernel() -> Any:
        return call(kernel_hash=kernel_hash, module=lowered, use_custom_barrier=False)

    jitted = jax.jit(xsake_kernel, out_shardings=jax.sharding.SingleDeviceSharding(device))
    compile_uncached(jitted, together)


def compile_uncached(jitted: Any, together: threading.Barrier) -> None:
    """Compiles a function without arguments when those of its group have been lowered.

    It leaves nothing in JAX's cache on disk. Programs that compile faster than a limit are not
    written; here the limit is years, and in this thread only. Switching the cache off would do so
    for the whole process if this came first.
    """
    from jax._src import config

    with config.persistent_cache_min_compile_time_secs(1e9):
        lowered = jitted.lower()
        # without the others, which may have failed or have no thread yet, it only takes longer
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(MAX_WAIT_SECONDS)
        lowered.compile()
