"""The rows of the tables of docs/parallel.md; `tables` writes them as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], Iterator[list[str]]]  # head, rows


def _of(records: list[Record], suite: str) -> Iterator[Record]:
    return (x for x in records if x["suite"] == suite)


def traffic(records: list[Record]) -> Cells:
    """Collectives and bytes of every method."""
    head = ["mask, method", "collectives", "MB received", "÷ all-gather of K and V"]
    rows = (
        [
            x["case"],
            str(x["collectives"]),
            f"{x['received_bytes'] / 1e6:.2f}",
            f"{x['received_bytes'] / x['all_gather_bytes']:.3f}",
        ]
        for x in _of(records, "traffic")
    )
    return head, rows


def heads(records: list[Record]) -> Cells:
    """Largest ÷ mean over layers, and the time that it saves."""
    head = [
        "heads",
        "before: mean / worst layer",
        "after: mean / worst layer",
        "work before ÷ after",
    ]
    rows = (
        [
            x["case"],
            f"{x['before_mean_ratio']:.3f} / {x['before_largest_ratio']:.3f}",
            f"{x['after_mean_ratio']:.3f} / {x['after_largest_ratio']:.3f}",
            f"{x['speedup']:.3f}",
        ]
        for x in _of(records, "heads")
    )
    return head, rows


def rows(records: list[Record]) -> Cells:
    """Largest ÷ mean of row blocks, and the time that balance saves."""
    methods = ("contiguous", "zigzag", "balanced")
    found = (
        [
            x["case"],
            *(f"{x[f'{method}_ratio']:.3f}" for method in methods),
            f"{x['speedup']:.3f}",
        ]
        for x in _of(records, "rows")
    )
    return ["mask", *methods, "work contiguous ÷ balanced"], found


def share(records: list[Record]) -> Cells:
    """Times of the largest device's share on one GPU, in each order."""
    found: dict[str, dict[str, dict[str, Record]]] = {}
    for x in _of(records, "share"):
        case, _, order = x["case"].rpartition(", ")
        found.setdefault(case, {}).setdefault(order, {})[x["direction"]] = x
    lines = (
        [
            case,
            order,
            f"{both['forward']['largest_ratio']:.3f}",
            _both([both["forward"], both["backward"]], "median_seconds", 1e3),
        ]
        for case, orders in found.items()
        for order, both in orders.items()
    )
    return ["share", "order", "largest ÷ mean", "ms forward / backward"], lines


def cost(records: list[Record]) -> Cells:
    """Forward / backward of the method with the least expected time, and published times."""
    head = [
        "what", "devices", "method", "TFLOP", "GB received", "products ms", "links ms",
        "expected ms", "card",
    ]  # fmt: skip
    return head, _cost_rows(records)


def _cost_rows(records: list[Record]) -> Iterator[list[str]]:
    by_case: dict[tuple[float, int], dict[str, dict[str, Record]]] = {}
    for x in _of(records, "cost"):
        methods = by_case.setdefault((x["density_ratio"], x["devices"]), {})
        methods.setdefault(x["method"], {})[x["direction"]] = x
    for (density, devices), methods in by_case.items():
        pairs = [[x["forward"], x["backward"]] for x in methods.values()]
        pair = min(pairs, key=lambda pair: sum(x["expected_seconds"] for x in pair))
        yield [
            f"XSAKE, causal, density {density:g}",
            str(devices),
            pair[0]["method"],
            _both(pair, "operations", 1e-12),
            _both(pair, "received_bytes", 1e-9),
            _both(pair, "compute_seconds", 1e3),
            _both(pair, "link_seconds", 1e3),
            _both(pair, "expected_seconds", 1e3),
            "H200, expected",
        ]
    for x in _of(records, "published"):
        pair = [{"s": x["forward_seconds"]}, {"s": x["backward_seconds"]}]
        times = "figures only" if x["forward_seconds"] is None else _both(pair, "s", 1e3)
        count = "" if x["devices"] is None else str(x["devices"])
        name = f"[{x['system']}]({x['source'].partition(',')[0]}): {x['what']}"
        yield [name, count, "", "", "", "", "", times, f"{x['card']}, published"]


def _both(pair: list[Record], key: str, scale: float) -> str:
    values = (scale * x[key] for x in pair)
    return " / ".join(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in values)
