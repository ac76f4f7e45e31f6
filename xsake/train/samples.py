"""Samples of text while training: the beginning of a text, continued by the current weights.

The same step, weights and seed give the same sample, so a resumed run logs it again.
"""

from __future__ import annotations

from typing import Any

from xsake.data.stream import Stream
from xsake.data.tokenizer import read_tokenizer
from xsake.model import Sampling, generate
from xsake.train.config import Config
from xsake.train.step import transformer

PROMPT_TOKENS = 16
TEMPERATURE = 0.8


class Sampler:
    """Continues the first document of a dataset."""

    def __init__(self, config: Config, stream: Stream) -> None:
        file = stream.files[0]
        self.config = config
        self.tokenizer = read_tokenizer(file.tokenizer)
        first = file.tokens[: int(file.starts[1]) - 1] if len(file.starts) > 1 else file.tokens
        most = min(PROMPT_TOKENS, config.model.context // 2)
        self.prompt = [int(i) for i in first[: max(1, most)]]

    def text(self, weights: Any) -> tuple[str, str]:
        """(the prompt, what the model of these weights continues it with), dense attention."""
        config, prompt = self.config, self.prompt
        (row,) = generate(
            transformer(config, weights),
            [prompt],
            max_tokens=min(config.observe.sample_tokens, config.model.context - len(prompt)),
            sampling=Sampling(temperature=TEMPERATURE, seed=config.seed % 2**32),
        )
        return self.tokenizer.decode(prompt), self.tokenizer.decode(row.tokens)
