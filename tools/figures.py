"""Draws the figures of the pages: `python -m tools.figures`, which writes docs/figures/*.png.

masks.png   blocks of three rules
plan.png    the shipped model's plan: how much of the causal blocks each head keeps
blocks.png  the blocks that two heads of one layer select on the same text
proof-*.png quality and tasks against density and time, from result files
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from tools import proof_figures
from xsake import BlockMask, hads, masks, shipped
from xsake.bench.method_times import activations
from xsake.block_mask import draw
from xsake.data.documents import load_documents
from xsake.model import huggingface
from xsake.model.observer import Observer

FOLDER = Path("docs/figures")
LENGTH, BLOCK, DENSITY, DOCUMENTS = 2048, 64, 0.3, 2
# Without it, the file would hold the version of matplotlib.
METADATA = {"Software": None}
COLORS = mpl.colors.ListedColormap(list(draw.COLORS.values()))  # empty, partial, full


def _subplots(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    return plt.subplots(1, columns, figsize=size, layout="constrained")


def _show(axes: Any, mask: BlockMask, title: str, n: int = 0) -> None:
    """One head's blocks."""
    T, S = mask.shape
    blocks = np.asarray(mask[0, n].blocks())[0, 0]
    axes.imshow(blocks, cmap=COLORS, vmin=0, vmax=2, extent=(0, S, T, 0), interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="key", ylabel="query")
    axes.label_outer()


def _legend(figure: Any) -> None:
    names = ("empty: skipped", "partial: the rule decides", "full")
    patches = [mpl.patches.Patch(facecolor=COLORS(i), edgecolor="#bbbbbb") for i in range(3)]
    figure.legend(patches, names, loc="lower center", ncols=3, frameon=False, fontsize=9)


def _save(figure: Any, name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name, dpi=90, metadata=METADATA)
    plt.close(figure)
    print(f"written: {FOLDER / name}")


def mask_figure() -> None:
    """Rules as blocks: a window with sinks, packed documents, dilation."""
    T = 2048
    near = masks.first(16) | masks.sliding_window(256)
    packed = masks.documents(np.repeat(np.arange(3), (700, 900, 448)))
    rules = {
        "causal() &\n(first(16) | sliding_window(256))": masks.causal() & near,
        "causal() &\ndocuments(ids of 3 documents)": masks.causal() & packed,
        "causal() &\n(sliding_window(128) | strided(512))": masks.causal()
        & (masks.sliding_window(128) | masks.strided(512)),
    }
    figure, all_axes = _subplots(3, (9, 3.9))
    for axes, (title, rule) in zip(all_axes, rules.items(), strict=True):
        mask = BlockMask.from_rule(rule, (T, T), block=64)
        _show(axes, mask, f"{title}\ndensity {float(mask.density()):.2f}")
    figure.get_layout_engine().set(rect=(0, 0.08, 1, 0.92))
    _legend(figure)
    _save(figure, "masks.png")


def plan_figures() -> None:
    """The shipped model's plan, and the blocks of a focused and of a broad head."""
    loaded = huggingface.load(shipped.FOLDER)
    assert loaded.tokenizer is not None
    subject = Observer(loaded.model)
    encode = loaded.tokenizer.encode
    texts = load_documents([shipped.CALIBRATION_TEXT], encode, LENGTH, DOCUMENTS)
    profile = subject.profile(texts, block=BLOCK, curves=("mean_query",))
    plan = hads.make(profile, DENSITY, "output", "mean_query")
    figure, axes = _subplots(1, (4.6, 3.8))
    image = axes.imshow(plan.shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(
        f"share of its blocks that each head keeps;\n{DENSITY} over all heads", fontsize=9
    )
    figure.colorbar(image, ax=axes)
    _save(figure, "plan.png")
    (held_out,) = load_documents([shipped.HELD_OUT_TEXT], encode, LENGTH, 1)
    layer = int(np.argmax(np.ptp(plan.shares, axis=1)))
    q, k, _, _ = activations(subject, held_out[None])
    mask = plan.mask(layer, q[layer], k[layer])
    figure, both = _subplots(2, (6.4, 3.9))
    heads = (int(np.argmin(plan.shares[layer])), int(np.argmax(plan.shares[layer])))
    for axes, n in zip(both, heads, strict=True):
        _show(axes, mask, f"layer {layer}, head {n}: density {plan.shares[layer, n]:.2f}", n)
    figure.get_layout_engine().set(rect=(0, 0.08, 1, 0.92))
    _legend(figure)
    _save(figure, "blocks.png")


def main() -> None:
    """Draws all figures."""
    mpl.use("Agg")
    proof_figures.quality_figure(_save)
    proof_figures.tasks_figure(_save)
    proof_figures.time_figure(_save)
    proof_figures.growth_figure(_save)
    mask_figure()
    plan_figures()


if __name__ == "__main__":
    main()
