"""Checks N random calls: `python -m tests.fuzz --n 5000 --seed 0`, or `make fuzz`.

Every signature costs a compilation, so each is run with 25 sets of array values. A failure prints
the command that reproduces it: `python -m tests.fuzz --seed SEED --only SIGNATURE:CONTENT`.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import numpy as np

from tests.draws import BACKENDS, Contents, Signature, check, describe
from tests.specs import Slot

CONTENTS_PER_SIGNATURE = 25


def draw_signature(rng: np.random.Generator) -> Signature:
    """Any static arguments: sizes, the mask's form and rule, bias, sinks, soft cap, dtype."""
    B, K, group = (int(rng.integers(1, 4)) for _ in range(3))
    T, S = int(rng.integers(1, 161)), int(rng.integers(1, 161))
    T = S if rng.random() < 0.4 else T
    N = K * group
    H, Hv = (int(h) for h in rng.choice([1, 5, 8, 16, 24, 40], 2))
    form = str(rng.choice(["rule", "from_rule", "from_dense", "array", "none"]))
    block = tuple(int(b) for b in rng.choice([16, 32, 48, 64, 128], 2))
    blocks = None
    rule = ("everything",)
    if form == "array":
        rule = ("array", Slot("mask", _some_axes(rng, "BNTS")))
    elif form != "none":
        rule = _draw_rule(rng, depth=int(rng.integers(0, 3)))
    if form == "from_dense":
        heads = "N" if _depends_on_head(rule) else str(rng.choice(["N", "K", "1"]))
        blocks = Slot("bits", f"{rng.choice(['B', '1'])}{heads}ij")
    return Signature(
        sizes=(B, T, S, N, K, H, Hv),
        form=form,
        rule=rule,
        block=block,
        blocks=blocks,
        keywords=_draw_keywords(rng, form),
        bias=_some_axes(rng, "BNTS") if rng.random() < 0.4 else None,
        sinks=[None, (N,), (N, int(rng.integers(1, 4)))][rng.integers(3)],
        soft_cap=float(rng.choice([1.5, 5.0, 30.0])) if rng.random() < 0.3 else None,
        scale=float(rng.uniform(0.05, 0.5)) if rng.random() < 0.3 else None,
        dtype=str(rng.choice(["float32", "float32", "bfloat16", "float16"])),
    )


def draw_contents(rng: np.random.Generator) -> Contents:
    return Contents(
        seed=int(rng.integers(2**32)),
        documents=int(rng.integers(1, 7)),
        padding=float(rng.choice([0.0, 0.1, 0.6, 1.0], p=[0.5, 0.2, 0.2, 0.1])),
        is_sorted=bool(rng.integers(2)),
        order=str(rng.choice(["arange", "offset", "permuted", "repeated"])),
        keep=float(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])),
        magnitude=float(rng.choice([0.3, 1.0, 1.5])),
    )


def _draw_rule(rng, depth):
    if depth:
        joined = str(rng.choice(["and", "or", "not", "positions"]))
        rule = _draw_rule(rng, depth - 1)
        if joined == "not":
            return ("not", rule)
        if joined == "positions" and not _places(rule):
            at = [
                Slot("rule_q_positions", _rows(rng, "T")),
                Slot("rule_kv_positions", _rows(rng, "S")),
            ]
            return ("positions", rule, *at)
        return (joined if joined != "positions" else "and", rule, _draw_rule(rng, 0))
    left, right = (None if rng.random() < 0.2 else int(rng.integers(0, 90)) for _ in range(2))
    some = int(rng.integers(1, 60))
    window = (int(rng.integers(0, 40)), int(rng.integers(0, 40)))
    cells = (float(rng.uniform(0, 1)), int(rng.integers(100)), int(rng.choice([1, 7, 16, 64])))
    rules = [
        ("everything",),
        ("causal",),
        ("sliding_window", left, right),
        ("chunked", some),
        ("first", some),
        ("prefix", some),
        ("prefix", Slot("prefix_lengths", "B")),
        ("lengths", Slot("q_rule_lengths", "B"), Slot("kv_rule_lengths", "B")),
        ("lengths", None, Slot("kv_rule_lengths", "B")),
        ("documents", Slot("q_rule_ids", _rows(rng, "T")), Slot("kv_rule_ids", _rows(rng, "S"))),
        ("strided", some),
        ("dilated", window, int(rng.integers(1, 9))),
        ("global_tokens", some),
        ("longformer", window, some),
        ("bigbird", window, some, *cells),
        ("random", *cells),
        ("array", Slot("rule_mask", _some_axes(rng, "BNTS"))),
    ]
    return rules[rng.integers(len(rules))]


def _draw_keywords(rng, form):
    keywords = []
    if rng.random() < 0.3:
        keywords.append(("is_causal", True))
    if rng.random() < 0.2:
        keywords.append(("local_window_size", (int(rng.integers(0, 99)), int(rng.integers(0, 99)))))
    if rng.random() < 0.2:
        keywords.append(("query_seq_lengths", Slot("q_lengths", "B")))
    if rng.random() < 0.2:
        keywords.append(("key_value_seq_lengths", Slot("kv_lengths", "B")))
    if rng.random() < 0.3:
        keywords.append(("q_segment_ids", Slot("q_ids", "BT")))
        keywords.append(("kv_segment_ids", Slot("kv_ids", "BS")))
    # positions may not be combined with a BlockMask
    if rng.random() < 0.3 and not form.startswith("from"):
        keywords.append(("q_positions", Slot("q_positions", "BT")))
        keywords.append(("kv_positions", Slot("kv_positions", "BS")))
    return tuple(keywords)


def _some_axes(rng, axes):
    return "".join(axis if rng.random() < 0.5 else "1" for axis in axes)


def _rows(rng, axis):
    return f"{rng.choice(['B', '1'])}{axis}"


def _names(rule):
    return {rule[0]}.union(*(_names(part) for part in rule[1:] if isinstance(part, tuple)))


def _places(rule):
    return "positions" in _names(rule)


def _depends_on_head(rule):
    """Rules that depend on the query head; block lists per kv head cannot represent them."""
    return bool(_names(rule) & {"random", "bigbird", "array"})


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="combinations to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SIGNATURE:CONTENT of one failure, to repeat it")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    asked = parser.parse_args(argv)
    backends = asked.backends.split(",")
    if asked.only:
        places = [tuple(int(x) for x in asked.only.split(":"))]
    else:
        places = [divmod(i, CONTENTS_PER_SIGNATURE) for i in range(asked.n)]
    failures, begun, last = 0, time.perf_counter(), None
    for done, (which, content) in enumerate(places, 1):
        # Each combination has a seed of its own, so that one can be repeated without the others.
        signature = draw_signature(np.random.default_rng([asked.seed, which]))
        contents = draw_contents(np.random.default_rng([asked.seed, which, content + 1]))
        if which != last:
            jax.clear_caches()
            last = which
        try:
            lines = check(signature, contents, backends)
        except Exception as error:  # a crash is a failure like any other: report it and go on
            lines = [f"{type(error).__name__}: {str(error)[:300]}"]
        if lines:
            failures += 1
            print(f"FAILED python -m tests.fuzz --seed {asked.seed} --only {which}:{content}")
            print(f"  {describe(signature)}\n  {contents}")
            print("\n".join(f"  {line}" for line in lines), flush=True)
        if done % 100 == 0:
            seconds = time.perf_counter() - begun
            print(f"{done}/{len(places)}, {failures} failures, {seconds:.0f} s", flush=True)
    print(f"{len(places)} combinations, {failures} failures, seed {asked.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
