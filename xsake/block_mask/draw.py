"""How a BlockMask looks: one line, a drawing in characters, a plot."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xsake.block_mask.lists import entries_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xsake.block_mask import BlockMask
else:
    Axes = BlockMask = Any  # matplotlib is optional, and BlockMask imports this module

MAX_ROWS = 32  # of a drawing
TITLE_COLUMNS = 56  # of a plot; a longer line would be wider than matplotlib's default figure
COLORS = {"empty": "#f4f4f4", "partial": "#8fb8de", "full": "#1f4e79"}


def title(mask: BlockMask) -> str:
    """One line: sizes, blocks and rule."""
    (T, S), (bq, bk) = mask.shape, mask.block
    lead = " × ".join(map(str, mask.kv_count.shape[:2]))
    rule = "" if mask.rule is None else f", {mask.rule}"
    words = f"BlockMask({lead} × {T} × {S} tokens, blocks {bq} × {bk}{rule})"
    if mask.overflow is None or isinstance(mask.overflow, jax.core.Tracer) or not mask.overflow:
        return words
    return (
        f"OVERFLOW: lists were cut at the capacity of {mask.kv_index.shape[-1]} blocks, and "
        f"attention with this mask is NaN; raise capacity\n{words}"
    )


def text(mask: BlockMask) -> str:
    """The first head in characters; the title alone where the mask is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(mask)):
        return title(mask)
    step = max(1, -(-max(mask.grid.counts) // MAX_ROWS))
    rows = [" ".join(marks) for marks in _marks(mask, step)]
    thinned = "" if step == 1 else f", each mark {step} × {step} blocks"
    is_causal = mask.rule is not None and mask.rule.is_causal
    of = "the causal blocks" if is_causal else "all blocks"
    density = f"density {float(mask.density()):.3f} of {of}{thinned}; ■ full ◪ partial · empty"
    return "\n".join([title(mask), density, *_which_head(mask), *rows])


def _which_head(mask: BlockMask) -> list[str]:
    """A line that names the head that is drawn, and its density, where there are several."""
    batch, heads = mask.kv_count.shape[:2]
    if batch * heads == 1:
        return []
    density = float(mask[0, 0].density())
    return [f"batch row 0 of {batch}, head 0 of {heads}, density {density:.3f}:"]


def plot(mask: BlockMask, b: int = 0, n: int = 0, axes: Axes | None = None) -> Axes:
    """One head on matplotlib axes, with a title that names it and a legend at the right."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    if axes is None:
        axes = plt.subplots(layout="constrained")[1]
    (T, S), (nq, nk), (bq, bk) = mask.shape, mask.grid.counts, mask.block
    axes.imshow(
        np.asarray(mask[b, n].blocks())[0, 0],
        cmap=ListedColormap(list(COLORS.values())),
        vmin=0,
        vmax=2,
        extent=(0, nk * bk, nq * bq, 0),
        interpolation="nearest",
    )
    axes.set(xlabel="key", ylabel="query", xlim=(0, S), ylim=(T, 0))
    lines = textwrap.wrap("blocks" if mask.rule is None else str(mask.rule), TITLE_COLUMNS)
    axes.set_title("\n".join([*lines, _head(mask, b, n)]), fontsize=10)
    patches = [Patch(facecolor=x, edgecolor="#bbbbbb", label=name) for name, x in COLORS.items()]
    axes.legend(handles=patches[::-1], loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return axes


def _head(mask: BlockMask, b: int, n: int) -> str:
    """What a plot shows: "head 2 of 4", with the batch row where there are several."""
    batch, heads = mask.kv_count.shape[:2]
    head = f"head {n} of {heads}" if heads > 1 else "every head"
    return f"batch row {b} of {batch}, {head}" if batch > 1 else head


def _marks(mask: BlockMask, step: int) -> np.ndarray:
    """Marks of the first head, one per step × step blocks, in O(listed blocks) time."""
    rows, columns, full, live = (np.asarray(x)[0, 0] for x in entries_of(mask.lists))
    size = [-(-n // step) for n in mask.grid.counts]

    def blocks_per_mark(which: np.ndarray) -> np.ndarray:
        index = rows[which] // step * size[1] + columns[which] // step
        return np.bincount(index, minlength=size[0] * size[1]).reshape(size)

    edges = (
        np.minimum(step, n - step * np.arange(s))
        for n, s in zip(mask.grid.counts, size, strict=True)
    )
    whole = np.multiply.outer(*edges)
    marks = np.where(blocks_per_mark(live) > 0, "◪", "·")
    return np.where(blocks_per_mark(live & full) == whole, "■", marks)
