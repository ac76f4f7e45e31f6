"""What parallel attention sends, and how evenly devices work; on a GPU also what balance buys.

    python -m xsake.bench.suites.parallel --out benchmarks/results/parallel.json

traffic   collectives of modules compiled for 8 devices, and their bytes on one device
heads     the largest device's work ÷ the mean before and after `balance_heads`, layer by layer
rows      the same for row blocks: contiguous, zigzag, balanced by the mask's visits
share     on a GPU: seconds of the largest device's heads, before and after; with --profile, of the
          largest device's row blocks in the layer where they differ most

Work is the number of visited blocks. `synthetic` has 24 layers of 32 kv heads with budgets from 5%
to 95% in random order; `three heads` has three kv heads with such budgets; `shipped` is the plan of
the shipped model's profile. `--profile NAME=FILE` adds the plans of a profile of three kv heads,
such as SmolLM2's, over 3 devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xsake import BlockMask, _jax, masks, shipped
from xsake.attention import dot_product_attention
from xsake.bench import programs
from xsake.bench.suites import Record
from xsake.bench.timing import compile_directions, provenance, time_interleaved
from xsake.hads import Profile, make
from xsake.parallel import context_attention, explain_context
from xsake.parallel.balance import balance_heads
from xsake.parallel.collectives import collectives
from xsake.parallel.context.rows import device_loads, device_rows

DEVICES = 8
TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 16384, 16, 4, 128
WINDOW = masks.sliding_window(1023, 0)
ROW_BLOCKS = 252  # of the text of `row_share`: every order divides them over three devices
ORDERS = ("contiguous", "zigzag", "balanced")


def traffic(profile: tuple[str, Profile] | None = None) -> Iterator[Record]:
    """Compiled for 8 virtual devices; nothing is run. XLA sends bfloat16 as float32 on a CPU."""
    mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Auto,))
    q = jax.ShapeDtypeStruct((1, TOKENS, HEADS, HEAD_SIZE), jnp.float32)
    k = jax.ShapeDtypeStruct((1, TOKENS, KV_HEADS, HEAD_SIZE), jnp.float32)
    sinks = masks.causal() & (masks.first(128) | WINDOW)
    for name, rule, method in (
        ("causal", masks.causal(), "ring"),
        ("window of 1,024", WINDOW, "ring"),
        ("window of 1,024", WINDOW, "halo"),
        ("window of 1,024 and the first 128 keys", sinks, "ring"),
        ("window of 1,024 and the first 128 keys", sinks, "gather"),
    ):
        explained = explain_context(q, k, k, rule, devices=DEVICES, method=method)
        tokens = P(None, "context")

        def attend(q: Any, k: Any, v: Any, rule: Any = rule, method: str = method) -> Any:
            return context_attention(q, k, v, rule, method=method)

        split = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
        module = collectives(jax.jit(split).lower(q, k, k).compile())
        sent = module["all-to-all" if method == "gather" else "collective-permute"]
        received = sent.bytes
        if method == "gather":  # without the requests, int32, and without a device's own part
            requests = DEVICES * explained.estimates[method].capacity * 4
            received = (received - requests) * (DEVICES - 1) // DEVICES
        yield {
            "suite": "traffic",
            "case": f"{name}, {method}",
            "devices": DEVICES,
            "T": TOKENS,
            "N": HEADS,
            "K": KV_HEADS,
            "H": HEAD_SIZE,
            "collectives": sent.count,
            "received_bytes": received,
            "estimated_bytes": explained.estimates[method].received_bytes,
            "all_gather_bytes": explained.all_gather_bytes,
            "chosen_method": explain_context(q, k, k, rule, devices=DEVICES).method,
        }


def budgets(layers: int, kv_heads: int, seed: int = 0) -> np.ndarray:
    """Densities from 5% to 95%, in random order in every layer, [layers, K]."""
    every = np.tile(np.linspace(0.05, 0.95, kv_heads), (layers, 1))
    return np.random.default_rng(seed).permuted(every, axis=1)


def shipped_counts(density: float) -> np.ndarray:
    """Visited blocks of the shipped model's plan, [layers, N, row blocks]."""
    return np.asarray(make(Profile.load(shipped.PROFILES[1]), density).counts)


