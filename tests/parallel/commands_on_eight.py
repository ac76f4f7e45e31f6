"""Calibration, evaluation, generation and the server's passes on a mesh equal those of one device.

`python -m tests.parallel.commands_on_eight [TEXT]` in a process of its own, because the number of
devices is settled when JAX starts. Prints one line for each claim, and ends with 1 if any does not
hold; TEXT runs those with it in their name.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests import oracle
from tests.model.families import LLAMA, random_model, random_tokens, weights
from tests.parallel.claims import named, run_claims
from tests.train.corpus import config as train_config
from tests.train.corpus import token_file
from xsake.cli import evaluate
from xsake.cli import hads as commands
from xsake.hads import Plan, Profile, profile
from xsake.model import Sparse, generate, huggingface
from xsake.model.kv_cache import KVCache
from xsake.model.observer import Observer
from xsake.model.on_mesh import mesh_for_text
from xsake.parallel import sharding
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes, make_mesh
from xsake.server import passes
from xsake.train import heads, inputs
from xsake.train.step import token_order

LENGTH, BLOCK = 64, 8
SPLIT = MeshSizes(fsdp=2, tensor=2, context=2)
HEADS = MeshSizes(data=1, fsdp=2, tensor=2, context=1)
NSA = dataclasses.replace(
    LLAMA,
    attention="nsa",
    sparse=Sparse(block_size=8, num_selected=4, compression_block=8, compression_stride=4),
)


def folder_of(model: Any, path: Path) -> Path:
    huggingface.save(
        path / "model", model, layout="xsake" if model.config.is_sparse else "huggingface"
    )
    return path / "model"


def on_mesh(path: Path, sizes: MeshSizes) -> Any:
    return huggingface.load(path, tokenizer=False, mesh=make_mesh(sizes)).model


def near(a: Any, b: Any) -> bool:
    """Whether all arrays of two trees differ by at most 1e-5 of their largest element."""
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return all(oracle.relative_error(x, y, floor=1.0) <= 1e-5 for x, y in pairs)


def calibration_and_evaluation_are_those_of_one_device() -> bool:
    """By the commands, from files: the profile, a plan of it, and the plan's measured quality."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = folder_of(random_model(LLAMA), place)
        text, other = place / "text.npy", place / "other.npy"
        tokens = random_tokens(LLAMA, (4, LENGTH))
        np.save(text, tokens[:2])
        np.save(other, tokens[2:])
        how: dict[str, Any] = {"length": LENGTH, "documents": 2}
        profiles, qualities = [], []
        for sizes in (ONE_DEVICE, SPLIT):
            out = place / f"{sizes.tensor}.profile"
            commands.calibrate(
                model,
                [text],
                out,
                block=BLOCK,
                selectors=("static", "mean_query"),
                loss=True,
                mesh=sizes,
                **how,
            )
            profiles.append(Profile.load(out))
            plan = place / f"{sizes.tensor}.plan"
            commands.plan(place / "0.profile", 0.5, plan)
            evaluate.evaluate(model, [other], plan, update=True, mesh=sizes, **how)
            qualities.append(json.loads(Plan.load(plan).terms.validation))
        one, split = (jax.tree.map(np.asarray, (x.statistics, x.errors)) for x in profiles)
        return near(split, one) and near(qualities[1], qualities[0])


def documents_of_a_calibration_share_one_program() -> bool:
    with tempfile.TemporaryDirectory() as name:
        path = folder_of(random_model(LLAMA), Path(name))
        subject = Observer(on_mesh(path, MeshSizes(data=1, fsdp=2, tensor=2, context=2)))
        before = profile._one_document._cache_size()
        documents = list(random_tokens(LLAMA, (3, LENGTH)))
        subject.profile(documents, block=BLOCK, curves=("static", "mean_query"))
        return profile._one_document._cache_size() - before == 1


