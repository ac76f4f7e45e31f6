"""Warm start: the initial weights are those of a checkpoint, `--init PATH`.

init ─┬─ examine ─ its config must be `model`; context, bos and eos may differ
      ├─ its tokenizer must be that of the text
      └─ gather ─ parameters, float32
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jax import Array

from xsake import shipped
from xsake.data.tokenizer import read_tokenizer
from xsake.data.tokens import TokenDataset
from xsake.model import Config as Model
from xsake.model import Transformer, huggingface, weights
from xsake.train.config import Config
from xsake.train.folder import differences

FREE = ("context", "bos", "eos")  # settings of a model that do not change its weights


def checkpoint_path(init: str) -> Path:
    """The folder or file that `init` names: a checkpoint, a run, or "shipped"."""
    path = Path(init)
    if init == "shipped" and not path.exists():
        return Path(shipped.FOLDER)
    is_run = (path / "events.jsonl").is_file() and (path / "model" / "config.json").is_file()
    return path / "model" if is_run else path


def configured(config: Config, init: str) -> Config:
    """A config that starts from this checkpoint: its model, and sequences within its context."""
    model = huggingface.examine(checkpoint_path(init)).config
    data = dataclasses.replace(config.data, length=min(config.data.length, model.context))
    return dataclasses.replace(config, init=init, model=model, data=data)


def load(config: Config, file: TokenDataset) -> tuple[dict[str, Array], str]:
    """(parameters of config.init, float32; their hash); raises if they do not fit the config."""
    assert config.init is not None
    path = checkpoint_path(config.init)
    opened = huggingface.examine(path)
    _check_model(config, opened.config)
    _check_tokenizer(path, opened, file)
    parameters = weights.gather(opened.config, opened.entries, opened.source, "float32")
    # the hash that the checkpoint's profiles and plans record
    return parameters, Transformer.of(opened.config, parameters).hash()


def _check_model(config: Config, found: Model) -> None:
    free: dict[str, Any] = {name: getattr(config.model, name) for name in FREE}
    if found.positions == "learned":
        free["context"] = found.context  # as many positions as there are rows
    wanted = found.to_dict() | free
    if changes := differences(wanted, config.model.to_dict()):
        raise ValueError(
            f"init {config.init} is another model than the settings describe "
            f"({'; '.join('model.' + x for x in changes)}); leave out the model's settings"
        )


def _check_tokenizer(path: Path, opened: huggingface.Checkpoint, file: TokenDataset) -> None:
    """The text must be in the tokens of the checkpoint, if that has a vocabulary."""
    if opened.metadata is not None:
        tokens = opened.metadata.get("tokenizer.ggml.tokens")
        known = {token: i for i, token in enumerate(tokens)} if tokens else None
    else:
        has_tokenizer = (path / "tokenizer.json").is_file()
        known = opened.tokenizer().inner.get_vocab() if has_tokenizer else None
    if known is None:
        return  # weights alone: the caller vouches for the text
    for token, number in read_tokenizer(file.tokenizer).inner.get_vocab().items():
        if known.get(token) != number:
            raise ValueError(
                f"{file.folder} was tokenized with another tokenizer than that of {path} "
                f"({token!r} is {number} there, {known.get(token)} here); tokenize the text again "
                "with --tokenizer and the model's own tokenizer.json"
            )
