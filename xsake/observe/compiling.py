"""compiling(report): tells a progress line when XLA compiles."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax import monitoring

# JAX times the steps of a compilation: tracing, lowering to MLIR, XLA. The end of the lowering is
# the start of XLA's part, which takes most of the time.
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
# Threads that compile single kernels while the program with them is lowered (_first_calls.py).
KERNEL_THREADS = "xsake-compile"


@contextlib.contextmanager
def compiling(report: Callable[[bool], None]) -> Iterator[None]:
    """Calls report(True) when XLA begins to compile a function and report(False) at its end.

    >>> import jax
    >>> with compiling(print):
    ...     _ = jax.jit(lambda: 2.0).lower().compile()
    True
    False
    """

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        of_kernel = threading.current_thread().name.startswith(KERNEL_THREADS)
        if event in (LOWERED, COMPILED) and not of_kernel:
            report(event == LOWERED)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(listen)
