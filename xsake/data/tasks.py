"""Long-context tasks: prompts with a known answer, made from a seed and filler text.

    filler … needle … filler … question answer      exactly `length` tokens
             ↑ after `depth` of the filler  ↑ the last prompt.answer tokens

    family        needles                              answer
    passkey       one five-digit pass key              the key
    needles       the numbers of three words           the number of one of them
    lookup        one list of words and numbers        the number of one of them
    variables     X = number; Y = X; and another       the number of Y
    common_words  one list in which a word recurs      that word
    copy          a passage of another text, twice     how it goes on after its first words

The families are those of RULER, smaller. `recall_documents` makes calibration text of another form:
facts and questions about them all over a document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # share of the filler before the needle; prompts alternate
COPIED, GIVEN = 6, 32  # tokens of a passage: the answer's, and those before it in the question

Ids = list[int]
Encode = Callable[[str], Sequence[int]]

# Names of things; most are one token of most tokenizers.
WORDS = tuple(
    "apple river candle garden silver window ladder pepper anchor basket bridge button camera "
    "castle cherry copper cotton dragon engine feather finger forest guitar hammer harbor island "
    "jacket jungle kettle kitten lantern lemon marble market meadow mirror monkey office orange "
    "paper parrot pencil piano pillow planet pocket potato rabbit ribbon rocket saddle salmon "
    "shadow spider sugar table temple thunder ticket tiger tunnel turtle valley violin".split()
)
QUALITIES = tuple(
    "amber bitter bright broken clever crimson distant early empty gentle golden hidden hollow "
    "humble little lonely modern narrow purple quiet rapid silent simple sudden warm yellow".split()
)


class Prompt(NamedTuple):
    """Token ids that end with the answer."""

    tokens: Int[np.ndarray, " T"]
    answer: int  # how many of the last tokens are the answer
    depth: float  # share of the filler before the needle that holds the answer
    needle: int  # index of that needle's first token


@dataclasses.dataclass(frozen=True)
class Task:
    """What a prompt adds to its filler."""

    needles: list[Ids]  # the first holds the answer, or the beginning of the chain to it
    question: Ids
    answer: Ids
    in_order: bool = False  # the other needles come after the first, in this order


@dataclasses.dataclass(frozen=True)
class Source:
    """What a family makes needles of."""

    encode: Callable[[str], Ids]  # without the tokens that a tokenizer puts before a text
    passage: Callable[[np.random.Generator, int], Ids]  # so many tokens of another text


Family = Callable[[np.random.Generator, Source], Task]


# ----------------------------------------------------------------------------------------- families


def passkey(rng: np.random.Generator, source: Source) -> Task:
    """One pass key, stated twice."""
    key = _number(rng)
    return Task(
        [source.encode(f"\n\nThe pass key is {key}. Remember it. The pass key is {key}.\n\n")],
        source.encode("\n\nThe pass key is"),
        source.encode(f" {key}"),
    )


def needles(rng: np.random.Generator, source: Source) -> Task:
    """Numbers of three words at different depths, each stated twice; one of them is asked for."""
    names = _choose(rng, WORDS, 3)
    numbers = [_number(rng, 4) for _ in names]
    stated = [
        f"special number of the {name} is {number}"
        for name, number in zip(names, numbers, strict=True)
    ]
    return Task(
        [source.encode(f" The {each}. Remember it: the {each}.") for each in stated],
        source.encode(
            f"\n\nWhat is the special number of the {names[0]}? "
            f"The special number of the {names[0]} is"
        ),
        source.encode(f" {numbers[0]}"),
    )


def lookup(rng: np.random.Generator, source: Source) -> Task:
    """A list of eight words and their numbers; the number of one word is asked for."""
    names = _choose(rng, WORDS, 8)
    numbers = [_number(rng, 4) for _ in names]
    lines = [f"{name} -> {number}" for name, number in zip(names, numbers, strict=True)]
    asked = int(rng.integers(len(names)))
    return Task(
        [source.encode("\n\nRecords\n" + "\n".join(lines) + "\n\n")],
        source.encode(f"\n\nRecords\n{names[asked]} ->"),
        source.encode(f" {numbers[asked]}"),
    )


def variables(rng: np.random.Generator, source: Source) -> Task:
    """Assignments at different depths, Y = X after X = number; the question spells out Y = X."""
    first, second, other = _choose(rng, WORDS, 3)
    number = _number(rng, 4)
    values = ((first, number), (second, first), (other, _number(rng, 4)))
    return Task(
        [source.encode(f"\n\nlet {name} = {value};\n\n") for name, value in values],
        source.encode(f"\n\nlet {second} = {first} ="),
        source.encode(f" {number}"),
        in_order=True,
    )


def common_words(rng: np.random.Generator, source: Source) -> Task:
    """A list in which one word occurs 32 times and eight others once; then a new list begins."""
    common, *others = _choose(rng, WORDS, 9)
    listed = [*others, *[common] * 32]
    rng.shuffle(listed)
    return Task(
        [source.encode("\n\nWords: " + ", ".join(listed) + ".\n\n")],
        source.encode("\n\nWords:"),
        source.encode(f" {common}"),
    )


def copy(rng: np.random.Generator, source: Source) -> Task:
    """A passage of another text, twice; its first tokens are given again."""
    whole = source.passage(rng, GIVEN + COPIED)
    paragraph = source.encode("\n\n")
    needle = [*paragraph, *whole, *paragraph]
    return Task([needle, needle], paragraph + whole[:GIVEN], whole[GIVEN:])


FAMILIES: dict[str, Family] = {
    "passkey": passkey,
    "needles": needles,
    "lookup": lookup,
    "variables": variables,
    "common_words": common_words,
    "copy": copy,
}


def _number(rng: np.random.Generator, digits: int = 5) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _choose(rng: np.random.Generator, names: Sequence[str], count: int) -> list[str]:
    return [names[i] for i in rng.permutation(len(names))[:count]]


# ------------------------------------------------------------------------------------------ prompts


def make_prompts(
    family: str,
    encode: Encode,
    fillers: Sequence[Int[np.ndarray, " _"]],
    length: int,
    count: int,
    seed: int = 0,
) -> list[Prompt]:
    """`count` prompts of one family, each of exactly `length` tokens.

    Args:
      family: one of `FAMILIES`.
      encode: of the model's tokenizer; the tokens that it puts before a text begin every prompt.
      fillers: token ids of texts, each of at least `length`; prompt i uses text i, so that prompts
        of other families and lengths share it. `copy` takes its passage from another one.
      length: of every prompt.
      count: at most as many as there are fillers.
      seed: of the needles and where they are.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {list(FAMILIES)}")
    if not 0 < count <= len(fillers) or min(len(x) for x in fillers) < length:
        raise ValueError(
            f"{count} prompts of {length:,} tokens need as many filler texts of that length, got "
            f"{len(fillers)} of {min((len(x) for x in fillers), default=0):,} tokens or more"
        )
    number = list(FAMILIES).index(family)
    return [
        _prompt(family, encode, fillers, i, length, np.random.default_rng((seed, number, i)))
        for i in range(count)
    ]


