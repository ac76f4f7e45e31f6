"""A few documents, a tokenizer and a model small enough to train in a test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from xsake.data import tokens
from xsake.model import Config as Model
from xsake.train.config import Checkpoint, Config, Data, Evaluation, Hads, Run, Schedule

WORDS = "the cat sat on a mat and saw some other dog run far away from its old house".split()


def documents(count: int = 40, seed: int = 0) -> list[str]:
    """Sentences of 3 to 59 random words and a number."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 60, count)
    return [" ".join(draw.choice(WORDS, length)) + f" {i}." for i, length in enumerate(lengths)]


def token_file(folder: Path, name: str = "text", seed: int = 0) -> tokens.TokenDataset:
    texts = documents(seed=seed)
    return tokens.tokenize(texts, tokens.train_tokenizer(documents(), 300), folder / name)


MODEL = Model(
    vocab_size=320,
    context=64,
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    head_size=8,
    mlp_width=16,
    tied=True,
    eos=(0,),
)


def config(folder: Path, *files: tokens.TokenDataset, **changes: Any) -> Config:
    """16 steps; dense for 4, then a new plan every 4 steps; a checkpoint every 3."""
    paths = tuple(str(file.folder) for file in files)
    whole = Config(
        model=MODEL,
        data=Data(train=paths, length=48, rows=2),
        schedule=Schedule(steps=16, warmup_steps=3),
        hads=Hads(density=0.84, warmup_steps=4, every=4, documents=2, block=16),
        evaluation=Evaluation(files=paths[:1], every=8, windows=3, rows=2),
        checkpoint=Checkpoint(every=3, export=False),
        run=Run(folder=str(folder), name="run"),
    )
    return changed(whole, **changes)


def changed(whole: Config, **changes: Any) -> Config:
    """changed(config, run__name="other") returns the config with run.name replaced."""
    for path, value in changes.items():
        group, _, leaf = path.partition("__")
        if leaf:
            value = dataclasses.replace(getattr(whole, group), **{leaf: value})
        whole = dataclasses.replace(whole, **{group: value})
    return whole
