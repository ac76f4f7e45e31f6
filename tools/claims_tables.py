"""The rows of the tables of the earlier XSAKE's claims; `tables` writes them as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]
Cells = tuple[list[str], Iterator[list[str]]]  # head, rows


def speed(report: Record) -> Cells:
    """`claims speed`: a line for each length and form."""
    head = ["B·N·T·H", "form", "blocks, %"]
    timed = [("", "seconds", "over_dense")]
    if "kernel_seconds" in report["rows"][0]:
        timed.append((", kernels", "kernel_seconds", "kernels_over_dense"))
    for what, *_ in timed:
        head += [f"ms{what}", f"÷ dense, jax.nn{what}"]

    def lines() -> Iterator[list[str]]:
        for row in report["rows"]:
            cells = [row["shape"], row["form"], f"{100 * row['density']:.0f}"]
            for _, seconds, ratio in timed:
                cells += [_three_digits(1e3 * row[seconds]), f"{row[ratio]:.2f}"]
            yield [*cells, f"{row['temporary_bytes'] / 2**20:.1f}"]

    return [*head, "temporary MiB"], lines()


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:#.3g}"


def baselines(report: Record) -> Cells:
    """`claims baselines`: a line for each method, in the columns of the earlier page and one more.

    The best attention KL first, and dense attention before it.
    """
    head = ["method", "active blocks, %", "attention ms", "KL vs dense", "perplexity gap, %"]

    def lines() -> Iterator[list[str]]:
        for row in sorted(report["rows"], key=lambda x: x.get("kl", 0.0)):
            time = f"{1e3 * row['seconds']:.0f}"
            if row["method"] == "dense":
                yield ["dense", "100", time, "0", "0"]
                continue
            gap, error = (100 * row[f"perplexity_gap{x}"] for x in ("", "_standard_error"))
            kl = f"{row['kl']:.3f} ± {row['kl_standard_error']:.3f}"
            name, share = row["method"], f"{100 * row['density']:.0f}"
            yield [name, share, time, kl, f"{gap:.2f} ± {error:.2f}"]

    return head, lines()