def _prompt(
    family: str,
    encode: Encode,
    fillers: Sequence[np.ndarray],
    number: int,
    length: int,
    rng: np.random.Generator,
) -> Prompt:
    prefix, bare = list(encode("")), without_prefix(encode)

    def passage(rng: np.random.Generator, count: int) -> Ids:
        other = fillers[(number + 1) % len(fillers)]
        begin = int(rng.integers(len(other) // 2, max(len(other) - count, len(other) // 2 + 1)))
        return [int(x) for x in other[begin : begin + count]]

    task = FAMILIES[family](rng, Source(bare, passage))
    added = sum(map(len, task.needles)) + len(task.question) + len(task.answer) + len(prefix)
    room = length - added
    if room < len(task.needles):
        raise ValueError(
            f"prompts of {length:,} tokens are too short for the family {family!r}, which adds "
            f"{added} tokens to its filler; use longer ones"
        )
    filler = np.asarray(fillers[number])
    filler = filler[len(prefix) if list(filler[: len(prefix)]) == prefix else 0 :][:room]
    depth = DEPTHS[number % len(DEPTHS)]
    low = depth if task.in_order else 0.0
    others = rng.uniform(low, 1.0, len(task.needles) - 1)
    depths = [depth, *(np.sort(others) if task.in_order else others)]
    ends = sentence_ends(filler, bare)
    places = [_place(ends, share, room) for share in depths]
    tokens, done, first = list(prefix), 0, 0
    for i in sorted(range(len(places)), key=lambda i: (places[i], i)):
        tokens += [int(x) for x in filler[done : places[i]]]
        done = places[i]
        if i == 0:
            first = len(tokens)
        tokens += task.needles[i]
    tokens += [*(int(x) for x in filler[done:]), *task.question, *task.answer]
    return Prompt(np.asarray(tokens, np.int32), len(task.answer), depth, first)


def without_prefix(encode: Encode) -> Callable[[str], Ids]:
    """`encode` without the tokens that it puts before every text, such as bos."""
    prefix = len(encode(""))
    return lambda text: [int(x) for x in encode(text)[prefix:]]


def sentence_ends(
    tokens: Int[np.ndarray, " T"], encode: Callable[[str], Ids]
) -> Int[np.ndarray, " ends"]:
    """Indices after a token that ends a sentence: where a needle can be put."""
    marks = [ids[-1] for mark in (".", "!", "?") if (ids := encode(f"word{mark}"))]
    return np.flatnonzero(np.isin(tokens, marks)) + 1


def _place(ends: Int[np.ndarray, " ends"], share: float, room: int) -> int:
    """The end of a sentence nearest to this share of the filler; the share itself without one."""
    wanted = round(share * room)
    return int(ends[np.abs(ends - wanted).argmin()]) if len(ends) else wanted


# -------------------------------------------------------------------------------------- calibration


# How a fact is stated in calibration text, and how it is asked for and answered.
FORMS = (
    (
        " The pass key of the {} is {}. Remember it.",
        "\n\nWhat is the pass key of the {}? It is {}.\n\n",
    ),
    ("\n\nRecords\n{}: {}\n\n", "\n\nRecords\n{}: {}\n\n"),
)


def recall_documents(
    encode: Encode, fillers: Sequence[Int[np.ndarray, " _"]], length: int, seed: int = 0
) -> list[np.ndarray]:
    """Calibration text that asks for retrieval: one document of `length` tokens for each filler.

    A document alternates between 16 to 64 tokens of its filler, a fact (the pass key of a thing, or
    a record), and a question with its answer about any earlier fact, so that queries at every
    position look back at every distance.
    """
    bare = without_prefix(encode)
    found = []
    for index, filler in enumerate(fillers):
        rng = np.random.default_rng((seed, index))
        tokens = list(encode(""))
        done, facts = 0, list[tuple[int, str, int]]()
        while len(tokens) < length:
            size = int(rng.integers(16, 65))
            tokens += [int(x) for x in np.take(filler, range(done, done + size), mode="wrap")]
            done += size
            facts.append((int(rng.integers(len(FORMS))), _thing(rng), _number(rng)))
            for form, thing, number, part in (
                (*facts[-1], 0),
                (*facts[int(rng.integers(len(facts)))], 1),
            ):
                tokens += bare(FORMS[form][part].format(thing, number))
        found.append(np.asarray(tokens[:length], np.int32))
    return found


def _thing(rng: np.random.Generator) -> str:
    return f"{QUALITIES[rng.integers(len(QUALITIES))]} {WORDS[rng.integers(len(WORDS))]}"
