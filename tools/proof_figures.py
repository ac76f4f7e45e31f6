"""Charts of docs/proof.md from result files; `tools.figures` draws them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from xsake.evaluate.needle import summarise
from xsake.parallel.cost import Shape

RESULTS = Path("benchmarks/results")
METHODS = "hads-64-2026-11-15.json"  # all methods, perplexity
TASKS = "tasks-final-2026-11-19.json"  # tasks at three lengths, held-out prompts
SPEED = {
    "mean_query": "certificate-speed-2026-11-17.json",
    "outlier_queries": "certificate-speed-2026-11-18.json",
}
KERNELS = "hopper-2026-11-17.json"
SHOWN = {
    "oracle/output": "oracle",
    "mean_query/output": "HADS, mean_query",
    "static/output": "HADS, static",
    "vertical_slash": "vertical-slash",
    "sink_window": "sink + window",
    "bigbird": "BigBird",
    "seed_entropy": "earlier XSAKE",
}
TASK_STYLES = {
    "oracle/output": ("oracle", "C2^--"),
    "outlier_queries/output": ("HADS, outlier_queries", "C0o-"),
    "outlier_queries/output certified, error 0.2": ("the same, certified (asked for)", "C1D"),
    "sink_window": ("sink + window", "C3s:"),
}

Save = Callable[[Any, str], None]


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def _axes(size: tuple[float, float], x: str, y: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def quality_figure(save: Save) -> None:
    """Perplexity gap and attention KL against density, every kind of method."""
    densities = _load(METHODS)["densities"]
    figure, both = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for axes, column, label, scale in (
        (both[0], "perplexity_gap", "perplexity gap, %", 100),
        (both[1], "kl", "attention KL, nats", 1),
    ):
        for method, name in SHOWN.items():
            points = sorted(
                (row["realised_density_ratio"], scale * row[column])
                for part in densities.values()
                for row in part["rows"]
                if row["method"] == method
            )
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set(xlabel="density", ylabel=label)
        axes.grid(alpha=0.3)
    both[0].set_yscale("symlog", linthresh=0.1)
    both[1].set_yscale("log")
    both[0].legend(fontsize=7)
    save(figure, "proof-quality.png")


def tasks_figure(save: Save) -> None:
    """Share of dense attention's right answers against density, a panel for each length.

    Certified attention is drawn at the density that it visited, labelled with the one asked for.
    """
    means = summarise(_load(TASKS)["rows"])
    lengths = sorted({mean["length"] for mean in means})
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.9), sharey=True, layout="constrained")
    for axes, length in zip(panels, lengths, strict=True):
        for method, (name, style) in TASK_STYLES.items():
            found = [x for x in means if (x["length"], x["method"]) == (length, method)]
            most = max((len(x["families"]) for x in found), default=0)
            # points of all families that were measured, so that they can be compared
            full = [x for x in found if len(x["families"]) >= max(most, 3)]
            points = [(x["realised_density_ratio"], x["share_of_dense"]) for x in full]
            x, y = zip(*sorted(points), strict=True) if points else ((), ())
            axes.plot(x, y, style, ms=5, label=name)
            if " certified" in method:
                for mean, point in zip(full, points, strict=True):
                    offset = (2, 5) if mean["density"] >= 0.3 else (2, -11)
                    label = f"{mean['density']:g}"
                    axes.annotate(label, point, offset, textcoords="offset points", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.set(title=f"{length:,} tokens", xlabel="density that was visited", xlim=(0.05, 0.65))
    panels[0].set_ylabel("right answers ÷ dense attention's")
    panels[0].legend(fontsize=7, loc="center left")
    save(figure, "proof-tasks.png")


def time_figure(save: Save) -> None:
    """Perplexity gap against measured time at 8,192 tokens, selection included."""
    figure, axes = _axes(
        (5.6, 3.9), "selection + sparse attention ÷ cuDNN's dense attention", "perplexity gap, %"
    )
    gaps = {
        ("outlier_queries", row["density"]): 100 * row["perplexity_gap"]
        for row in _load(TASKS)["perplexity"]
        if row["length"] == 8192 and row["method"] == "outlier_queries/output"
    } | {
        ("mean_query", float(density)): 100 * row["perplexity_gap"]
        for density, part in _load(METHODS)["densities"].items()
        for row in part["rows"]
        if row["method"] == "mean_query/output"
    }
    for selector, file in SPEED.items():
        points = sorted(
            (row["selection_and_sparse_over_dense"], gaps[selector, row["density"]], row["density"])
            for row in _load(file)["rows"]
            if row["selector"] == selector and row["shape"] == "1·9·8192·64"
        )
        x, y, densities = zip(*points, strict=True)
        axes.plot(x, y, marker="o", label=selector)
        for point in zip(x, y, densities, strict=True):
            axes.annotate(f" {point[2]:g}", point[:2], fontsize=8)
    axes.plot([1], [0], "k*", label="dense")
    axes.legend(fontsize=8)
    save(figure, "proof-time.png")


def growth_figure(save: Save) -> None:
    """Counted work from 2k to 512k tokens at the measured speed of 16k, and measured calls."""
    figure, axes = _axes((5.6, 3.9), "tokens", "ms of one forward call, 16 heads of 128")
    forward = {
        (row["case"].split(" ", 1)[1], row["T"]): row
        for row in _load(KERNELS)["results"]
        if row.get("direction") == "forward" and row["H"] == 128
    }
    lengths = [2048 << i for i in range(9)]
    for name, case, how in (
        ("causal", "causal", {}),
        ("density 0.2", "density=0.1", {"density_ratio": 0.2}),  # the case's is that of all blocks
        ("window of 4,096", "causal", {"window": 4096}),
    ):
        speed = 1e12 * forward[case, 16384]["teraflops"]
        shapes = [Shape(x, heads=16, kv_heads=16, **how) for x in lengths]
        (line,) = axes.plot(lengths, [1e3 * x.operations / speed for x in shapes], label=name)
        if "window" not in how:
            points = {
                T: 1e3 * forward[case, T]["median_seconds"] * T / 16384  # a batch of 16,384 tokens
                for T in (4096, 16384)
            }
            axes.plot(points.keys(), points.values(), "o", ms=5, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{x // 1024}k" for x in lengths])
    axes.legend(fontsize=8)
    save(figure, "proof-growth.png")
