import numpy as np
import pytest

from tests.model.families import LLAMA, random_model, random_tokens
from xsake.evaluate.decoding import compare_decoding


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.mark.slow
def test_a_budget_of_all_blocks_gives_the_logits_of_the_full_cache(model):
    tokens = random_tokens(LLAMA, 140)
    said = compare_decoding(model, tokens, 20, 1.0, refresh=8)
    assert abs(float(said.logit_kl)) < 1e-6
    assert abs(float(said.loss - said.dense_loss)) < 1e-5


def test_a_smaller_budget_changes_the_logits(model):
    tokens = random_tokens(LLAMA, 280)
    said = compare_decoding(model, tokens, 20, 2, refresh=8)
    assert float(said.logit_kl) > 1e-4


def test_dense_decoding_is_the_full_pass(model):
    """The loss of tokens fed one by one is that of the same tokens in one pass."""
    tokens = random_tokens(LLAMA, 60)
    said = compare_decoding(model, tokens, 20, 1.0)
    logits = np.asarray(model(tokens[None])[0], np.float64)[-20:-1]
    chosen = logits[np.arange(19), tokens[-19:]]
    loss = (np.log(np.exp(logits).sum(-1)) - chosen).mean()
    assert abs(float(said.dense_loss) - loss) < 1e-4
