"""Masks as grids of blocks, computed by the library, and the Python that computes them again."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from xsake import masks, selection
from xsake.block_mask import BlockMask
from xsake.hads import baselines, row_blocks

# parameter: (default, whether it is a whole number)
PARAMETERS: dict[str, tuple[int | float, bool]] = {
    "left": (256, True),
    "right": (0, True),
    "first": (64, True),
    "n_global": (64, True),
    "size": (512, True),
    "stride": (256, True),
    "dilation": (4, True),
    "density": (0.25, False),
    "seed": (0, True),
}

# rule: what it shows, and its terms: functions of `masks` and their arguments, joined by |
RULES: dict[str, tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "causal": ("every key up to the query's own", (("causal", ()),)),
    "sliding_window": ("keys near the query", (("sliding_window", ("left", "right")),)),
    "sink_window": (
        "the first keys and those near the query",
        (("first", ("first",)), ("sliding_window", ("left", "right"))),
    ),
    "longformer": (
        "a window, and tokens that see and are seen by all",
        (("longformer", ("left", "n_global")),),
    ),
    "bigbird": (
        "Longformer and random cells",
        (("bigbird", ("left", "n_global", "density", "seed")),),
    ),
    "chunked": ("tokens of the same chunk", (("chunked", ("size",)),)),
    "strided": ("every stride-th key", (("strided", ("stride",)),)),
    "dilated": ("a window with gaps", (("dilated", ("left", "dilation")),)),
    "global_tokens": ("tokens that see and are seen by all", (("global_tokens", ("n_global",)),)),
    "random": ("random cells, others for every head", (("random", ("density", "seed")),)),
}
HAS_CELLS = ("bigbird", "random")  # whose cells have the size of a block here


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A mask of one head."""

    title: str
    blocks: np.ndarray  # int [nq, nk]: 0 empty, 1 partial, 2 full
    density: float
    is_causal: bool
    python: str


def draw_rule(
    name: str,
    values: dict[str, int | float],
    *,
    causal: bool,
    length: int,
    block: int,
    heads: int,
    head: int,
) -> Drawing:
    """The mask of a rule with these parameters."""
    terms = []
    for function, parameters in RULES[name][1]:
        arguments = [repr(values[x]) for x in parameters]
        arguments += [f"block={block}"] * (function in HAS_CELLS)
        terms.append(f"masks.{function}({', '.join(arguments)})")
    rule = " | ".join(terms)
    if causal and name != "causal":
        rule = f"({rule}) & masks.causal()" if len(terms) > 1 else f"{rule} & masks.causal()"
    lines = [
        "from xsake import BlockMask, masks",
        "",
        f"rule = {rule}",
        f"mask = BlockMask.from_rule(rule, ({length}, {length}), heads={heads}, block={block})",
        "print(mask)",
    ]
    built = functools.reduce(
        lambda x, y: x | y,
        (
            getattr(masks, function)(
                *(values[x] for x in parameters),
                **({"block": block} if function in HAS_CELLS else {}),
            )
            for function, parameters in RULES[name][1]
        ),
    )
    built = built & masks.causal() if causal and name != "causal" else built
    mask = BlockMask.from_rule(built, (length, length), heads=heads, block=block)
    return _drawn(mask, head, "\n".join(lines) + "\n")


def draw_method(
    name: str, density: float, *, seed: int, length: int, block: int, heads: int, head: int
) -> Drawing:
    """A fixed pattern at a density."""
    if name not in baselines.FIXED:
        raise ValueError(f"method {name!r:.40} is not one of {list(baselines.FIXED)}")
    n = row_blocks.count_blocks(length, block)
    kept = baselines.fixed(name, density, 1, heads, n, seed)
    lines = [
        "from xsake import selection",
        "from xsake.hads import baselines",
        "",
        f"kept = baselines.fixed({name!r}, {density}, 1, {heads}, {n}, {seed})",
        f"mask = selection.to_mask(kept[0], {length}, {block})",
        "print(mask)",
    ]
    return _drawn(selection.to_mask(kept[0], length, block), head, "\n".join(lines) + "\n")


def _drawn(mask: BlockMask, head: int, python: str) -> Drawing:
    own = min(head, mask.kv_count.shape[1] - 1)  # a rule without heads has one list for all
    return Drawing(
        title=repr(mask),
        blocks=np.asarray(mask[0, own].blocks())[0, 0],
        density=float(mask.density()),
        is_causal=mask.rule is not None and mask.rule.is_causal,
        python=python,
    )
