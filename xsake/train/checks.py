"""What a training config must satisfy, checked when one is made; errors name the setting."""

from __future__ import annotations

from typing import Any

from xsake.backends import choice
from xsake.hads import budget, row_blocks
from xsake.hads.statistics import SELECTORS


def check(config: Any) -> None:
    """Raises ValueError if a setting of a `Config` is out of range or does not fit another one."""
    _check_ranges(config)
    _check_choices(config)
    data, hads, optimizer = config.data, config.hads, config.optimizer
    if data.rows % optimizer.accumulate:
        raise ValueError(
            f"data.rows = {data.rows} is not a multiple of optimizer.accumulate = "
            f"{optimizer.accumulate}, the number of micro-batches; change one of them"
        )
    if config.schedule.warmup_steps > config.schedule.steps:
        raise ValueError(
            f"schedule.warmup_steps = {config.schedule.warmup_steps} is more than "
            f"schedule.steps = {config.schedule.steps}; lower it"
        )
    if data.length > config.model.context:
        raise ValueError(
            f"data.length = {data.length} is more than model.context = {config.model.context}; "
            "raise the context"
        )
    if data.bos and config.model.bos is None:
        raise ValueError(
            "data.bos begins every sequence with model.bos, which is None; set model.bos to the id "
            "of a token, or data.bos to False"
        )
    _check_sparse(config)
    _check_name(config.run.name)
    if hads.density is not None:
        _check_density(config, "density")
        if hads.ramp_steps:
            _check_density(config, "from_density")


def _check_density(config: Any, name: str) -> None:
    """Raises if plans of hads.density, or of the density that the ramp begins with, are too small.

    The densities between them are between two that are allowed.
    """
    hads = config.hads
    blocks = row_blocks.count_blocks(config.data.length, hads.block)
    heads = config.model.layers * config.model.heads
    try:
        row_blocks.blocks_of_density(getattr(hads, name), blocks, heads, hads.band)
    except ValueError as error:
        raise ValueError(f"{error} (hads.{name}, hads.block = {hads.block})") from None


def _check_name(name: str) -> None:
    """Raises unless run.name is one folder inside run.folder, which `run.restart` may clear."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(
            f"run.name names a folder inside run.folder, got {name!r}; give a name without '/' "
            "that is not empty"
        )


def _check_sparse(config: Any) -> None:
    attention = config.model.attention
    if config.model.is_sparse and config.hads.density is not None:
        raise ValueError(
            f"hads.density = {config.hads.density} plans dense attention, but model.attention is "
            f"{attention!r}, which selects its own blocks; leave one of them out"
        )
    if config.model.is_sparse and config.observe.heads_every:
        raise ValueError(
            f"observe.heads_every = {config.observe.heads_every} observes dense attention, but "
            f"model.attention is {attention!r}, which selects its own blocks; leave it out"
        )
    if attention != "msa" and config.index_loss != type(config).index_loss:
        raise ValueError(
            f"index_loss = {config.index_loss} is the weight of the indexer's loss, which "
            f"model.attention = {attention!r} does not have; leave it out"
        )


def _check_ranges(config: Any) -> None:
    optimizer, hads = config.optimizer, config.hads
    at_least_one = {
        "data.length": config.data.length,
        "data.rows": config.data.rows,
        "optimizer.accumulate": optimizer.accumulate,
        "schedule.steps": config.schedule.steps,
        "hads.every": hads.every,
        "hads.documents": hads.documents,
        "hads.block": hads.block,
        "evaluation.every": config.evaluation.every,
        "evaluation.rows": config.evaluation.rows,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep": config.checkpoint.keep,
        "observe.every": config.observe.every,
        "observe.sample_tokens": config.observe.sample_tokens,
        "run.bad_steps": config.run.bad_steps,
    }
    for name, count in at_least_one.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    not_negative = {
        "seed": config.seed,
        "evaluation.windows": config.evaluation.windows,
        "checkpoint.best": config.checkpoint.best,
        "run.seconds": config.run.seconds,
        "run.stop_at": config.run.stop_at,
        "compute.loss_tokens": config.compute.loss_tokens,
        "hads.band": hads.band,
        "schedule.final_ratio": config.schedule.final_ratio,
        "observe.sample_every": config.observe.sample_every,
        "observe.heads_every": config.observe.heads_every,
        "hads.warmup_steps": hads.warmup_steps,
        "hads.ramp_steps": hads.ramp_steps,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
        "optimizer.learning_rate": optimizer.learning_rate,
        "index_loss": config.index_loss,
    }
    for name, size in not_negative.items():
        if not size >= 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    config.mesh.check()
    for name in ("beta1", "beta2", "ema_decay"):
        if not 0 <= (decay := getattr(optimizer, name)) < 1:
            raise ValueError(f"optimizer.{name} must be at least 0 and below 1, got {decay}")


def _check_choices(config: Any) -> None:
    for name, chosen, choices in (
        ("compute.dtype", config.compute.dtype, ("float32", "bfloat16", "float16")),
        ("checkpoint.export_dtype", config.checkpoint.export_dtype, ("float32", "bfloat16")),
        ("hads.policy", config.hads.policy, tuple(x for x in budget.POLICIES if x != "loss")),
        ("hads.selector", config.hads.selector, SELECTORS),
    ):
        if chosen not in choices:
            raise ValueError(f"{name} {chosen!r} is not one of {list(choices)}")
    try:
        choice.check_name(config.compute.implementation)
    except ValueError as error:
        raise ValueError(f"compute.{error}") from None
