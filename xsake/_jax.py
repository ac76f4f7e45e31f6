"""The JAX version, the device, and whether the Hopper kernels can run on it."""

import platform as python_platform
from typing import Any

import jax


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


def lower_kernels_faster() -> None:
    """On JAX 0.11, gives its layout inference `equal_variables` in place of its own function.

    That one sorts the variables by the text of their operations, for which whole loops are printed:
    much of the time that lowering a kernel takes. JAX 0.12 does not sort them.
    """
    if version()[:2] == (0, 11):
        from jax.experimental.mosaic.gpu import constraints

        constraints.compute_transitively_equal_vars = equal_variables


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
    return {x: [y for y in group if y != x] for x, group in groups.items()}


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
