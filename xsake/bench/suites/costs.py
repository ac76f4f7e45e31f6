"""The suite `costs`: seconds of a call by `xla` and by `dense`, to run and to compile.

    xsake bench --suite costs                                       writes a result file
    python -m xsake.bench.suites.costs benchmarks/results/costs-*   fits backends/costs.json

The fit is the least sum of squares of relative errors with constants that are not negative. On a
CPU it takes CPU seconds of the process, user and system, which what else runs hardly changes.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from xsake import BlockMask, _files, _jax, masks
from xsake.arguments import block_for
from xsake.backends import Call, costs, dense
from xsake.bench import programs
from xsake.bench.suites import Part, Record
from xsake.bench.timing import time_queued

BACKENDS = ("xla", "dense")


class Problem(NamedTuple):
    """Sizes of a call, and its rule by name."""

    B: int
    N: int
    K: int
    T: int
    H: int
    rule: str

    def __str__(self) -> str:
        heads = str(self.N) if self.N == self.K else f"{self.N}/{self.K}"
        return f"{self.B}·{heads}·{self.T}·{self.H} {self.rule}"


CPU = [
    Problem(1, 4, 4, 64, 32, "full"),
    Problem(2, 4, 2, 256, 32, "causal"),
    Problem(2, 4, 2, 512, 32, "window and documents"),
    Problem(1, 8, 8, 512, 64, "full"),
    Problem(1, 8, 8, 1024, 64, "causal"),
    Problem(1, 8, 8, 1024, 128, "causal"),
    Problem(1, 8, 8, 2048, 64, "window"),
]
GPU = [
    Problem(4, 16, 16, 128, 64, "causal"),
    Problem(4, 16, 16, 512, 64, "causal"),
    Problem(4, 16, 16, 1024, 128, "full"),
    Problem(4, 16, 16, 2048, 64, "causal"),
    Problem(1, 8, 8, 4096, 64, "window"),
    Problem(1, 8, 8, 4096, 128, "causal"),
]


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """One case for each problem and dtype."""
    gpu = _jax.platform() == "gpu"
    problems, dtypes = (GPU, ("bfloat16", "float32")) if gpu else (CPU, ("float32",))
    for problem, dtype in itertools.product(problems[:2] if quick else problems, dtypes):
        yield Part(f"{problem}, {dtype}", functools.partial(_records, problem, dtype))


def _records(problem: Problem, dtype: str, done: list[Record]) -> Iterator[Record]:
    B, N, K, T, H, rule = problem
    keys = iter(jax.random.split(jax.random.key(0), 3))
    q, k, v = (jax.random.normal(next(keys), (B, T, heads, H), dtype) for heads in (N, K, K))
    ids = jnp.broadcast_to(jnp.arange(T) * 5 // T, (B, T))

    plain = {"full": masks.everything(), "causal": masks.causal()}
    mask = plain.get(rule, masks.sliding_window(T // 4 - 1, 0))

    def both(backend: str, q: Any, k: Any, v: Any, ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            packed = ids if "documents" in rule else None
            return xsake.dot_product_attention(
                q, k, v, mask=mask, q_segment_ids=packed, implementation=backend
            )

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(out)

    lists = BlockMask.from_rule(mask, (T, T), block=block_for(T))
    call = Call(q, k, v, None, lists, 1.0, None, xsake.Options())
    pairs = {"dense": dense.pairs(call), "xla": costs.listed_pairs(call)}
    arguments, results = (q, k, v, ids), []
    on_cpu = _jax.platform() == "cpu"
    for backend in BACKENDS:
        began = _now(on_cpu)
        run = jax.jit(functools.partial(both, backend)).lower(*arguments).compile()
        compiling = _now(on_cpu) - began
        results.append(run(*arguments))
        times = _cpu_seconds(run, arguments) if on_cpu else time_queued(run, *arguments).seconds
        yield {
            "suite": "costs",
            "case": f"{problem}, {dtype}",
            "direction": "forward+backward",
            "backend": backend,
            "clock": "CPU seconds" if on_cpu else "seconds",
            "platform_key": costs.platform_key(q.dtype.itemsize),
            "pairs": pairs[backend],
            "width": 2 * H,
            "median_seconds": statistics.median(times),
            "least_seconds": min(times),
            "compile_seconds": compiling,
        }
    _check_equal(results, dtype)


def _now(on_cpu: bool) -> float:
    return time.process_time() if on_cpu else time.perf_counter()


def _cpu_seconds(run: Any, arguments: tuple[Any, ...], repeats: int = 9) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        jax.block_until_ready(run(*arguments))
        times.append(time.process_time() - began)
    return times


def _check_equal(results: Sequence[Any], dtype: str) -> None:
    """Raises unless all backends agree, by output and gradients."""
    limit = 1e-2 if jnp.dtype(dtype).itemsize == 2 else 1e-4
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        error = float(jnp.abs(one - other).max() / jnp.abs(other).max())
        if not error <= limit:
            raise ValueError(f"the backends {BACKENDS} differ by {error:.1e}, more than {limit}")


# --------------------------------------------------------------------------------------------- fit


def fit(records: Sequence[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """Constants by platform and backend, as `costs.json` has them, to four digits."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    kinds = sorted({(record["platform_key"], record["backend"]) for record in records})
    for where, backend in kinds:
        own = [x for x in records if (x["platform_key"], x["backend"]) == (where, backend)]
        pairs = np.array([x["pairs"] for x in own], float)
        width = np.array([x["width"] for x in own], float)
        terms = np.stack([np.ones_like(pairs), pairs, pairs * width], axis=1)
        call, pair, product = _not_negative(terms, np.array([x["median_seconds"] for x in own]))
        compile_seconds = float(np.median([x["compile_seconds"] for x in own]))
        constants = {"call": call, "pair": pair, "product": product, "compile": compile_seconds}
        rounded = {name: float(f"{value:.4g}") for name, value in constants.items()}
        found.setdefault(where, {})[backend] = rounded
    return found


