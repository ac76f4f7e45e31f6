"""The model that a command observes, and the documents that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from xsake.cli.model_path import checkpoint
from xsake.parallel.mesh import MeshSizes

if TYPE_CHECKING:
    from xsake.model import Config
    from xsake.model.observer import Observer

Dtype = Literal["float32", "bfloat16"]
LENGTH = 8192  # of calibration documents, unless the model's context is shorter


@dataclasses.dataclass(frozen=True)
class ModelAndText:
    """The model of a command, and its tokenizer's encode unless the documents are tokenized."""

    observer: Observer
    config: Config
    encode: Callable[[str], Sequence[int]] | None

    @staticmethod
    def load(
        model: Path,
        dtype: str,
        implementation: str | None,
        text: list[Path],
        mesh: MeshSizes,
        length: int | None,
    ) -> ModelAndText:
        """Loads the model; the tokenizer only if there is text to encode."""
        from xsake.model import huggingface
        from xsake.model.observer import Observer
        from xsake.model.on_mesh import mesh_for_text

        for file in text:
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}")
        is_tokenized = text[0].suffix == ".npy"
        path = checkpoint(model)
        config = huggingface.examine(path).config
        loaded = huggingface.load(
            path,
            dtype=dtype,
            tokenizer=not is_tokenized,
            implementation=implementation,
            mesh=mesh_for_text(config, mesh, length or min(LENGTH, config.context)),
        )
        encode = None if loaded.tokenizer is None else loaded.tokenizer.encode
        return ModelAndText(Observer(loaded.model), loaded.config, encode)

    def documents(self, text: list[Path], length: int, count: int, seed: int) -> list[np.ndarray]:
        """Documents of `length` tokens; raises for what the model cannot read."""
        from xsake.data.documents import load_documents

        if length > self.config.context:
            raise ValueError(
                f"documents of {length:,} tokens exceed the model's context of "
                f"{self.config.context:,}; give --length {self.config.context} or less"
            )
        found = load_documents(text, self.encode, length, count, seed)
        for document in found:
            if document.min() < 0 or document.max() >= self.config.vocab_size:
                wrong = document.min() if document.min() < 0 else document.max()
                raise ValueError(
                    f"{text[0]} has the token id {wrong}, outside 0 … {self.config.vocab_size - 1} "
                    "of the model's vocabulary; was it made by this model's tokenizer?"
                )
        return found


def size_of(tokens: list[np.ndarray]) -> str:
    """How many documents there are, and of how many tokens, in words."""
    return f"{len(tokens)} document{'s' * (len(tokens) > 1)} of {len(tokens[0]):,} tokens"
