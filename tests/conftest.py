"""How the tests compile, and which of them run.

    pytest                       everything but `slow`, without XLA's optimiser
    pytest --optimizer           the same with the optimiser; compiling takes three times as long
    pytest --slow                the long sweeps too
    pytest --sample 5            `by_version`, `second_python`, and a fifth of the rest: the same
                                 fifth each time
    pytest --jaxtyping-packages= without the checks of types, as `make pytest SAMPLE=n` runs

`make test` runs what is marked `optimized` with the optimiser and the rest without it.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import zlib
from pathlib import Path

import pytest

WITHOUT_OPTIMIZER = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # one LLVM module for a program, not 32
]
if importlib.metadata.version("jax").startswith("0.10."):
    # Newer versions always use the fusion emitters.
    WITHOUT_OPTIMIZER.append("--xla_cpu_use_fusion_emitters=false")

# Files are given to the workers in this order, then as they are collected: those that take longest,
# on the Python where they take longer, come first, so that no worker is left with one at the end.
LONGEST_FIRST = [
    "tests/backends/test_conformance.py",
    "tests/backends/hopper/test_hopper.py",
    "tests/test_readme.py",
    "tests/backends/hopper/test_scores.py",
    "tests/backends/tpu/test_tpu.py",
    "tests/test_examples.py",
    "tests/test_block_mask.py",
    "tests/test_probes.py",
    "tests/test_transformations.py",
    "tests/integrations/test_observed.py",
    "tests/backends/xla/test_xla.py",
    "tests/parallel/test_processes.py",
    "tests/train/test_loop.py",
    "tests/backends/hopper/test_kernels.py",
    "tests/test_masks.py",
    "tests/model/test_gemma.py",
    "tests/test_properties.py",
    "tests/parallel/test_mesh.py",
    "tests/model/test_generate.py",
    "tests/parallel/test_context.py",
    "tests/model/test_transformer.py",
    "tests/backends/hopper/test_selected.py",
    "tests/backends/hopper/test_bias.py",
    "tests/hads/test_plan.py",
    "tests/hads/test_certificate.py",
    "tests/test_derived_masks.py",
    "tests/test_block_scores.py",
    "tests/integrations/test_blocksparse.py",
    "tests/integrations/test_easydel.py",
    "tests/evaluate/test_table.py",
]

BY_VERSION = "tests/backends/hopper/"  # kernels, which older versions cannot even trace


def pytest_addoption(parser):
    group = parser.getgroup("xsake")
    group.addoption("--optimizer", action="store_true", help="compile with XLA's optimiser")
    group.addoption("--slow", action="store_true", help="run tests marked slow too")
    group.addoption(
        "--sample", type=int, default=1, metavar="N", help="by_version, and one in N of the rest"
    )


def pytest_configure(config):
    """Sets XLA's flags before a backend reads them; processes that tests start inherit them.

    On a GPU the optimiser stays on, because the tests there check the kernels that users run.
    Tracing allocates much and frees it by counting references; Python's default threshold would
    look for cycles every 700 objects.
    """
    gc.set_threshold(50_000, 20, 20)
    if not config.getoption("--optimizer") and not Path("/dev/nvidiactl").exists():
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = " ".join([given, *WITHOUT_OPTIMIZER]).strip()


def pytest_collection_modifyitems(config, items):
    every, slow = config.getoption("--sample"), config.getoption("--slow")

    def runs(item):
        if item.get_closest_marker("slow") and not slow:
            return False
        if item.get_closest_marker("second_python"):
            return slow or every > 1
        by_version = item.get_closest_marker("by_version") or item.nodeid.startswith(BY_VERSION)
        return by_version or zlib.crc32(item.nodeid.encode()) % every == 0

    def place(item):
        file = item.nodeid.partition("::")[0]
        return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)
    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]


MOST_MAPS = 50_000  # Linux allows a process 65,530 memory maps, and then it crashes


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Drops what JAX compiled before a worker has too many: each program is several memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def as_users_call_it():
    """Disables jaxtyping's checks, which only tests have: the errors come from xsake itself."""
    import jaxtyping  # not before pytest has set its flags

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
