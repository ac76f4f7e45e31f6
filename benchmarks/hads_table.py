"""HADS on one model, from calibration to the table, resumable: prepare | table | speed.

    prepare   checkpoint + text files → a folder of safetensors and .npy documents
    table     calibrates (cached), then measures every method at every density → JSON and Markdown
    speed     times selection, sparse and dense attention at the headline's shapes → JSON

`table` needs flax and safetensors, but neither tokenizers nor gguf: `prepare` leaves ready
documents. Profiles and densities that the folder holds already are not measured again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from xsake import dot_product_attention
from xsake.bench.timing import provenance, time_queued
from xsake.evaluate import table as tables
from xsake.evaluate import text
from xsake.evaluate.subject import Subject
from xsake.hads import Profile, budget, profile, select
from xsake.model import huggingface


def prepare(
    model: Path,
    out: Path,
    novels: list[Path],
    held_out: list[Path],
    wikipedia: list[Path],
    length: int = 8192,
    calibration: int = 16,
    evaluation: int = 8,
) -> None:
    """Writes out/model, out/novels.npy, out/wikipedia.npy and out/held_out.npy."""
    loaded = huggingface.load(model)
    assert loaded.tokenizer is not None
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        huggingface.save(out / "model", loaded.model, loaded.tokenizer)
    for name, files, count, seed in (
        ("novels", novels, calibration, 0),
        ("wikipedia", wikipedia, calibration, 0),
        ("held_out", held_out, evaluation, 1),
    ):
        cut = text.load_documents(files, loaded.tokenizer.encode, length, count, seed)
        np.save(out / f"{name}.npy", np.stack(cut))
        print(f"{name}: {count} × {length:,} tokens", flush=True)


def table(
    folder: Path,
    block: int = 64,
    length: int = 8192,
    short: int = 2048,
    calibration: int = 16,
    evaluation: int = 8,
    densities: tuple[float, ...] = (0.10, 0.20, 0.30, 0.43, 0.60),
    curves: tuple[str, ...] = profile.CURVES,
    dtype: str = "bfloat16",
    implementation: str | None = None,
) -> None:
    """Calibrates on novels, on Wikipedia and on short novels, and compares on held-out novels."""
    loaded = huggingface.load(
        folder / "model", dtype=dtype, tokenizer=False, implementation=implementation
    )
    subject = Subject(loaded.model)
    seconds: dict[str, float] = {}

    def profiled(label: str, file: str, length: int, curves: tuple[str, ...]) -> Profile:
        path = folder / f"profile-{label}-{length}-{block}.safetensors"
        if not path.exists():
            cut = text.load_documents([folder / file], None, length, calibration)
            began = time.perf_counter()
            found = subject.profile(cut, block=block, curves=curves)
            seconds[path.stem] = time.perf_counter() - began
            print(f"{path.stem}: {seconds[path.stem]:.1f} s", flush=True)
            found.save(path)
        return Profile.load(path)

    known = profiled("novels", "novels.npy", length, curves)
    others = {
        "from wikipedia": profiled("wikipedia", "wikipedia.npy", length, ("static", "gaussian")),
        f"from {short:,} tokens": profiled("novels", "novels.npy", short, ("static", "gaussian")),
    }
    held_out = text.load_documents([folder / "held_out.npy"], None, length, evaluation)
    facts = provenance() | {"dtype": dtype, "profile_seconds": seconds}
    out = folder / f"table-{length}-{block}.json"
    last = [time.perf_counter()]

    def tell(what: str) -> None:
        now = time.perf_counter()
        if now - last[0] > 5:
            print(what, f"{now - last[0]:.1f} s", flush=True)
        last[0] = now

    tables.run_table(
        subject, known, held_out, densities, out, others=others, provenance=facts, tell=tell
    )
    print(out.with_suffix(".md").read_text())


def speed(
    out: Path,
    density: float = 0.43,
    block: int = 128,
    selectors: tuple[str, ...] = ("gaussian", "pooled", "antidiagonal"),
    shapes: tuple[tuple[int, int], ...] = ((4, 8192), (1, 32768)),
    heads: int = 16,
    head_size: int = 128,
    implementation: str | None = None,
) -> None:
    """Times selection alone, selection + sparse attention, and cuDNN's dense causal attention."""
    found = []
    for B, T in shapes:
        q, k, v = (
            jax.random.normal(jax.random.key(i), (B, T, heads, head_size), jnp.bfloat16)
            for i in range(3)
        )
        n = T // block
        counts = jnp.asarray(budget.uniform(density, 1, heads, n).counts[0])
        # cuDNN is NVIDIA's; elsewhere the time of jax.nn's own choice stands under its name
        peer = "cudnn" if jax.default_backend() == "gpu" else None

        def dense(q: Any, k: Any, v: Any, peer: Any = peer) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=peer)

        dense_seconds = time_queued(jax.jit(dense), q, k, v).median_seconds
        for selector in selectors:

            def choose(q: Any, k: Any, selector: Any = selector, T: int = T) -> Any:
                scores = jax.vmap(lambda q, k: select.estimate(selector, q, k, block))(q, k)
                return select.to_mask(select.keep_top(scores, counts), T, block)  # noqa: B023

            def both(q: Any, k: Any, v: Any, choose: Any = choose) -> Any:
                mask = choose(q, k)
                return dot_product_attention(q, k, v, mask=mask, implementation=implementation)

            row = {
                "shape": f"{B}·{heads}·{T}·{head_size}",
                "selector": selector,
                "density_ratio": float(jax.jit(choose)(q, k).density()),
                "dense": peer or "jax.nn",
                "dense_seconds": dense_seconds,
                "selection_seconds": time_queued(jax.jit(choose), q, k).median_seconds,
                "selection_and_sparse_seconds": time_queued(jax.jit(both), q, k, v).median_seconds,
            }
            for name in ("selection", "selection_and_sparse"):
                row[f"{name}_over_dense"] = row[f"{name}_seconds"] / dense_seconds
            print(row, flush=True)
            found.append(row)
    out.write_text(json.dumps({"provenance": provenance(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"prepare": prepare, "table": table, "speed": speed})
