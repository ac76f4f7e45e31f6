"""xsake cost: what attention over a sequence split over many devices costs, before it is run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from xsake.bench import timing
from xsake.cli.terminal import console, writable_file
from xsake.parallel import cost as model

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cost(
    devices: tuple[int, ...] = (8,),
    length: str = "1M",
    card: str = "h200",
    heads: int = 64,
    kv_heads: int = 4,
    head_size: int = 128,
    batch: int = 1,
    window: int | None = None,
    density: tuple[float, ...] = (1.0,),
    out: Path | None = None,
) -> None:
    """Prints operations, bytes and expected time of one attention layer on every device.

    Times come from kernels measured on one card and from the speed of its links.

    Args:
      devices: of the context axis, one number or several.
      length: tokens of the sequence; K, M and G are powers of 1,024.
      card: whose measured kernels and links are used.
      heads: query heads.
      kv_heads: key/value heads.
      head_size: numbers of a head.
      batch: sequences.
      window: keys that a query sees, itself included; default all before it.
      density: blocks visited ÷ those that causality and the window allow, one or several.
      out: also write a JSON file.
    """
    if not devices or min(devices) < 1:
        raise ValueError(f"--devices must be numbers of at least 1, got {list(devices)}")
    if not density:
        raise ValueError("--density names no number; leave it out for 1.0")
    path = None if out is None else writable_file(out)
    rows = []
    for one in density:
        shape = model.Shape(
            length=tokens(length),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            window=window,
            density_ratio=one,
        )
        records = [x for count in devices for x in model.costs(shape, count, card)]
        console.print(_table(shape, records, card))
        rows += [_record(shape, x) for x in records]
    console.print(
        f"speeds: {model.measurements(card)[0]}; links and their sources: {model.DATA.name}"
    )
    if path is not None:
        facts = timing.provenance() | {"quick": False, "card": card}
        facts["measurements"] = model.measurements(card)[0]
        facts["results"] = rows + [{"suite": "published", **x} for x in model.published()]
        path.write_text(json.dumps(facts, indent=1) + "\n")
        console.print(f"written: {path}", soft_wrap=True)


def tokens(text: str) -> int:
    """A number of tokens: 4096, 128K, 1M.

    >>> tokens("1M"), tokens("128k"), tokens("4096")
    (1048576, 131072, 4096)
    """
    unit = UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"--length must be a number such as 4096, 128K or 1M, got {text!r}")
    return int(digits) * unit


def _record(shape: model.Shape, cost: model.Cost) -> dict[str, Any]:
    name = "causal" if shape.window is None else f"window {shape.window}"
    if shape.density_ratio < 1:
        name += f", density {shape.density_ratio}"
    case = f"{name}, {shape.length} tokens, {cost.devices} devices, {cost.method}"
    return {"suite": "cost", "case": case, **dataclasses.asdict(shape), **dataclasses.asdict(cost)}


def _table(shape: model.Shape, records: list[model.Cost], card: str) -> Table:
    what = "causal" if shape.window is None else f"window of {shape.window}"
    title = (
        f"{shape.length:,} tokens, {what}, density {shape.density_ratio}, {shape.heads} heads of "
        f"{shape.head_size}, {shape.kv_heads} kv heads, {card}"
    )
    table = Table(
        "devices", "method", "TFLOP", "MB received", "compute ms", "links ms", "expected ms",
        title=title, caption="forward / backward, one device",
    )  # fmt: skip
    for pair in zip(records[::2], records[1::2], strict=True):  # forward, backward of a method
        table.add_row(
            str(pair[0].devices),
            pair[0].method,
            _both(x.operations / 1e12 for x in pair),
            _both(x.received_bytes / 1e6 for x in pair),
            _both(1e3 * (x.compute_seconds or 0) for x in pair),
            _both(1e3 * (x.link_seconds or 0) for x in pair),
            _both(1e3 * (x.expected_seconds or 0) for x in pair),
        )
    return table


def _both(values: Iterable[float]) -> str:
    return " / ".join(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in values)
