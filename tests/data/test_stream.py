"""Text files → tokenized datasets without loss → batches with random access by step."""

from __future__ import annotations

import gzip
import json
import lzma

import numpy as np
import pytest
import tokenizers
import zstandard

from tests.train.corpus import documents, token_file
from xsake.data import text
from xsake.data.stream import Stream
from xsake.data.tokenizer import Tokenizer, read_tokenizer
from xsake.data.tokens import TokenDataset, end_token, tokenize, train_tokenizer

COMPRESS = {
    "": lambda x: x,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def lines(texts):
    return "".join(json.dumps({"id": i, "text": x}) + "\n" for i, x in enumerate(texts)).encode()


@pytest.mark.parametrize("extension", COMPRESS)
def test_text_and_json_lines_are_read_from_every_compression(tmp_path, extension):
    texts = ["one é\n\ntwo", "three " * 50_000, "four"]
    for name, content in (("a.txt", texts[0].encode()), ("b.jsonl", lines(texts[1:]))):
        (tmp_path / (name + extension)).write_bytes(COMPRESS[extension](content))
    found = text.documents([tmp_path / ("a.txt" + extension), tmp_path / ("b.jsonl" + extension)])
    assert list(found) == texts


def test_a_zstd_file_of_several_frames_is_read_to_its_end(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(lines(["one"])) + compress(lines(["two"])))
    assert list(text.documents([tmp_path / "a.jsonl.zst"])) == ["one", "two"]


@pytest.mark.parametrize("extension", [".gz", ".xz", ".zst"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, extension):
    rng = np.random.default_rng(0)
    content = lines([str(rng.integers(0, 1 << 60, 20_000))] + [str(x) for x in range(20_000)])
    content = COMPRESS[extension](content)
    path = tmp_path / ("a.jsonl" + extension)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl.* is truncated or damaged"):
        list(text.documents([path]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\nnothing\n', r"line 2 is not JSON"),
        (b'{"body": "a"}\n', r"line 1 has no text field 'text', only \['body'\]"),
        (b"[1]\n", r"line 1 has no text field 'text', only list"),
        (b'{"text": 3}\n', r"line 1: the field 'text' is a int, not text"),
        (b"[" * 100_000, r"line 1 is nested too deeply to be read"),
        (b'{"text": "\xff"}\n', r"not UTF-8"),
    ],
)
def test_an_invalid_line_raises_with_its_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(text.documents([tmp_path / "a.jsonl"]))


def test_a_token_file_decodes_to_its_documents(tmp_path):
    file = token_file(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(file.tokenizer))
    parts = np.split(file.tokens, file.starts[1:].astype(int))
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == documents()
    assert {int(part[-1]) for part in parts} == {file.header.end} == {0}
    assert file.header.dtype == "uint16"
    TokenDataset.open(file.folder, verify=True)


def test_a_trained_tokenizer_prepends_bos_to_every_text(tmp_path):
    """Once, in `encode` and in a tokenized dataset; also when the tokenizer is read back."""
    made = train_tokenizer(documents(), 300, end="an : end")
    made.inner.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (made, end_token(read_tokenizer(tmp_path / "tokenizer.json"), "an : end")):
        for document in documents():
            ids, bare = tokenizer.encode(document), tokenizer.encode(document, special=False)
            assert ids == [tokenizer.bos, *bare]
            assert 0 not in bare
            assert tokenizer.decode(ids) == tokenizer.decode(bare) == document
    file = tokenize(documents(), tokenizer, tmp_path / "text")
    parts = np.split(file.tokens, file.starts[1:].astype(int))
    for document, part in zip(documents(), parts, strict=True):
        assert part.tolist() == [*tokenizer.encode(document), 0]


@pytest.mark.parametrize("unknown", ["w", "<e>"])  # what a word outside the vocabulary becomes
@pytest.mark.parametrize(
    ("template", "written"),
    [(None, "ww<e>"), ("<b> $A", "<b>ww<e>"), ("$A <e>", "ww<e>"), ("<b> $A <e>", "<b>ww<e>")],
)
def test_special_tokens_of_the_tokenizer_are_not_duplicated(tmp_path, template, written, unknown):
    words = {"w": 0, "<b>": 1, "<e>": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if template is not None:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<b>", 1), ("<e>", 2)]
        )
    file = tokenize(["w w", "w w"], Tokenizer(inner, bos=1, eos=(2,)), tmp_path / "text")
    assert "".join(map(inner.id_to_token, file.tokens.tolist())) == written * 2


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    words = {f"w{i}": i for i in range(70_000)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    file = tokenize(["w69999"], Tokenizer(inner), tmp_path / "wide")
    assert (file.header.dtype, file.header.end, file.tokens.tolist()) == ("uint32", None, [69_999])


def test_damaged_token_files_raise_with_the_reason(tmp_path):
    file = token_file(tmp_path)
    tokens = file.folder / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"tokens\.bin has .* it is truncated"):
        TokenDataset.open(file.folder)
    tokens.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(ValueError, match="it is damaged"):
        TokenDataset.open(file.folder, verify=True)
    (file.folder / "header.json").write_text("{")
    with pytest.raises(ValueError, match="not the header of a tokenized dataset"):
        TokenDataset.open(file.folder)
    (file.folder / "header.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no header\.json"):
        TokenDataset.open(file.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([1, 2], "it must hold a JSON object, got list"),
        ({"tokens": "x"}, "it: 'tokens' must be a whole number, got 'x'"),
        ({"sources": 3}, "it: 'sources' must be a list of text, got 3"),
        ({"colour": 3}, "it has 'colour', which this version does not know"),
        ({"documents": 0}, r"says \d+ tokens in 0 documents"),
    ],
)
def test_a_header_of_the_wrong_shape_is_refused(tmp_path, change, message):
    path = bare_file(tmp_path / "a", [[1, 2, 3]], end=2).folder / "header.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | change if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=message):
        TokenDataset.open(tmp_path / "a")


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path):
    """When the dataset is verified, and else when a batch is read."""
    path = bare_file(tmp_path / "a", [[1, 2, 3, 99]], end=2).folder / "header.json"
    path.write_text(path.read_text().replace('"vocab_size": 100', '"vocab_size": 50'))
    with pytest.raises(ValueError, match="has token id 99, but its vocabulary is 50; tokenize ag"):
        TokenDataset.open(tmp_path / "a", verify=True)
    with pytest.raises(ValueError, match="has token id 99, but its vocabulary is 50"):
        Stream([TokenDataset.open(tmp_path / "a")], 4).batch(0, 1)


