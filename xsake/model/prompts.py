"""Prompts and stop tokens: checked before anything runs, and padded to few shapes."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.model.config import Config


def check_prompts(config: Config, prompts: Any, max_tokens: int) -> None:
    """Raises unless a model of this config can continue these prompts by max_tokens tokens."""
    wanted = "prompts must be a list of lists of token ids"
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(
            f"{wanted}, got {type(prompts).__name__}; write [tokenizer.encode(text)] for a text"
        )
    if not len(prompts):
        raise ValueError(f"{wanted}, got none")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__") or np.ndim(prompt) == 0:
            remedy = "encode the text" if isinstance(prompt, str) else "write [prompt] for one"
            raise ValueError(f"{wanted}, but prompt {i} is {prompt!r:.40}; {remedy}")
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; a model needs one token to continue from")
        wrong = [token for token in prompt if not _is_token(config, token)]
        if wrong:
            raise ValueError(
                f"prompt {i} has {wrong[0]!r}, and tokens are the integers 0 … "
                f"{config.vocab_size - 1}; was it made by this model's tokenizer?"
            )
        if len(prompt) >= config.context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which fills the model's context of "
                f"{config.context}; shorten it"
            )
        if len(prompt) + max_tokens > config.context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which with max_tokens = {max_tokens} "
                f"exceeds the model's context of {config.context}; shorten it, or ask for at "
                f"most {config.context - len(prompt)}"
            )


def check_stop(config: Config, stop: Any) -> None:
    """Raises unless `stop` is None or token ids."""
    if stop is None:
        return
    if isinstance(stop, str) or not hasattr(stop, "__len__") or np.ndim(stop) != 1:
        raise ValueError(f"stop must be a list of token ids, got {stop!r:.40}; write stop=[id]")
    for token in stop:
        if not _is_token(config, token):
            raise ValueError(
                f"stop must be token ids from 0 to {config.vocab_size - 1}, got {token!r:.40}"
            )


def _is_token(config: Config, token: Any) -> bool:
    is_whole = isinstance(token, numbers.Integral) and not isinstance(token, bool)
    if isinstance(token, Array):
        is_whole = jnp.issubdtype(token.dtype, jnp.integer)
    return is_whole and bool(0 <= token < config.vocab_size)


def padded_stop(tokens: Sequence[int]) -> np.ndarray:
    """int32, padded with -1 to a multiple of 8, so that another stop token does not recompile."""
    filled = np.full(-(-len(tokens) // 8) * 8 or 8, -1, np.int32)
    filled[: len(tokens)] = tokens
    return filled


def padded(prompts: Sequence[Sequence[int]], length: int) -> Array:
    """int32 [B, length], 0 after the prompts."""
    rows = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(rows)
