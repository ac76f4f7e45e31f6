"""The rows of the tables of training runs and steps; `tables` writes them as Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
Cells = tuple[tuple[str, ...], list[Any]]  # head, rows


def training(records: list[Record]) -> Cells:
    """Training runs: perplexity of every file, and the gap to the first run."""
    lines = []
    for record in records:
        density, name = record["density_ratio"], record.get("attention", "dense")
        if name == "dense":
            attention = "dense" if density == 1 else f"HADS {density:.2f}"
        else:
            attention = f"{name} {density:.2f}"
        cells = [record["run"], attention, record["seed"], f"{record['steps']:,}"]
        for file, value in record["perplexity"].items():
            cells.append(f"{value:.2f} ({record['perplexity_gap'][file]:+.2%})")
        lines.append(cells)
    head = ("run", "attention", "seed", "steps", *records[0]["perplexity"])
    return head, lines


def sparse_training(records: list[Record]) -> Cells:
    """Models trained with dense and sparse attention: loss, speed, overlap of neighbours."""

    def of_layers(overlap: Record | None, key: str) -> str:
        if overlap is None:
            return ""
        ratios = overlap[key]
        return f"{min(ratios):.2f} … {max(ratios):.2f}"

    lines = []
    for record in records:
        overlap = record.get("overlap")
        gap, speed = record["validation_loss_gap_ratio"], record["median_tokens_per_second"]
        lines.append(
            (
                record["attention"],
                f"{record['parameters'] / 1e6:.1f} M",
                f"{record['steps']:,}",
                f"{record['validation_loss_nats']:.4f} ({gap:+.2%})",
                f"{speed:,.0f}",
                of_layers(overlap, "overlap_ratio_by_layer"),
                of_layers(overlap, "free_overlap_ratio_by_layer"),
            )
        )
    overlap = "common blocks of neighbouring tokens, by layer"
    head = ("attention", "parameters", "steps", "validation loss, nats (gap)", "tokens/s")
    return (*head, overlap, "without forced blocks"), lines


def train_step(records: list[Record]) -> Cells:
    """Whole training steps: milliseconds, tokens/s, MFU and peak memory."""
    lines = []
    for record in records:
        if "error" in record:
            lines.append([f"{record['length']:,}", record["variant"], *["failed"] * 4])
            continue
        lines.append(
            [
                f"{record['length']:,}",
                record["variant"],
                f"{1e3 * record['median_seconds']:.1f}",
                f"{record['tokens_per_second']:,.0f}",
                "" if record["mfu_ratio"] is None else f"{record['mfu_ratio']:.1%}",
                "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**30:.1f}",
            ]
        )
    return ("T", "attention", "ms per step", "tokens/s", "MFU", "peak GiB"), lines


def train_profile(records: list[Record]) -> Cells:
    """Kernel time of a training step by class, one column per variant."""
    records = [record for record in records if "class_seconds" in record]
    lines = [
        [name, *(f"{1e3 * record['class_seconds'][name]:.2f}" for record in records)]
        for name in records[0]["class_seconds"]
    ]
    for label, key in (("all kernels", "kernel_seconds"), ("the step", "median_seconds")):
        lines.append([label, *(f"{1e3 * record[key]:.2f}" for record in records)])
    return ("ms", *(f"{record['variant']}, T={record['length']:,}" for record in records)), lines
