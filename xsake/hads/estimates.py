"""Means over windows and over all queries, estimated from one sampled query in each group.

figures [B, 3, N, G] ─ means of windows, their spread ─ Estimates of a Report
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from scipy.special import stdtrit  # type: ignore[import-untyped]

# The kernel of these means reads the same factors, and a backend imports nothing of hads.
from xsake.backends.hopper.sampled import Windows
from xsake.masks.rule import cut

WINDOW = 1024  # queries of a window, for which estimates are reported
CONFIDENCE = 0.95
# Values of queries are skewed: most are small, a few are large. Student's interval of a few of them
# rarely reaches up to the mean, so its upper half is widened; docs/certificate.md has the coverage.
WIDENED_MASS = 1.5
WIDENED_ERROR = 4.0  # squares are more skewed

# What is estimated, in this order: names of a Report, widened upper halves, largest values.
FIGURES = ("dropped_mass", "squared_error", "squared_output")
WIDENED = (WIDENED_MASS, WIDENED_ERROR, WIDENED_ERROR)
MOST = (1.0, np.inf, np.inf)


class Estimate(NamedTuple):
    """The mean over all queries, estimated from a sample; [B, N, windows] or [B, N], float32."""

    mean: Float[Array, "B N *W"]  # unbiased
    # Its square is unbiased if all groups have one mean and one spread, too large if means differ.
    # A short last group, whose values count for less, may have another spread: then either.
    standard_error: Float[Array, "B N *W"]
    low: Float[Array, "B N *W"]  # the interval that covers the mean in 95% of samples
    high: Float[Array, "B N *W"]


def of_figures(
    figures: Float[Array, "B 3 N G"], length: int, every: int, window: int
) -> dict[str, Estimate]:
    """The Estimates of a Report from the values of every sampled query, in the order of FIGURES."""
    widened, most = (np.array(x, np.float32).reshape(3, 1, 1) for x in (WIDENED, MOST))
    both = by_window_and_whole(figures, length, every, window, widened, most)
    return {
        name + suffix: Estimate(*(x[:, i] for x in each))
        for i, name in enumerate(FIGURES)
        for suffix, each in zip(("", "_by_head"), both, strict=True)
    }


def with_bounds(
    found: dict[str, Any], limits: Float[Array, "B N T"] | None, window: int
) -> dict[str, Any]:
    """The Estimates of a Report with its bounds, which also limit what is estimated."""
    if limits is None:
        return found | {"bound": None, "largest_bound": None}
    real = cut(jnp.ones(limits.shape[-1], bool), window, 0, False)
    by_window = cut(limits, window, -1, 0.0)
    bound = by_window.sum(-1) / real.sum(-1)
    found = found | {"bound": bound, "largest_bound": by_window.max(-1)}
    for name, proved in (("dropped_mass", bound), ("dropped_mass_by_head", limits.mean(-1))):
        high = jnp.minimum(found[name].high, proved)
        found[name] = found[name]._replace(low=jnp.minimum(found[name].low, high), high=high)
    return found


def by_window_and_whole(
    x: Float[Array, "*axes G"],
    length: int,
    every: int,
    window: int,
    widened: float | np.ndarray,
    most: float | np.ndarray,
) -> tuple[Estimate, Estimate]:
    """Means over windows, [*axes, windows], and over all queries, [*axes].

        mean = Σ w x,  w = tokens of the group ÷ tokens of the window
        standard error² = Σ w² / (1 - Σ w²) · Σ w (x - mean)²
        interval = mean - t · standard error … mean + widened · t · standard error

    With G groups of one size, Σ w² / (1 - Σ w²) = 1 / (G - 1). The groups differ in their means,
    too, which makes the standard error larger than that of the sample. With one group in a window
    nothing is known of the spread: the interval is 0 … `most`.

    All queries are one more window here, the last one, so that the same two sums serve both.
    """
    each_window = windows_of(length, every, window)
    per, windows = each_window.per, len(each_window.tokens) - 1
    sizes = _sizes(length, every)
    number = jnp.arange(windows + 1)[:, None]
    inside = (jnp.arange(len(sizes)) // per == number) | (number == windows)
    weight = sizes / jnp.asarray(each_window.tokens)[:, None]  # where it is inside
    x = x[..., None, :]
    mean = jnp.where(inside, weight * x, 0).sum(-1)
    mean = jnp.minimum(mean, most)  # it is above by rounding only
    spread = jnp.where(inside, weight * (x - mean[..., None]) ** 2, 0).sum(-1)
    standard_error = jnp.sqrt(each_window.scale * spread)
    student = each_window.student
    half = jnp.where(student > 0, student * standard_error, jnp.inf)
    low, high = jnp.maximum(mean - half, 0), jnp.minimum(mean + widened * half, most)
    each = mean, standard_error, low, high
    return Estimate(*(x[..., :-1] for x in each)), Estimate(*(x[..., -1] for x in each))


def windows_of(length: int, every: int, window: int) -> Windows:
    """The factors of the formula of `by_window_and_whole`."""
    per = -(-window // every)
    sizes = _sizes(length, every)
    window_of = np.arange(len(sizes)) // per

    def totals(of_group: np.ndarray) -> np.ndarray:
        by_window = np.bincount(window_of, of_group)
        return np.append(by_window, by_window.sum()).astype(np.float32)

    tokens, groups = totals(sizes), totals(np.ones_like(sizes))
    squares = totals(sizes**2) / tokens**2
    scale = np.where(groups > 1, squares / np.maximum(1 - squares, 1e-6), 0)
    student = stdtrit(np.maximum(groups - 1, 1), (1 + CONFIDENCE) / 2)
    student = np.where(groups > 1, student, -1).astype(np.float32)
    return Windows(length, every, per, tokens, scale.astype(np.float32), student)


def _sizes(length: int, every: int) -> np.ndarray:
    """How many queries each group has."""
    return np.minimum(length - np.arange(0, length, every), every).astype(np.float32)
