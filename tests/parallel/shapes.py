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
import functools
import tempfile

import jax
import numpy as np

from xsake.data.stream import Batch
from xsake.hads import Plan
from xsake.hads.terms import Terms
from xsake.model import Config as Model
from xsake.model import Sparse
from xsake.parallel import sharding
from xsake.parallel.mesh import make_mesh, parse, resolved
from xsake.train import planning, step
from xsake.train.checkpoint import Checkpoints
from xsake.train.config import Compute, Config, Data, Hads, Optimizer, Run, Schedule

STEPS, ROWS, LENGTH, BLOCK = 20, 16, 64, 16
SHAPES = (
    "data=8",
    "fsdp=8",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
    "tensor=4",
    "context=4,tensor=2",
    "fsdp=2,context=2,tensor=2",
)
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
    sinks=True,
    soft_cap=20.0,
)

SPARSE = {
    "nsa": Sparse(
        block_size=8, num_selected=4, window_size=12, compression_block=8, compression_stride=4
    ),
    "msa": Sparse(block_size=8, num_selected=3),
}


def config(density: float | None = None, **changes) -> Config:
    """Two micro-batches, an average of the parameters, and a loss over parts of the tokens."""
    return Config(
        model=dataclasses.replace(MODEL, **changes),
        hads=Hads(density=density, block=BLOCK),
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
        read = functools.partial(batch_rows, number)
        batch = step.batch_on(whole, read, (ROWS, LENGTH), mesh)
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
    where = step.state_shardings(whole, mesh)
    sharding.assert_placed(state, where)
    arrays = (state.parameters, state.optimizer, state.average)
    most = max(sharding.bytes_per_device(arrays).values())
    total = sum(x.nbytes for x in jax.tree.leaves(arrays))
    # norms are not split over `tensor`, nor are counts over anything
    bound = 1 / (sizes.fsdp * sizes.tensor) + 0.05
    order = step.token_order(whole, mesh)
    kind = f"{shape}, {whole.model.attention}{', plan' if plan else ''}, {order}"
    return {
        f"{kind}: {STEPS} losses are those of one device: {far(losses, one):.1e}": far(losses, one)
        < 1e-5,
        f"{kind}: a device holds {most / total:.3f} of the state, at most {bound:.3f}": most / total
        <= bound,
        f"{kind}: a checkpoint restored on other meshes has the same bits": restores(whole, state),
    }


def restores(whole: Config, state: step.State) -> bool:
    """Whether a checkpoint of the state has its bits on one device and on another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        whole = dataclasses.replace(whole, run=Run(folder=folder))
        checkpoints = Checkpoints(whole, "data")
        checkpoints.save(state, None)
        checkpoints.close()
        like = jax.eval_shape(lambda: step.initial(whole))
        for shape in ("", "data=2,fsdp=2,tensor=2", "fsdp=8"):
            mesh = make_mesh(resolved(parse(shape), 8, environment={})) if shape else None
            where = jax.tree.map(lambda _: sharding.replicated(None), like)
            if mesh is not None:
                where = step.state_shardings(whole, mesh)
            shapes = jax.tree.map(
                lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), like, where
            )
            found = Checkpoints(whole, "data").restore(shapes)
            assert found is not None
            sharding.assert_placed(found.state, where)
            same = jax.tree.map(
                lambda a, b: a.tobytes() == b.tobytes(), *jax.device_get((found.state, state))
            )
            if not all(jax.tree.leaves(same)):
                return False
    return True


def main(shapes: list[str]) -> int:
    assert len(jax.devices()) == 8
    plan = plan_of()
    kinds = {"plan": (config(plan.terms.density), plan), "dense": (config(), None)}
    plain = {"sinks": False, "soft_cap": None}  # sparse attention has neither
    for name, sparse in SPARSE.items():
        kinds[name] = config(attention=name, sparse=sparse, **plain), None
    if shapes:
        kinds.pop("msa")
    alone = {name: run(whole, None, given)[0] for name, (whole, given) in kinds.items()}
    change = far(alone["plan"], alone["dense"])
    claims = {f"the plan changes the losses: {change:.1e}": change > 1e-4}
    for shape in shapes or SHAPES:
        for name, (whole, given) in kinds.items():
            if name in ("plan", "dense") or "context" in shape:
                claims |= claims_of(shape, whole, given, alone[name])
    for claim, holds in claims.items():
        print(f"{claim}: {'ok' if holds else 'WRONG'}", flush=True)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
