"""Twenty updates on eight CPU devices, on one, and on meshes of every shape.

`python -m tests.parallel.shapes [MESH …]`, where MESH is as in "fsdp=4,tensor=2". It runs in a
separate process, because the number of devices is fixed when JAX starts. It prints one line per
claim and exits with 1 if any does not hold.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # pytest imports this file too, to look for doctests
    eight = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {eight}"

import dataclasses

import jax
import numpy as np

from xsake.data.stream import Batch
from xsake.hads import Plan
from xsake.hads.plan import Terms
from xsake.model import Config as Model
from xsake.parallel import sharding
from xsake.parallel.mesh import make_mesh, parse, resolved
from xsake.train import planning, step
from xsake.train.config import Compute, Config, Data, Optimizer, Schedule

STEPS, ROWS, LENGTH, BLOCK = 20, 16, 64, 16
SHAPES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "tensor=4")
MODEL = Model(
    vocab_size=64,
    context=LENGTH,
    layers=2,
    width=16,
    heads=8,
    kv_heads=4,
    head_size=4,
    mlp_width=32,
    tied=True,
    eos=(0,),
)


def config(**changes) -> Config:
    """Two micro-batches, an average of the parameters, and a loss over parts of the tokens."""
    return Config(
        model=dataclasses.replace(MODEL, **changes),
        data=Data(length=LENGTH, rows=ROWS),
        schedule=Schedule(steps=STEPS, warmup_steps=2),
        optimizer=Optimizer(ema_decay=0.9, learning_rate=1e-2, accumulate=2),
        compute=Compute(loss_tokens=96),
    )


def batch_rows(number: int, chosen) -> Batch:
    """Two documents in every row."""
    draw = np.random.default_rng(number)
    text = draw.integers(0, 64, (ROWS, LENGTH + 1)).astype(np.int32)[list(chosen)]
    ids = np.repeat(np.arange(2, dtype=np.int32), [20, LENGTH - 20])[None].repeat(len(text), 0)
    weights = np.ones((len(text), LENGTH), np.float32)
    return Batch(text[:, :-1], text[:, 1:], ids, weights)


def plan_of() -> Plan:
    """Heads with unequal budgets."""
    counts = np.minimum(np.arange(1, 5), 1 + np.arange(16).reshape(2, 8, 1) % 4).astype(np.int32)
    forced = np.minimum(np.arange(1, 5), 2)
    terms = Terms(0.8, "kl", "past_query", BLOCK, LENGTH)
    return Plan(np.maximum(counts, forced).astype(np.int32), None, terms)


def run(whole: Config, mesh, plan: Plan | None) -> tuple[list[float], step.State]:
    state = step.initial_on(whole, mesh)
    found = []
    argument = planning.argument(plan, mesh)
    for number in range(STEPS):
        batch = sharding.batch_from_rows(
            lambda chosen, number=number: batch_rows(number, chosen), (ROWS, LENGTH), mesh
        )
        state, metrics = step.compiled_update(state, batch, argument, config=whole, mesh=mesh)
        found.append(float(metrics.loss))
    return found, state


def far(a, b) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(a, b) / np.asarray(b))))


def claims_of(shape: str, whole: Config, plan: Plan | None, one: list[float]) -> dict[str, bool]:
    sizes = resolved(parse(shape), 8, ROWS, 2, environment={})
    mesh = make_mesh(sizes)
    assert mesh is not None
    losses, state = run(whole, mesh, plan)
    sharding.assert_placed(state, step.state_shardings(whole, mesh))
    arrays = (state.parameters, state.optimizer, state.average)
    most = max(sharding.bytes_per_device(arrays).values())
    total = sum(x.nbytes for x in jax.tree.leaves(arrays))
    share = 1 / (sizes.fsdp * sizes.tensor)
    # norms are not split over `tensor`, nor are counts over anything
    bound = share + 0.05
    kind = f"{shape}, {whole.model.attention}{', plan' if plan else ''}"
    return {
        f"{kind}: the losses of {STEPS} steps are those of one device: {far(losses, one):.1e}": far(
            losses, one
        )
        < 1e-5,
        f"{kind}: a device holds {most / total:.3f} of the state, at most {bound:.3f}": most / total
        <= bound,
    }


def main(shapes: list[str]) -> int:
    assert len(jax.devices()) == 8
    variants = [(config(), plan_of())]
    claims: dict[str, bool] = {}
    for whole, plan in variants:
        one, _ = run(whole, None, plan)
        for shape in shapes or SHAPES:
            found = claims_of(shape, whole, plan, one)
            for claim, holds in found.items():
                print(f"{claim}: {'ok' if holds else 'WRONG'}", flush=True)
            claims |= found
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
