"""The JAX version, the device, and whether the Hopper kernels can run on it."""

import functools
import platform as python_platform
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax

Args = ParamSpec("Args")
Result = TypeVar("Result")


def version() -> tuple[int, ...]:
    """JAX's version as numbers: (0, 10, 2)."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def platform() -> str:
    """Where code runs unless told otherwise: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def device_kind() -> str:
    """What JAX calls the first device: "cpu", "NVIDIA H200", "TPU v5e" …."""
    return jax.devices()[0].device_kind


def compute_capability() -> tuple[int, ...]:
    """Of the first GPU: (9, 0) for an H100 or H200; () where JAX does not say."""
    said = getattr(jax.devices()[0], "compute_capability", "")
    return tuple(int(part) for part in str(said).split(".") if part.isdigit())


H200_MULTIPROCESSORS = 132


def multiprocessors() -> int:
    """The number of multiprocessors of the first GPU; the H200's if there is no GPU.

    Without a GPU, kernels are only lowered or interpreted.
    """
    if platform() != "gpu":
        return H200_MULTIPROCESSORS
    count = getattr(jax.devices()[0], "core_count", None)
    if not count:
        raise RuntimeError(
            f"JAX {jax.__version__} does not report the core_count of this {device_kind()}, which "
            "the Hopper kernels are scheduled by; use implementation='xla'"
        )
    return count


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """The mesh axes of `jax.shard_map` that any of the arrays varies over; () outside of it."""
    return tuple(sorted(set().union(*map(_varying, arrays))))


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """A pytree whose arrays are all marked as varying over these axes.

    Inside `jax.shard_map`, a loop needs a state of the same type before and after, and a custom
    gradient the type of its argument.
    """

    def one(x: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in _varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree) if axes else tree


@jax.custom_batching.custom_vmap
def own_copy(x: Any, others: Any) -> Any:
    """x, which under `jax.vmap` is mapped as soon as any of `others` is.

    Kernels write to some of their operands: sums, counters. Pallas lets all mapped calls share an
    operand that is not mapped, and they would write to it together.
    """
    return x


@own_copy.def_vmap
def _map_own_copy(size: int, is_mapped: Any, x: Any, others: Any) -> tuple[Any, Any]:
    if any(jax.tree.leaves(is_mapped)) and not is_mapped[0]:
        x = jax.numpy.broadcast_to(x, (size, *x.shape))
        return own_copy(x, others), True  # a map around this one may need another copy
    return own_copy(x, others), is_mapped[0]


def without_x64(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """fn, traced with `jax_enable_x64` off: kernels have indices and sums of 32 bits.

    With it, sums of int32 are int64, and so are Python's integers in some operations, which Mosaic
    GPU does not lower.
    """

    @functools.wraps(fn)
    def traced(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        config: Any = jax.config
        if not config.jax_enable_x64:
            return fn(*args, **kwargs)
        with jax.enable_x64(False):
            return fn(*args, **kwargs)

    return traced


def mapped(size: int, is_mapped: Iterable[bool], arrays: Iterable[Any]) -> list[Any]:
    """The arrays of a batching rule, all of them mapped: those that are not are repeated."""
    return [
        x if has_axis else jax.numpy.broadcast_to(x, (size, *x.shape))
        for x, has_axis in zip(arrays, is_mapped, strict=True)
    ]


def by_batch_row(x: Any, leading: tuple[int, ...], is_mapped: bool) -> Any:
    """Of x [size, B|1, …], which `mapped` returned: an element for each of leading = (size, B).

    One for all of them, [1, 1, …], if it was not mapped and batch rows share it.
    """
    if is_mapped or x.shape[1] > 1:
        return jax.numpy.broadcast_to(x, (*leading, *x.shape[2:]))
    return x[:1]


def folded(arrays: Iterable[Any]) -> list[Any]:
    """Mapped arrays [size, B, …] as [size · B, …]: one call for the whole batch."""
    return [x.reshape(-1, *x.shape[2:]) for x in arrays]


def unfolded(size: int, x: Any) -> Any:
    """A result [size · B, …] of such a call as [size, B, …]."""
    return x.reshape(size, -1, *x.shape[1:])


def why_no_hopper(needs_jax: tuple[int, ...]) -> str | None:
    """Why kernels for Hopper cannot run here; None where they can."""
    if platform() != "gpu":
        return f"needs a Hopper GPU (H100, H200); this is a {platform()}"
    if compute_capability() != (9, 0):
        return f"needs compute capability 9.0 (H100, H200); this is {device_kind()}"
    if version() < needs_jax:
        needed = ".".join(map(str, needs_jax))
        return (
            f"needs JAX {needed} or newer, which needs Python 3.12 or newer; these are JAX "
            f"{jax.__version__} and Python {python_platform.python_version()}"
        )
    return None


# -------------------------------------------------------------------------------- several processes


def coordination_client() -> Any:
    """The client of JAX's coordination service: keys and barriers; None with one process."""
    from jax._src import distributed

    return distributed.global_state.client


def in_cluster() -> bool:
    """Whether JAX detects a cluster of more than one process: Slurm, Kubernetes, Open MPI, TPUs."""
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
    found = next((x for x in kinds if not x.opt_in_only_method and x.is_env_present()), None)
    return found is not None and found.get_process_count() > 1


# How errors of the runtime begin that another process may be the cause of.
LOST = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNKNOWN")


def is_collective_failure(error: Exception) -> bool:
    """Whether an operation failed that all processes take part in, or the coordination service."""
    return isinstance(error, jax.errors.JaxRuntimeError) or str(error).startswith(LOST)
