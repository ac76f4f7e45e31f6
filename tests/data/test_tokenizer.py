"""Text to ids and back, by tokenizer.json and by GGUF metadata, whole and streamed."""

from __future__ import annotations

import json

import pytest

from tests.model.checkpoints import BYTES, FIXTURES
from xsake.data.tokenizer import PRE_TOKENIZERS, Tokenizer, build_tokenizer, read_tokenizer

TEXTS = [
    "it was the best of times, it was the worst of times",
    "1234567890 and 3.14159, ٣ and ½",
    "naïve café — “quoted” 日本語 🙂🏽 e\u0301",
    "  two  spaces\tand tabs\r\n\r\n\n   lines   \n",
    "I'll, I'LL, they've DON'T",
    "",
]


def metadata(pre: str, **values: object) -> dict[str, object]:
    """The bytes, a few merges, and two special tokens at the end."""
    merges = ["t h", "th e", "Ġ the", "1 2", "12 3"]
    tokens = [*BYTES, *(pair.replace(" ", "") for pair in merges), "<|begin|>", "<|end|>"]
    known = dict(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        merges=merges,
        token_type=[1] * (len(tokens) - 2) + [3, 3],
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
    )
    return {f"tokenizer.ggml.{key}": value for key, value in (known | values).items()}


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    return read_tokenizer(FIXTURES / "gpt2" / "tokenizer.json", bos=0, eos=(0,))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", [None, *PRE_TOKENIZERS])
def test_text_survives_the_round_trip(text, pre, published):
    tokenizer = build_tokenizer(metadata(pre), "x.gguf") if pre else published
    ids = tokenizer.encode(text, special=False)
    composed = text.replace("e\u0301", "é") if pre == "qwen2" else text  # Qwen composes first
    assert tokenizer.decode(ids) == composed
    assert "".join(tokenizer.pieces(ids)) == composed


# By each published pattern, worked out by hand.
@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " now", "!", "\n\n ", " end"]),
        ("smollm", ["I", "'", "LL", " pay", " ", *"12345", " now", "!", "\n\n ", " end"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " now", "!\n\n", " ", " end"]),
        ("qwen2", ["I", "'LL", " pay", " ", *"12345", " now", "!\n\n", " ", " end"]),
    ],
)
def test_words_are_split_as_published(pre, split):
    tokenizer = build_tokenizer(metadata(pre), "x.gguf")
    assert words(tokenizer, "I'LL pay 12345 now!\n\n  end") == split


def test_a_gguf_and_a_tokenizer_json_of_one_vocabulary_agree(published):
    model = json.loads(published.inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    types = [3] + [1] * (len(tokens) - 1)
    built = build_tokenizer(
        metadata("gpt-2", tokens=tokens, merges=merges, token_type=types), "x.gguf"
    )
    assert merges
    for text in [*TEXTS, "<|endoftext|>it was"]:
        assert built.encode(text, special=False) == published.encode(text)


def test_merges_are_applied_within_words():
    tokenizer = build_tokenizer(metadata("gpt-2"), "x.gguf")
    named = [tokenizer.inner.id_to_token(i) for i in tokenizer.encode("the the 123")]
    assert named == ["the", "Ġthe", "Ġ", "123"]
    digits = build_tokenizer(metadata("qwen2"), "x.gguf")
    assert len(digits.encode("123")) == 3  # cut apart before they could merge


def test_special_tokens_are_one_id_and_skipped_by_decode():
    tokenizer = build_tokenizer(metadata("smollm"), "x.gguf")
    ids = tokenizer.encode("a<|end|>b")
    assert ids[1] == tokenizer.eos[0]
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, special=True) == "a<|end|>b"


def test_what_is_no_text_is_refused_in_words(as_users_call_it):
    tokenizer = build_tokenizer(metadata("smollm"), "x.gguf")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("a\udc80b")
    with pytest.raises(TypeError, match="text must be a string, got bytes"):
        tokenizer.encode(b"ab")


@pytest.mark.parametrize(
    ("pre", "add_bos", "starts_with_bos"),
    [("llama-bpe", None, True), ("gpt-2", None, False), ("gpt-2", True, True)],
)
def test_bos_is_added_if_the_file_says_so(pre, add_bos, starts_with_bos):
    values = {} if add_bos is None else dict(add_bos_token=add_bos)
    tokenizer = build_tokenizer(metadata(pre, **values), "x.gguf")
    assert (tokenizer.encode("a")[0] == tokenizer.bos) == starts_with_bos
    assert tokenizer.encode("a", special=False)[0] != tokenizer.bos


def test_llama_3_uses_a_whole_word_before_any_merge():
    values = metadata("llama-bpe")
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "zebra"]
    tokenizer = build_tokenizer(values, "x.gguf")
    assert len(tokenizer.encode("zebra", special=False)) == 1
    assert len(build_tokenizer(values | {"tokenizer.ggml.pre": "qwen2"}, "x").encode("zebra")) == 5


def test_streamed_decoding_holds_back_incomplete_characters(published):
    """The bytes of this character are several tokens; no piece holds a part of it."""
    ids = published.encode("🙂!")
    assert len(ids) == 5
    assert list(published.pieces(ids)) == ["🙂", "!"]


def test_padding_and_truncation_of_training_are_dropped(tmp_path, published):
    saved = json.loads(published.inner.to_str())
    saved["truncation"] = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    text = "the worst of times"
    assert read_tokenizer(tmp_path / "tokenizer.json").encode(text) == published.encode(text)
    assert len(published.encode(text)) > 2
