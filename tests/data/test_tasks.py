import numpy as np
import pytest

from xsake.data import tasks

BOS = 1000


def encode(text):
    """A character is a token; a text begins with BOS."""
    return [BOS, *map(ord, text)]


def decode(ids):
    return "".join(chr(x) for x in ids if x != BOS)


TEXT = "It was a dark night. The rain fell in torrents! Was it late? " * 40
FILLERS = [np.asarray(encode(TEXT)[: 2000 + i], np.int32) for i in range(10)]


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_a_prompt_has_its_length_and_ends_with_its_answer(family):
    prompts = tasks.make_prompts(family, encode, FILLERS, 1500, 10)
    for i, prompt in enumerate(prompts):
        assert prompt.tokens.shape == (1500,)
        assert prompt.tokens[0] == BOS
        assert (prompt.tokens[1:] != BOS).all()
        assert prompt.depth == tasks.DEPTHS[i % 5]
        assert abs(prompt.needle / 1500 - prompt.depth) < 0.3  # a third is not filler
        assert 0 < prompt.answer <= 32
    assert len({decode(x.tokens[-x.answer :]) for x in prompts}) > 5


def test_the_answer_is_what_the_needle_says():
    for prompt in tasks.make_prompts("passkey", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), decode(prompt.tokens[-prompt.answer :])
        assert decode(prompt.tokens[prompt.needle :]).startswith(f"\n\nThe pass key is{answer}. ")
        assert text.endswith(f"\n\nThe pass key is{answer}")
        assert text[prompt.needle - 2] in ".!?"  # after a sentence; BOS has no character
    for prompt in tasks.make_prompts("lookup", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), decode(prompt.tokens[-prompt.answer :])
        name = text[: -len(answer)].rsplit("\n", 1)[1]
        assert text.count(f"\n{name}{answer}\n") == 1
    for prompt in tasks.make_prompts("needles", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), decode(prompt.tokens[-prompt.answer :])
        name = text[: -len(answer)].rsplit(" of the ", 1)[1]
        assert decode(prompt.tokens[prompt.needle :]).startswith(
            f" The special number of the {name}{answer}."
        )
        assert text.count(" The special number of the ") == 4
    for prompt in tasks.make_prompts("common_words", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), decode(prompt.tokens[-prompt.answer :])
        assert text.split("Words:")[1].split(".")[0].count(answer) == 32


def test_variables_are_assigned_in_order():
    for prompt in tasks.make_prompts("variables", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), decode(prompt.tokens[-prompt.answer :])
        second, first = text[: -len(answer)].rsplit("let ", 1)[1].removesuffix(" =").split(" = ")
        assert 0 < text.index(f"{first} ={answer};\n") < text.index(f"{second} = {first};\n")
        assert text.count(" =") == 5


def test_copying_goes_on_as_the_passage_does():
    for prompt in tasks.make_prompts("copy", encode, FILLERS, 900, 5):
        text, answer = decode(prompt.tokens), prompt.answer
        passage = decode(prompt.tokens[prompt.needle :])[2 : 2 + tasks.GIVEN + tasks.COPIED]
        assert text.endswith("\n\n" + passage)
        assert text.count("\n\n" + passage) >= 3
        assert answer == tasks.COPIED


def test_prompts_depend_on_their_seed_only():
    first, again, other = (
        tasks.make_prompts("needles", encode, FILLERS, 600, 4, seed) for seed in (3, 3, 4)
    )
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, again, strict=True))
    assert any((a.tokens != b.tokens).any() for a, b in zip(first, other, strict=True))


def test_every_length_and_family_uses_the_same_filler():
    """Prompts of one number differ in their needles only, so that families are compared fairly."""
    short, long = (tasks.make_prompts("passkey", encode, FILLERS, x, 3)[2] for x in (400, 800))
    before = min(short.needle, long.needle)
    assert (short.tokens[:before] == long.tokens[:before]).all()


def test_wrong_prompts_are_refused():
    with pytest.raises(ValueError, match="family 'nope' is not one of"):
        tasks.make_prompts("nope", encode, FILLERS, 600, 4)
    with pytest.raises(ValueError, match=r"11 prompts of 600 tokens need as many filler texts"):
        tasks.make_prompts("passkey", encode, FILLERS, 600, 11)
    with pytest.raises(ValueError, match=r"got 10 of 2,000 tokens or more"):
        tasks.make_prompts("passkey", encode, FILLERS, 2001, 4)
    with pytest.raises(ValueError, match=r"prompts of 70 tokens are too short for the family"):
        tasks.make_prompts("passkey", encode, FILLERS, 70, 4)


def test_calibration_text_asks_all_over():
    """Every question's answer was stated before, and questions are near and far."""
    (found, *_), again = (tasks.recall_documents(encode, FILLERS[:2], 1900) for _ in range(2))
    assert found.shape == (1900,)
    assert (found == again[0]).all()
    text = decode(found)
    asked = [x.split("?") for x in text.split("What is the pass key of the ")[1:-1]]
    away = []
    for name, answer, *_ in asked:
        key = answer.removeprefix(" It is ").split(".")[0]
        stated = f" The pass key of the {name} is {key}."
        assert stated in text
        away.append(text.index(f"{name}? It is {key}") - text.index(stated))
    assert min(away) > 0
    assert len(asked) > 3