def test_offsets_that_do_not_rise_are_refused(tmp_path):
    folder = bare_file(tmp_path / "a", [[1, 2, 3], [4, 5]], end=2).folder
    np.array([4, 0], np.uint64).tofile(folder / "starts.bin")
    with pytest.raises(ValueError, match=r"starts.bin does not rise from 0 to below 7"):
        TokenDataset.open(folder)


def test_an_interrupted_tokenize_leaves_no_token_file(tmp_path):
    def texts():
        yield from documents()
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        tokenize(texts(), train_tokenizer(documents(), 300), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    tokenize(documents(), train_tokenizer(documents(), 300), tmp_path / "a")
    with pytest.raises(FileExistsError, match="exists already"):
        tokenize(documents(), train_tokenizer(documents(), 300), tmp_path / "a")


def test_text_without_a_document_raises(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(lines(["", "  \n"]))
    texts = text.documents([tmp_path / "empty.jsonl"])
    with pytest.raises(ValueError, match=r"no document with text was found in \['empty'\]"):
        tokenize(texts, train_tokenizer(documents(), 300), tmp_path / "a", sources=["empty"])


def test_a_missing_end_token_raises_with_its_name():
    with pytest.raises(ValueError, match="no token '<eos>'"):
        end_token(train_tokenizer(documents(), 300), "<eos>")


# ------------------------------------------------------------------------------------------ batches


@pytest.fixture
def files(tmp_path):
    return [token_file(tmp_path, "one"), token_file(tmp_path, "two", seed=1)]


def test_every_epoch_reads_every_window_once_in_another_order(files):
    stream = Stream(files, 32, seed=3)
    orders = []
    for epoch in range(2):
        steps = range(epoch * stream.windows, (epoch + 1) * stream.windows)
        begins = [stream._begin(step) for step in steps]
        assert sorted(np.diff(sorted(begins))) == [32] * (stream.windows - 1)
        assert min(begins) >= 0
        assert max(begins) + 32 < stream.tokens
        orders.append(begins)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("bos", [None, 0])
def test_a_batch_depends_on_seed_and_step_alone(files, bos):
    forward, backward = (Stream(files, 32, seed=3, bos=bos) for _ in range(2))
    ahead = [forward.batch(step, 4) for step in range(70)]
    for step in reversed(range(70)):
        for one, other in zip(ahead[step], backward.batch(step, 4), strict=True):
            np.testing.assert_array_equal(one, other)
    other = Stream(files, 32, seed=4, bos=bos).batch(0, 4)
    assert not np.array_equal(ahead[0].tokens, other.tokens)


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_read_the_batch_of_one_process(files, processes, bos):
    stream = Stream(files, 32, seed=3, bos=bos)
    for step in (0, 5, 40):
        whole = stream.batch(step, 8)
        parts = [stream.batch(step, 8, process, processes) for process in range(processes)]
        for name in whole._fields:
            joined = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole, name))
    with pytest.raises(ValueError, match="7 batch rows are not divisible by 2 processes"):
        stream.batch(0, 7, 0, 2)


