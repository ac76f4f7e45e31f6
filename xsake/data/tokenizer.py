"""Text ↔ token ids by the `tokenizers` package, from a tokenizer.json or a GGUF's metadata."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xsake import _files

# Pre-tokenization of Llama 3 and Qwen; they differ in the number of digits per piece.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its bos and eos ids.

    Attributes:
      inner: the `tokenizers.Tokenizer`.
      bos: the first token of a text; `encode` adds it only if the tokenizer is configured to.
      eos: ids that end a text.
    """

    inner: tokenizers.Tokenizer
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # some tokenizer.json files enable the padding and truncation of their training
        self.inner.no_padding()
        self.inner.no_truncation()

    def __len__(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; `special` adds the special tokens around it, such as bos."""
        try:
            return list(self.inner.encode(text, add_special_tokens=special).ids)
        except TypeError:
            if not isinstance(text, str):
                raise TypeError(f"text must be a string, got {type(text).__name__}") from None
            text.encode()  # names the lone surrogate, which is no character
            raise

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless `special`."""
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=not special))

    def pieces(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """Decodes ids as they arrive; incomplete UTF-8 sequences are held back until complete."""
        stream = decoders.DecodeStream(skip_special_tokens=not special)
        for i in ids:
            if (piece := stream.step(self.inner, int(i))) is not None:
                yield piece

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, and the tokenizer_config.json that transformers reads."""
        folder = Path(folder)
        self.inner.save(str(folder / "tokenizer.json"), pretty=False)
        known: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.bos is not None:
            known["bos_token"] = self.inner.id_to_token(self.bos)
        if self.eos:
            known["eos_token"] = self.inner.id_to_token(self.eos[0])
        (folder / "tokenizer_config.json").write_text(json.dumps(known, indent=2) + "\n")


def read_tokenizer(
    path: str | os.PathLike[str], bos: int | None = None, eos: tuple[int, ...] = ()
) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no {path}; name a tokenizer.json with tokenizer=, "
            "or give tokenizer=False to load the model alone"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    return Tokenizer(inner, bos, eos)


# --------------------------------------------------------------------------------------------- GGUF


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


# By tokenizer.ggml.pre: how text is split into words before BPE merges.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _split("{1,3}"),
    "qwen2": lambda: _split(""),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    ),
}


def build_tokenizer(metadata: Mapping[str, Any], path: str) -> Tokenizer:
    """The byte-level BPE that a GGUF's `tokenizer.ggml.*` describes; errors name `path`."""

    def value(key: str, default: Any = None) -> Any:
        return metadata.get("tokenizer.ggml." + key, default)

    kind, pre = value("model"), value("pre")
    if kind is None:
        raise ValueError(
            f"{path} has no tokenizer; name a tokenizer.json with tokenizer=, "
            "or give tokenizer=False to load the model alone"
        )
    if kind != "gpt2":
        raise ValueError(
            f"{path}: tokenizer.ggml.model {kind!r} is not 'gpt2' (byte-level BPE); "
            "name a tokenizer.json with tokenizer="
        )
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not one of {list(PRE_TOKENIZERS)}; "
            "name a tokenizer.json with tokenizer="
        )
    tokens, merges = _vocabulary(value("tokens", []), value("merges", []), path)
    # Llama 3 uses a token directly if the whole word is in its vocabulary
    ignore_merges = pre == "llama-bpe"
    numbered = {token: i for i, token in enumerate(tokens)}
    try:
        inner = tokenizers.Tokenizer(models.BPE(numbered, merges, ignore_merges=ignore_merges))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: tokenizer.ggml.merges do not fit its tokens: {error}") from error
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    sorts = value("token_type", [])
    if not _files.fits(sorts, list[int]):
        raise ValueError(f"{path}: tokenizer.ggml.token_type must be a list of whole numbers")
    for token, sort in zip(tokens, sorts, strict=False):
        if sort in (CONTROL, USER_DEFINED):
            inner.add_tokens([AddedToken(token, special=sort == CONTROL, normalized=False)])
    bos = value("bos_token_id")
    ends = (value("eos_token_id"), value("eot_token_id"))
    for key, number in zip(("bos", "eos", "eot"), (bos, *ends), strict=True):
        if number is not None and not (_files.fits(number, int) and 0 <= number < len(tokens)):
            raise ValueError(
                f"{path}: tokenizer.ggml.{key}_token_id {number!r:.40} must be from 0 to "
                f"{len(tokens) - 1}"
            )
    if bos is not None and value("add_bos_token", pre == "llama-bpe"):
        inner.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", special_tokens=[(tokens[bos], bos)]
        )
    return Tokenizer(inner, bos, tuple(dict.fromkeys(i for i in ends if i is not None)))


def _vocabulary(tokens: Any, merges: Any, path: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens and the pairs that are merged; raises if they are not such lists."""
    if not _files.fits(tokens, list[str]) or not tokens:
        raise ValueError(f"{path}: tokenizer.ggml.tokens must be a list of text, and not empty")
    if not _files.fits(merges, list[str]):
        raise ValueError(f"{path}: tokenizer.ggml.merges must be a list of text")
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ValueError(
                f"{path}: tokenizer.ggml.merges must be two tokens and a space between them, "
                f"got {merge!r:.40}"
            )
        pairs.append((left, right))
    return tokens, pairs
