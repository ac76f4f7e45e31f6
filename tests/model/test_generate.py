"""Generation: incremental decoding equals one full pass, and the seed determines the samples."""

import collections
import dataclasses
import functools
import importlib
import io
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers

from tests.draws import FAST_COMPILATION
from tests.model.families import FAMILIES, LLAMA, SOME_FAMILIES, random_model, random_tokens
from xsake import BlockMask, cli, masks
from xsake.block_mask.input_mask import InputMask
from xsake.cli import checkpoints
from xsake.data.tokenizer import Tokenizer
from xsake.decode import CacheReader
from xsake.hads import Plan
from xsake.hads.terms import Terms
from xsake.model import KVCache, Sampling, generate, huggingface, stream
from xsake.model.attend import by_cache
from xsake.model.sampling import sample

# By name, because xsake.model.generate is also the name of a function.
module = importlib.import_module("xsake.model.generate")

ROUNDING = 1e-4  # of float32 logits of size about 10, by another order of operations
SHORT = dataclasses.replace(LLAMA, eos=())
PROMPTS = [[5, 17, 80, 3, 41, 9, 66], [12], [90, 2, 33, 4]]

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILATION)


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """The module's own programs, compiled as tests compile."""
    static = {
        "_burst": ("sampling", "burst"),
        "_first": ("sampling",),
        "_prefill_chunk": ("span",),
        "_prefill_whole": (),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, names in static.items():
            written = getattr(module, name).__wrapped__
            donated = () if name == "_first" else "cache"
            patch.setattr(
                module, name, jit(written, static_argnames=names, donate_argnames=donated)
            )
        yield


@functools.cache
def model(config=SHORT, implementation="reference", **options):
    return random_model(config, implementation=implementation, **options)


def largest(a, b):
    """By NumPy: JAX would compile a program for every shape."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def full_pass(model, tokens):
    return np.asarray(masked_pass(model, tokens, None))


@functools.partial(jit, static_argnames="span")
def step(model, cache, tokens, count, budget=None, *, span):
    """One pass of T new tokens a row through the cache, as in a burst: logits [B, T, vocab]."""
    T = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(T)
    entries = 0 if budget is None else budget.shape[1] * (span // cache.block)
    reader = CacheReader(budget, cache.block, 1, span, entries, queries=T)
    attend = by_cache(model.config, reader, positions, count)
    state = (cache, reader.nothing_chosen(len(tokens)))
    hidden, (cache, _) = model.run(tokens, positions, attend, state)
    return model.logits(hidden), cache.advance(count)


# ----------------------------------------------------------------------------------- one full pass


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_decoding_token_by_token_is_one_full_pass(family):
    """Prompts of unequal lengths are read at once, then every row goes on alone, far past them."""
    made, total = model(FAMILIES[family]), 40
    text = random_tokens(SHORT, (3, total))
    lengths = np.array([25, 1, 12])
    prompts = [row[:n].tolist() for row, n in zip(text, lengths, strict=True)]
    cache = KVCache.empty(made.config, 3, 64, block=16)
    cache, hidden = module.prefill(made, cache, prompts)
    expected = full_pass(made, text)
    rows = np.arange(3)
    assert largest(made.logits(hidden), expected[rows, lengths - 1]) < ROUNDING
    for _ in range(total):
        at = np.asarray(cache.length)
        goes_on = at < total
        if not goes_on.any():
            break
        new = text[rows, np.minimum(at, total - 1)][:, None]
        found, cache = step(made, cache, new, goes_on.astype(np.int32), span=64)
        assert (
            largest(np.asarray(found)[goes_on, 0], expected[rows, at % total][goes_on]) < ROUNDING
        )
    assert list(cache.length) == [total] * 3


@pytest.mark.parametrize("family", ["gpt2", "mixed windows"])
def test_a_prompt_in_chunks_is_one_full_pass(family):
    made = model(FAMILIES[family])
    text = random_tokens(SHORT, (2, 40))
    lengths = np.array([40, 18])
    prompts = [row[:n].tolist() for row, n in zip(text, lengths, strict=True)]
    cache, hidden = module.prefill(made, KVCache.empty(made.config, 2, 64), prompts, chunk=16)
    expected = full_pass(made, text)[np.arange(2), lengths - 1]
    assert list(cache.length) == [40, 18]
    assert largest(made.logits(hidden), expected) < ROUNDING


def test_a_few_tokens_at_a_time_are_one_full_pass():
    """Three new tokens a row, as when a draft is checked; and with all blocks in the budget."""
    made, text = model(), random_tokens(SHORT, (2, 30))
    expected = full_pass(made, text)
    for budget in (None, np.full((2, SHORT.heads), 4, np.int32)):
        cache = KVCache.empty(SHORT, 2, 64, block=16)
        for first in range(0, 30, 3):
            new, count = text[:, first : first + 3], np.full(2, 3, np.int32)
            found, cache = step(made, cache, new, count, budget, span=64)
            assert largest(found, expected[:, first : first + 3]) < ROUNDING


def greedy(made, prompt, count, mask=None):
    """What full passes would say, one token after the other, in rows padded to one length."""
    row = [*prompt, *[0] * 40][:40]
    for at in range(len(prompt), len(prompt) + count):
        logits = np.asarray(masked_pass(made, np.array([row]), mask))
        row[at] = int(logits[0, at - 1].argmax())
    return row[len(prompt) : len(prompt) + count]


masked_pass = jit(lambda model, tokens, mask: model(tokens, mask=mask))


def tokens_of(rows):
    return [row.tokens for row in rows]


def test_greedy_tokens_are_those_of_full_passes():
    expected = [greedy(model(), prompt, 12) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 6  # not one token repeated
    for options in (
        {},
        {"chunk": 4, "burst": 5},
        {"budget": 1.0, "burst": 5},
        {"budget": 1.0, "refresh": 3},
    ):
        found = generate(model(), PROMPTS, max_tokens=12, **options)
        assert tokens_of(found) == expected, options
        assert {row.reason for row in found} == {"length"}
    assert tokens_of(generate(model().unstacked(), PROMPTS, max_tokens=12)) == expected


def test_a_mask_applies_to_prefill_and_a_callable_is_called_per_chunk():
    """A window over the prompt, as a rule and as a callable; in one pass and in chunks."""
    prompts = [random_tokens(SHORT, 30).tolist()]
    window = masks.sliding_window(5, 0)

    def made_now(layer, q, k, first=0):
        rule = masks.at_positions(window, (first + jnp.arange(q.shape[1]))[None])
        return BlockMask.from_rule(rule, (q.shape[1], k.shape[1]))

    chunked = InputMask.of(made_now, chunked=True)
    expected = masked_pass(model(), np.array(prompts), window)[:, -1]
    assert largest(expected, masked_pass(model(), np.array(prompts), None)[:, -1]) > 0.1
    for mask, chunk in ((window, 16), (made_now, 64), (chunked, 16)):
        fresh = KVCache.empty(SHORT, 1, 64)
        _, hidden = module.prefill(model(), fresh, prompts, mask=mask, chunk=chunk)
        assert largest(model().logits(hidden), expected) < ROUNDING
    with pytest.raises(
        ValueError, match="longer than chunk = 16, which needs a mask that accepts `first`"
    ):
        generate(model(), prompts, mask=lambda layer, q, k: None, chunk=16)
    with pytest.raises(TypeError, match=r"mask must be a rule of xsake\.masks or a callable"):
        generate(model(), prompts, mask=BlockMask.from_rule(window, (30, 30)))


@pytest.mark.slow
def test_a_cache_budget_changes_the_tokens():
    """A quarter of the blocks of a sequence of 250 tokens."""
    prompt = [random_tokens(SHORT, 250).tolist()]
    dense, quarter = (
        tokens_of(generate(model(), prompt, max_tokens=8, budget=budget))
        for budget in (None, np.full((2, SHORT.kv_heads), 0.25))
    )
    assert dense[0][0] == quarter[0][0]  # the prompt is read in full
    assert dense != quarter
    # the burst size does not matter if every burst begins with a selection
    again = generate(
        model(), prompt, max_tokens=8, budget=np.full((2, SHORT.kv_heads), 0.25), burst=4
    )
    assert tokens_of(again) == quarter


def test_without_reselection_only_selected_blocks_are_read():
    """NaN in every block that the first token did not select does not change the second."""
    made, span, one = model(), 256, jnp.ones(1, jnp.int32)
    cache = KVCache.empty(SHORT, 1, span, block=16)
    cache, _ = module.prefill(made, cache, [random_tokens(SHORT, 200).tolist()])
    reader = CacheReader(jnp.full((2, SHORT.heads), 4), 16, 8, span, 4 * SHORT.heads)
    decode_step = functools.partial(
        module.decode_step, made, reader, token=jnp.array([3]), count=one
    )
    _, (cache, chosen) = decode_step((cache, reader.nothing_chosen(1)), reselect=True)
    clean, _ = decode_step((cache, chosen), reselect=False)
    read = np.zeros((2, SHORT.kv_heads, span // 16), bool)
    for layer in range(2):
        kv_head = np.asarray(chosen.head[layer, 0]) * SHORT.kv_heads // SHORT.heads
        read[layer, kv_head, chosen.block[layer, 0]] |= np.asarray(chosen.live[layer, 0])
    assert not read[:, :, :12].all()  # of 13 blocks that hold something
    unread = ~np.repeat(read, 16, axis=2)[:, None, ..., None]
    poisoned = dataclasses.replace(
        cache, **{x: jnp.where(unread, jnp.nan, getattr(cache, x)) for x in ("k", "v")}
    )
    found, _ = decode_step((poisoned, chosen), reselect=False)
    assert (found == clean).all()


# ----------------------------------------------------------------------------------------- sampling


HOT = Sampling(temperature=1.3, top_k=30, top_p=0.95, seed=11)


def test_samples_depend_on_the_seed_and_not_on_batch_or_burst():
    expected = generate(model(), PROMPTS, max_tokens=12, sampling=HOT)
    assert generate(model(), PROMPTS, max_tokens=12, sampling=HOT, burst=5) == expected
    assert generate(model(), PROMPTS[:1], max_tokens=12, sampling=HOT) == expected[:1]
    other = dataclasses.replace(HOT, seed=12)
    assert generate(model(), PROMPTS, max_tokens=12, sampling=other) != expected


def test_draws_follow_the_softmax_of_what_is_kept():
    """10,000 draws: each share within 4 standard errors of its probability; nothing else drawn."""
    logits = np.array([2.0, -1.0, 1.5, 0.0, 1.0, -3.0], np.float32)
    draws = 10_000

    def shares(**options):
        rows = jnp.broadcast_to(jnp.asarray(logits), (draws, 6))
        drawn = sample(rows, Sampling(**options), np.uint32(3), jnp.arange(draws))
        return np.bincount(drawn, minlength=6) / draws

    def expected(temperature, kept):
        p = np.exp(logits / temperature)
        p[[i for i in range(6) if i not in kept]] = 0
        return p / p.sum()

    # the softmax is 0.44, 0.27, 0.16, 0.06, 0.02, 0.003 in order: 0.8 is reached by the third
    for options, p in (
        ({"temperature": 1.0}, expected(1.0, range(6))),
        ({"temperature": 2.0, "top_k": 3}, expected(2.0, [0, 2, 4])),
        ({"temperature": 1.0, "top_p": 0.8}, expected(1.0, [0, 2, 4])),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.6}, expected(1.0, [0, 2])),
        ({"temperature": 1.0, "top_p": 1e-6}, expected(1.0, [0])),
    ):
        found = shares(**options)
        assert (np.abs(found - p) <= 4 * np.sqrt(p * (1 - p) / draws)).all(), options
    assert shares(temperature=0.0)[0] == 1


def test_a_stop_token_ends_its_row_and_is_left_out():
    free = tokens_of(generate(model(), PROMPTS, max_tokens=12))
    counts = collections.Counter(free[0])
    token = next(t for t in free[0][2:] if counts[t] == 1)
    stopped = generate(model(), PROMPTS, max_tokens=12, stop=[token])
    for row, all_ in zip(stopped, free, strict=True):
        ends = token in all_
        assert row.tokens == (all_[: all_.index(token)] if ends else all_)
        assert row.reason == ("stop" if ends else "length")
    assert stopped[0].reason == "stop"
    by_config = model(dataclasses.replace(SHORT, eos=(token,)))
    assert generate(by_config, PROMPTS, max_tokens=12) == stopped


def test_a_stream_is_the_whole_in_pieces():
    whole = generate(model(), PROMPTS, max_tokens=12)
    pieces = list(stream(model(), PROMPTS, max_tokens=12, burst=5))
    assert [len(piece[0].tokens) for piece in pieces] == [1, 5, 5, 1]
    for row in range(3):
        joined = [token for piece in pieces for token in piece[row].tokens]
        assert joined == whole[row].tokens
        assert [piece[row].reason for piece in pieces] == [None, None, None, "length"]


def test_another_seed_length_or_stop_does_not_compile_again():
    generate(model(), PROMPTS, max_tokens=12, sampling=HOT, stop=[1])
    before = module._burst._cache_size(), module._prefill_whole._cache_size()
    again = dataclasses.replace(HOT, seed=5)
    generate(model(), [[1], [2, 3, 4], [5, 6]], max_tokens=9, sampling=again, stop=[2, 3, 4])
    after = module._burst._cache_size(), module._prefill_whole._cache_size()
    assert after == before


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompts": []}, "prompts must be a list of lists of token ids"),
        ({"prompts": [[1], []]}, "prompt 1 is empty; a model needs one token"),
        ({"prompts": [[97]]}, r"prompt 0 has 97, and tokens are the integers 0 … 96"),
        ({"prompts": [[1] * 512]}, "has 512 tokens, which fills the model's context of 512"),
        ({"prompts": [[1] * 500]}, "exceeds the model's context of 512; .* at most 12"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"refresh": 0}, "refresh must be at least 1, got 0"),
        ({"budget": 1}, "a budget of 1 blocks is below 2: the first and the current block"),
        ({"budget": 1.5}, "a budget of fractions must be above 0 and at most 1, got 1.5"),
        ({"budget": [0.5] * 3}, r"heads = 4 or 2, got shape \[3\]"),
        ({"prompts": "hello"}, r"lists of token ids, got str; write \[tokenizer.encode\(text\)\]"),
        ({"prompts": 3}, "prompts must be a list of lists of token ids, got int"),
        ({"prompts": [1, 2, 3]}, r"but prompt 0 is 1; write \[prompt\] for one"),
        ({"prompts": np.arange(3)}, r"but prompt 0 is .*0.*; write \[prompt\] for one"),
        ({"prompts": [[1], "hello"]}, "but prompt 1 is 'hello'; encode the text"),
        ({"prompts": [[1, 2.5]]}, r"prompt 0 has 2.5, and tokens are the integers 0 … 96"),
        ({"stop": 2}, r"stop must be a list of token ids, got 2; write stop=\[id\]"),
        ({"stop": 2**40}, "stop must be a list of token ids, got 1099511627776"),
        ({"stop": [2**40]}, "stop must be token ids from 0 to 96, got 1099511627776"),
        ({"stop": [1.5]}, "stop must be token ids from 0 to 96, got 1.5"),
        ({"sampling": {}}, "sampling must be a Sampling or None, got {}; write Sampling"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_runs(call, message):
    given = {"prompts": [[1]], "max_tokens": 16} | call
    with pytest.raises(ValueError, match=message):
        stream(model(), given.pop("prompts"), **given)  # not even begun


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"seed": -1}, "seed must be from 0 to 2³² - 1, got -1"),
    ],
)
def test_bad_sampling_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (Sampling, "top_k", 2.5, "top_k must be a whole number, got 2.5; None keeps all tokens"),
        (Sampling, "seed", 0.5, "seed must be a whole number, got 0.5"),
        (Sampling, "temperature", "hot", "temperature must be 0 or more, got 'hot'"),
        (Sampling, "top_p", "x", "top_p must be above 0 and at most 1, got 'x'"),
        (module.GenerateOptions, "refresh", 2.5, "refresh must be a whole number, got 2.5"),
    ],
)
def test_options_of_another_type_are_refused(kind, name, value, message):
    """Past the types that tests check when a dataclass is made."""
    made = kind()
    object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match=message):
        made.__post_init__()


def test_a_plan_of_another_model_is_refused():
    """By layers and heads in a scanned model and in `generate`, by weights in `generate`."""

    def plan(layers, heads, model_hash=""):
        counts = np.broadcast_to(np.arange(1, 5, dtype=np.int32), (layers, heads, 4))
        return Plan(counts, None, Terms(1.0, "uniform", "mean_query", 16, 64, 0, None, model_hash))

    scanned, tokens = model(), np.zeros((1, 64), np.int32)
    for layers, heads in ((3, 4), (1, 4), (2, 8)):
        for call in (
            lambda mask: jax.eval_shape(lambda: scanned(tokens, mask=mask)),
            lambda mask: stream(scanned, [[1]], mask=mask),
            lambda mask: module.prefill(
                scanned, KVCache.empty(SHORT, 1, 128), [[1] * 65], mask=mask, chunk=64
            ),
        ):
            with pytest.raises(ValueError, match=f"of {layers} layers with {heads} heads, this"):
                call(plan(layers, heads))
    other = plan(2, 4, "0123")
    with pytest.raises(ValueError, match=r"the plan is for model 0123, this is .*for_any_model"):
        stream(scanned, [[1]], mask=other)
    stream(scanned, [[1]], mask=other.for_any_model())
    stream(scanned, [[1]], mask=plan(2, 4, scanned.hash()))


def test_a_prompt_that_the_cache_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="holds 0 of 64 tokens, which leaves no space for 65 more"):
        module.prefill(model(), KVCache.empty(SHORT, 1, 64), [[1] * 65])


# ------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as published ones are, whose words are w0 … w96."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    huggingface.save(folder, model(), Tokenizer(words))
    return folder


def test_the_command_prints_the_text_and_the_speed(checkpoint, capsys):
    prompt = PROMPTS[0]
    [expected] = generate(model(implementation=None), [prompt], max_tokens=12)
    for stream_it in (True, False):
        checkpoints.generate(
            checkpoint, " ".join(f"w{i}" for i in prompt), max_tokens=12, stream=stream_it
        )
        said = capsys.readouterr().out.split("\n", 1)
        assert said[0].split() == [f"w{i}" for i in expected.tokens]
        assert "7 prompt tokens" in said[1]
        assert "12 new tokens" in said[1]
        assert "tokens/s after the first 5" in " ".join(said[1].split())


def test_inspect_prints_the_configuration_and_the_sizes(checkpoint, capsys):
    """A profile beside the weights is no part of them."""
    size = sum(file.stat().st_size for file in checkpoint.glob("model*.safetensors"))
    (checkpoint / "profile.safetensors").write_bytes(b"")
    checkpoints.inspect(checkpoint)
    (checkpoint / "profile.safetensors").unlink()
    said = capsys.readouterr().out
    assert re.search(rf"bytes on disk\W+{size:,}\W", said)
    count = sum(x.size for x in model().parameters().values())
    for line in ("kv_heads", f"{count:,}", "layers.query.kernel", "2 × 32 × 4 × 8", "chosen"):
        assert line in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "nowhere"], "there is no checkpoint nowhere"),
        (["generate", "--model", "nowhere", "--prompt", "x"], "there is no checkpoint nowhere"),
        (
            ["generate", "--model", ".", "--prompt", "x", "--top-p", "2"],
            "top_p must be above 0 and at most 1, got 2.0",
        ),
        (
            ["generate", "--model", ".", "--prompt", os.fsdecode(b"a\xff")],
            "--prompt is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 1",
        ),
        (
            ["generate", "--model", ".", "--prompt", "-"],
            "standard input is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 2",
        ),
    ],
)
def test_a_command_that_cannot_run_says_so_and_fails(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["xsake", *words])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().out.replace("\n", " ").startswith(f"xsake: {message}")