def test_targets_are_the_next_tokens_and_count_within_a_document_only(files):
    """Targets are shifted by one, and have no weight across a document boundary."""
    stream = Stream(files, 32)
    everything = np.concatenate([file.tokens for file in files]).astype(int)
    owner = np.zeros(len(everything), int)
    owner[stream.starts] = 1
    owner = np.cumsum(owner)
    begins = [0, 17, len(files[0]) - 9, stream.tokens - 33]
    batch = stream.at(begins)
    for row, begin in enumerate(begins):
        offsets = np.arange(begin, begin + 32)
        np.testing.assert_array_equal(batch.tokens[row], everything[offsets])
        np.testing.assert_array_equal(batch.targets[row], everything[offsets + 1])
        np.testing.assert_array_equal(batch.weights[row], owner[offsets] == owner[offsets + 1])
        np.testing.assert_array_equal(batch.segment_ids[row], owner[offsets] - owner[begin])
    assert 0 < (batch.weights == 0).sum() < 30


def test_without_separate_a_batch_row_is_one_segment(files):
    batch = Stream(files, 32, separate=False).batch(0, 4)
    assert not batch.segment_ids.any()
    assert batch.weights.all()


def test_calibration_windows_lie_within_one_document_if_any_is_long_enough(files):
    stream = Stream(files, 24, seed=1)
    everything = np.concatenate([file.tokens for file in files]).astype(int)
    seen = set()
    for window in stream.long_windows(50, step=7):
        assert 0 not in window[1:-1]  # id 0 is bos and eos: only first or last
        assert any(
            np.array_equal(everything[i : i + 24], window) for i in range(len(everything) - 23)
        )
        seen.add(tuple(window))
    assert len(seen) > 25
    np.testing.assert_array_equal(stream.long_windows(5, 7), stream.long_windows(5, 7))
    assert Stream(files, 2000).long_windows(3, 0).shape == (3, 2000)