def _not_negative(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Factors ≥ 0 of the terms with the least sum of squared relative errors; every subset tried.

    A term that is left out has the factor 0.
    """
    terms, best = terms / seconds[:, None], (np.inf, np.zeros(terms.shape[1]))
    for count in range(1, terms.shape[1] + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), count):
            part = terms[:, chosen]
            factors = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)[0]
            error = float(((part @ factors - 1) ** 2).sum())
            if (factors >= 0).all() and error < best[0]:
                whole = np.zeros(terms.shape[1])
                whole[list(chosen)] = factors
                best = error, whole
    return [float(x) for x in best[1]]


def write(files: Sequence[Path]) -> None:
    """Fits the constants of all files, and writes them with the files' names."""
    records = [record for file in files for record in _read(file)]
    content = {"files": sorted(file.name for file in files), "constants": fit(records)}
    costs.PATH.write_text(json.dumps(content, indent=1) + "\n")


def _read(file: Path) -> list[Record]:
    """The records of a result file of this suite, or an error that names the file."""
    what = "a result file of `xsake bench --suite costs`"
    records = _files.read_record(file, what, {"results": list})["results"]
    if not records:
        raise ValueError(f"{file} has no results; measure them with `xsake bench --suite costs`")
    fitted = "platform_key", "backend", "pairs", "width", "median_seconds", "compile_seconds"
    for number, record in enumerate(records):
        if missing := [x for x in fitted if not isinstance(record, dict) or x not in record]:
            raise ValueError(
                f"{file} is not {what}: result {number} has no {missing[0]!r}; name another file"
            )
    return records


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = programs.parser("xsake.bench.suites.costs", __doc__)
    parser.add_argument("files", type=Path, nargs="+", help="written by the suite")
    given = parser.parse_args(arguments)
    with programs.stopping():
        write(given.files)


if __name__ == "__main__":
    main()