def generation_is_that_of_one_device() -> bool:
    """Prompts in chunks and a budget; the cache lies on the mesh."""
    return generates({"budget": 0.5, "chunk": 16})


def whole_prompts_are_continued_as_on_one_device() -> bool:
    return generates({})


def generates(how: dict[str, Any]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        path = folder_of(random_model(LLAMA), Path(name))
        one, split = on_mesh(path, ONE_DEVICE_SIZES), on_mesh(path, HEADS)
        prompts = [list(map(int, row)) for row in random_tokens(LLAMA, (2, 40))]
        found = [generate(model, prompts, max_tokens=6, **how) for model in (one, split)]
        cache = KVCache.empty(LLAMA, 2, 64)
        where = sharding.shardings_of(cache, split.mesh)
        held = sharding.bytes_per_device((split.parameters(), sharding.put(cache, where)))
        total = sum(x.nbytes for x in jax.tree.leaves((one.parameters(), cache)))
        return found[0] == found[1] and max(held.values()) < 0.45 * total


def sparse_attention_generates_what_one_device_does() -> bool:
    with tempfile.TemporaryDirectory() as name:
        path = folder_of(random_model(NSA), Path(name))
        prompts = [list(map(int, row)) for row in random_tokens(NSA, (2, 40))]
        found = [
            generate(on_mesh(path, sizes), prompts, max_tokens=4)
            for sizes in (ONE_DEVICE_SIZES, HEADS)
        ]
        return found[0] == found[1]


def the_server_reads_as_on_one_device() -> bool:
    with tempfile.TemporaryDirectory() as name:
        path = folder_of(random_model(LLAMA), Path(name))
        tokens, results = random_tokens(LLAMA, (LENGTH,)), []
        n = LENGTH // BLOCK
        counts = np.minimum(np.arange(1, n + 1), 3) * np.ones((LLAMA.layers, LLAMA.heads, 1))
        given = np.tile(np.tri(n, dtype=bool), (LLAMA.layers, LLAMA.heads, 1, 1))
        for sizes in (ONE_DEVICE_SIZES, HEADS):
            subject = Observer(on_mesh(path, sizes))
            seen = passes.read(subject.weights, tokens, 50, subject=subject, block=BLOCK)
            hidden = passes.sparse(
                *(subject.weights, tokens, 50, counts.astype(np.int32), given, 1),
                subject=subject,
                block=BLOCK,
            )
            results.append((seen, hidden))
        return near(results[1], results[0])


def observed_heads_are_those_of_one_device() -> bool:
    """While training; batches lie in zigzag order, but this window is text as it is read."""
    with tempfile.TemporaryDirectory() as name:
        text = token_file(Path(name))
        model = dataclasses.replace(LLAMA, vocab_size=320)
        config = train_config(Path(name), text, model=model, hads__density=None)
        split = make_mesh(MeshSizes(data=1, fsdp=1, tensor=1, context=2))
        if token_order(config, split) != "zigzag":
            return False
        found = [
            heads.observe(config, weights(model), inputs.training_stream(config), 3, mesh)
            for mesh in (None, split)
        ]
        one, two = ((x.entropy_ratios, x.top_mass_ratios) for x in found)
        # logged with four digits
        return bool(np.allclose(two, one, rtol=0, atol=1.01e-4) and np.ptp(one[0]) > 0.01)


ONE_DEVICE_SIZES = MeshSizes(1, 1, 1, 1)
CLAIMS = [
    calibration_and_evaluation_are_those_of_one_device,
    documents_of_a_calibration_share_one_program,
    generation_is_that_of_one_device,
    whole_prompts_are_continued_as_on_one_device,
    sparse_attention_generates_what_one_device_does,
    the_server_reads_as_on_one_device,
    observed_heads_are_those_of_one_device,
]


def main(only: str = "") -> int:
    assert mesh_for_text(LLAMA, ONE_DEVICE) is None
    return run_claims(named(*CLAIMS), only)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