def test_evaluation_reads_all_windows_and_pads_the_last_batch_with_weight_0(files):
    stream = Stream(files[:1], 40)
    batches = list(stream.in_order(4))
    assert sum(len(batch.tokens) for batch in batches) == -(-stream.windows // 4) * 4
    joined = np.concatenate([batch.tokens for batch in batches])[: stream.windows].reshape(-1)
    np.testing.assert_array_equal(joined, files[0].tokens[: stream.windows * 40])
    empty = np.concatenate([batch.weights for batch in batches])[stream.windows :]
    assert not empty.any()
    assert sum(len(batch.tokens) for batch in stream.in_order(4, 3)) == 4


# -------------------------------------------------------------------------------------- bos in rows


def bare_file(folder, documents, end):
    """A tokenized dataset of these ids, as a tokenizer without bos writes it."""
    words = {str(i): i for i in range(100)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [" ".join(map(str, ids)) for ids in documents]
    return tokenize(texts, Tokenizer(inner, eos=(end,)), folder)


def test_batch_rows_with_bos_match_the_diagram_in_data_stream(tmp_path):
    file = bare_file(tmp_path / "a", [[1, 10, 11, 12, 13], [1, 20, 21, 22, 23]], end=2)
    stream = Stream([file], 4, bos=1)
    assert stream.windows == 3
    (batch,) = stream.in_order(3)
    assert batch.tokens.tolist() == [[1, 10, 11, 12], [1, 13, 2, 1], [1, 21, 22, 23]]
    assert batch.targets[0, :3].tolist() == [10, 11, 12]
    assert batch.targets[1:].tolist() == [[13, 2, 1, 20], [21, 22, 23, 2]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.weights.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("length", [3, 5, 20, 60])
@pytest.mark.parametrize("separate", [True, False])
def test_every_token_is_a_target_once_if_rows_start_with_bos(tmp_path, length, separate):
    """60 tokens, all distinct except bos and end; windows tile them, shuffled or in order.

    A document's own bos is a target only without `separate`, and not at the start of a row.
    """
    ids = iter(range(10, 100))
    texts = [[1, *(next(ids) for _ in range(size))] for size in (3, 1, 13, 0, 21, 10)]
    stream = Stream([bare_file(tmp_path / "a", texts, end=2)], length, 5, separate, bos=1)
    assert stream.windows * length == stream.tokens == 60
    epoch = [stream.batch(step, 1) for step in range(stream.windows)]
    for batches in (epoch, list(stream.in_order(1))):
        rows, targets = (np.concatenate([x[i] for x in batches]) for i in range(2))
        counts = np.bincount(targets[np.concatenate([x.weights for x in batches]) == 1])
        assert counts[10:].tolist() == [1] * 48
        assert counts[2] == len(texts)
        own = sum(int(start) % length != 0 for start in stream.starts)
        assert counts[1] == (0 if separate else own)
        assert (rows[:, 0] == 1).all()
        assert not (rows[:, 1] == 1).any()


def test_the_inserted_bos_belongs_to_the_first_document_of_its_row(tmp_path):
    """Documents have no bos; windows start inside a document, at a start and at an end token."""
    file = bare_file(tmp_path / "a", [[10, 11, 12], [13, 14, 15], [16, 17]], end=2)
    stream = Stream([file], 4, bos=2)  # bos is the end token, as in GPT-2
    batch = stream.at([0, 3, 4, 6])
    rows = [[2, 10, 11, 12], [2, 2, 13, 14], [2, 13, 14, 15], [2, 15, 2, 16]]
    assert batch.tokens.tolist() == rows
    assert batch.targets.tolist() == [
        [*row[1:], x] for row, x in zip(rows, (2, 15, 2, 17), strict=True)
    ]
    assert batch.segment_ids.tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4, [0, 0, 0, 1]]
    assert batch.weights.tolist() == [[1] * 4, [1, 0, 1, 1], [1] * 4, [1, 1, 0, 1]]


def test_calibration_windows_start_with_bos_and_lie_within_one_document(tmp_path):
    texts = [list(range(10, 40)), list(range(40, 45)), list(range(50, 90))]
    stream = Stream([bare_file(tmp_path / "a", texts, end=2)], 12, bos=1)
    windows = stream.long_windows(50, step=3)
    assert (windows[:, 0] == 1).all()
    possible = [(*text, 2)[i : i + 11] for text in texts for i in range(1, len(text) - 9)]
    assert set(map(tuple, windows[:, 1:].tolist())) <= set(possible)
    whole = Stream(stream.files, stream.tokens, bos=1)  # as long as the text
    assert whole.long_windows(1, 0)[0].tolist() == [1, *stream.files[0].tokens[1:]]


def test_too_few_tokens_for_a_window_raise(files):
    with pytest.raises(ValueError, match="too few for a window of 100,000"):
        Stream(files, 100_000)
    with pytest.raises(ValueError, match="no tokenized datasets"):
        Stream([], 8)