def plans(
    profile: tuple[str, Profile] | None, length: int | None = None
) -> dict[tuple[str, int], np.ndarray]:
    """Visited blocks of the plans of a profile with three kv heads, [layers, N, row blocks]."""
    if profile is None:
        return {}
    name, found = profile
    return {
        (f"{name}, density {density}", 3): np.asarray(make(found, density, length=length).counts)
        for density in (0.2, 0.43)
    }


def heads(profile: tuple[str, Profile] | None = None) -> Iterator[Record]:
    """Orders of kv heads."""
    three = plans(profile)
    works = {
        ("synthetic, 32 kv heads", 8): budgets(24, 32),
        ("three heads", 3): budgets(30, 3),
        **{
            (f"shipped, density {density}", devices): shipped_counts(density).sum(-1)
            for density in (0.2, 0.43)
            for devices in (2, 4)
        },
        **{case: counts.sum(-1) for case, counts in three.items()},
    }
    for (name, devices), work in works.items():
        found = balance_heads(work, devices, 3 if (name, devices) in three else None)
        yield {
            "suite": "heads",
            "case": f"{name}, {devices} devices",
            "devices": devices,
            "layers": len(work),
            "kv_heads": found.order.shape[1],
            "before_mean_ratio": float(found.before_ratio.mean()),
            "before_largest_ratio": float(found.before_ratio.max()),
            "after_mean_ratio": float(found.after_ratio.mean()),
            "after_largest_ratio": float(found.after_ratio.max()),
            "speedup": found.speedup,
        }


