"""Shades of a heat map in text: dark heads keep more."""

from __future__ import annotations

SHADES = "·░▒▓█"


def shade(share: float) -> str:
    """The mark of a density, 0 to 1, two characters wide."""
    return SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))] * 2


def legend() -> list[str]:
    """What each mark means."""
    step = 1 / len(SHADES)
    return [f"{shade(i * step + step / 2)}<{(i + 1) * step:.1f}" for i in range(len(SHADES))]