def rows(profile: tuple[str, Profile] | None = None) -> Iterator[Record]:
    """Row blocks of a context axis; the worst layer of each.

    speedup: time of all layers, contiguous ÷ balanced, where a layer takes as long as its largest
    device.
    """
    n = 1 << 10
    three = np.minimum(1 + budgets(30, 3)[..., None] * np.arange(n), np.arange(n) + 1)
    cases = {
        ("causal", 8): np.arange(1, n + 1)[None, None],
        ("three heads", 4): three,
        **{(f"shipped, density {d}", 2): shipped_counts(d) for d in (0.2, 0.43)},
        **plans(profile),
    }
    for (name, devices), visits in cases.items():
        by_row = visits.sum(1)
        by_row = by_row[:, : by_row.shape[1] // (2 * devices**2) * 2 * devices**2]
        record: Record = {"suite": "rows", "case": f"{name}, {devices} devices", "devices": devices}
        largest = {}
        for method in ORDERS:
            loads = np.stack([device_loads(layer, devices, method) for layer in by_row])
            record[f"{method}_ratio"] = float((loads.max(1) / loads.mean(1)).max())
            largest[method] = loads.max(1).sum()
        yield record | {"speedup": float(largest["contiguous"] / largest["balanced"])}


def share(profile: tuple[str, Profile] | None = None) -> Iterator[Record]:
    """The share of the largest device of one layer, before and after, run on this GPU."""
    yield from head_share()
    if profile is not None:
        block = profile[1].facts.block
        for (name, devices), counts in plans(profile, ROW_BLOCKS * block).items():
            yield from row_share(name, devices, counts, block)


def row_share(name: str, devices: int, counts: np.ndarray, block: int) -> Iterator[Record]:
    """Row blocks of the largest device, in the layer where contiguous ones differ most."""
    n = counts.shape[-1]
    by_row = counts.sum(1)
    ratios = [device_loads(layer, devices, "contiguous").max() / layer.sum() for layer in by_row]
    layer = int(np.argmax(ratios))
    kept = _kept(counts[layer], np.random.default_rng(0))
    k, v = (
        jax.random.normal(jax.random.key(i), (1, n * block, 3, 64), jnp.bfloat16) for i in (1, 2)
    )
    calls, loads = {}, {}
    for order in ORDERS:
        of_device = device_rows(by_row[layer], devices, order)
        loads[order] = device_loads(by_row[layer], devices, order)
        largest = np.sort(of_device[loads[order].argmax()])
        index = (largest[:, None] * block + np.arange(block)).reshape(1, -1)
        rule = masks.at_positions(masks.causal(), jnp.asarray(index, jnp.int32))
        mask = BlockMask.from_dense(kept[:, largest], rule, block=block)
        q = jax.random.normal(jax.random.key(0), (1, index.size, counts.shape[1], 64), jnp.bfloat16)

        def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return dot_product_attention(q, k, v, mask=mask)

        for direction, call in compile_directions(attend, (q, k, v), mask).items():
            calls[f"{order} {direction}"] = call
    for timed, timing in time_interleaved(calls).items():
        order, direction = timed.split()
        yield {
            "suite": "share",
            "case": f"{name}, largest of {devices} devices, {order}",
            "direction": direction,
            "T": n * block,
            "layer": layer,
            "largest_ratio": float(loads[order].max() / loads[order].mean()),
            "median_seconds": timing.median_seconds,
        }


def _kept(counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks of so many visits, [N, n, n]: the first, the diagonal, and random ones between."""
    N, n = counts.shape
    score = rng.random((N, n, n))
    score[..., 0] = 2
    score[:, np.arange(n), np.arange(n)] = 3
    score = np.where(np.tri(n, dtype=bool), score, -1)
    return (-score).argsort(-1).argsort(-1) < counts[..., None]


def head_share() -> Iterator[Record]:
    """The heads of the largest device of one layer."""
    T, n = 16384, 128
    work = budgets(1, 32)
    found = balance_heads(work, DEVICES)
    calls = {}
    orders = {"before": np.arange(32), "after": found.order[0]}
    for when, order in orders.items():
        groups = work[0][order].reshape(DEVICES, -1)
        largest = groups[groups.sum(1).argmax()]
        rng = np.random.default_rng(0)
        kept = rng.random((len(largest), n, n)) < largest[:, None, None]
        blocks = kept | np.eye(n, dtype=bool)
        mask = BlockMask.from_dense(blocks, masks.causal(), block=T // n)
        q, k, v = (
            jax.random.normal(jax.random.key(i), (1, T, len(largest), 128), jnp.bfloat16)
            for i in range(3)
        )

        def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return dot_product_attention(q, k, v, mask=mask)

        for direction, call in compile_directions(attend, (q, k, v), mask).items():
            calls[f"{when} {direction}"] = call
    for name, timing in time_interleaved(calls).items():
        when, direction = name.split()
        yield {
            "suite": "share",
            "case": f"synthetic, largest of {DEVICES} devices, {when}",
            "direction": direction,
            "T": T,
            "largest_ratio": float(
                (found.before_ratio if when == "before" else found.after_ratio)[0]
            ),
            "median_seconds": timing.median_seconds,
        }


def profile_of(text: str) -> tuple[str, Profile]:
    """The profile that `--profile NAME=FILE` names, of a model with three kv heads."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError(
            f"--profile is {text!r}; give NAME=FILE, such as SmolLM2=profile.safetensors"
        )
    return name, Profile.load(path)


def main(arguments: list[str] | None = None) -> None:
    """Writes all records that this machine can make."""
    parser = programs.parser("xsake.bench.suites.parallel", __doc__)
    programs.add_out(parser)
    parser.add_argument(
        "--profile", metavar="NAME=FILE", help="of a model with three kv heads, such as SmolLM2's"
    )
    given = parser.parse_args(arguments)
    out, profile = given.out, None
    if given.profile:
        with programs.stopping():
            profile = profile_of(given.profile)
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"  # before the first device
    parts = [heads, rows, share] if _jax.platform() == "gpu" else [heads, rows, traffic]
    records = []
    for part in parts:
        for record in part(profile):
            print(json.dumps(record), flush=True)
            records.append(record)
    out.write_text(json.dumps({**provenance(), "results": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
