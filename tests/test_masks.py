"""Rules: what each allows at every token, boolean algebra, and behaviour as pytrees."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.specs import has_data, shifted_by_table, to_rule, zoo
from xsake import BlockMask, dot_product_attention, masks
from xsake.backends import kernel_rule
from xsake.masks import intervals
from xsake.masks.carrying import Between, at_queries
from xsake.masks.rule import combine, conjuncts

SIZES = [(2, 3, 48, 48), (1, 2, 33, 57)]  # B, N, T, S
NAMES = list(zoo(*SIZES[0]))


def tokens(rule, B, N, T, S):
    """The rule asked about every (b, n, q, k) at once."""
    at = np.ix_(range(B), range(N), range(T), range(S))
    return np.broadcast_to(rule(*map(jnp.asarray, at)), (B, N, T, S))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def traced_tokens(rule, B, N, T, S):
    """The same in one program for each kind of rule, which tests share."""
    at = np.ix_(range(B), range(N), range(T), range(S))
    return jnp.broadcast_to(rule(*map(jnp.asarray, at)), (B, N, T, S))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_means_what_the_oracle_says(name, sizes):
    spec = zoo(*sizes)[name]
    assert (traced_tokens(to_rule(spec), *sizes) == oracle.allowed(spec, *sizes)).all()


def interval_specs(B, T, S):
    """Rules with arrays by whether their batch rows are in order: (spec, in order) each."""
    rng = np.random.default_rng(0)
    ids, kv_ids = (np.sort(rng.integers(0, 5, (B, L))) for L in (T, S))
    mixed, padded, left, middle, largest = (ids.copy() for _ in range(5))
    mixed[1] = mixed[1, ::-1]
    padded[:, T - 3 :] = -1
    left[:, :3] = -1
    middle[0, 5] = -1
    largest[0, -1] = 2**31 - 1  # the integer that stands for padding
    rising, kv_rising = (np.cumsum(rng.integers(0, 3, (B, L)), -1) - 4 for L in (T, S))
    lengths, kv_lengths = np.array([0, T - 3]), np.array([S, 5])
    causal = ("causal",)
    return {
        "in order": (("and", ("documents", ids, kv_ids), causal), [True, True]),
        "one row out of order": (("documents", mixed, kv_ids), [True, False]),
        "keys out of order": (("documents", ids, kv_ids[:, ::-1]), [False, False]),
        "padding at the end": (("and", ("documents", padded, kv_ids), causal), [True, True]),
        "padding at the start": (("documents", left, kv_ids), [True, True]),
        "padding in the middle": (("documents", middle, kv_ids), [False, True]),
        "the largest id": (("documents", largest, kv_ids), [False, True]),
        "lengths": (("and", ("lengths", lengths, kv_lengths), causal), [True, True]),
        "prefix": (("or", ("prefix", kv_lengths), causal), [True, True]),
        "chunks": (("and", ("chunked", 7), ("lengths", None, kv_lengths)), [True, True]),
        "rising": (("positions", ("sliding_window", 5, 2), rising, kv_rising), [True, True]),
        "falling": (("positions", causal, rising[:, ::-1], None), [False, False]),
        "documents or first": (("or", ("documents", mixed, kv_ids), ("first", 3)), [True, False]),
        "prefix or window": (
            (
                "and",
                ("or", ("sliding_window", 3, 0), ("prefix", kv_lengths)),
                ("lengths", lengths, None),
            ),
            [True, True],
        ),
        "everywhere": (
            ("and", ("sliding_window", 2**31 - 1, 0), ("prefix", kv_lengths)),
            [True] * 2,
        ),
    }


def inside(ends, at):
    """Whether indices are in any of the intervals: (lo, hi, …) [2|4, L, 1], [M] -> bool [L, M]."""
    runs = zip(ends[::2], ends[1::2], strict=True)
    return np.any([(at >= lo) & (at < hi) for lo, hi in runs], axis=0)


def test_intervals_are_the_keys_that_a_rule_allows():
    """By query and by key; batch rows that are out of order are marked, never wrong."""
    B, N, T, S = 2, 1, 12, 15
    specs = interval_specs(B, T, S)

    def both(rules):
        found = {name: intervals.intervals_of(rule, (T, S)) for name, rule in rules.items()}
        return {name: (x, intervals.transposed(x, S)) for name, x in found.items()}

    rules = {name: to_rule(spec) for name, (spec, _) in specs.items()}
    for name, (by_query, by_key) in jax.jit(both)(rules).items():  # one program
        spec, in_order = specs[name]
        see = oracle.allowed(spec, B, N, T, S)[:, 0]
        assert by_query.shape[2] == by_key.shape[2] == (4 if " or " in name else 2)
        keys, queries = (
            np.broadcast_to(x[:, 0], (B, *x.shape[2:]))[..., None] for x in (by_query, by_key)
        )
        assert ((keys >= 0).all((1, 2, 3)) == in_order).all(), name
        assert ((queries >= 0).all((1, 2, 3)) == in_order).all(), name
        for b in np.flatnonzero(in_order):
            assert (inside(keys[b], np.arange(S)) == see[b]).all(), name
            assert (inside(queries[b], np.arange(T)) == see[b].T).all(), name
        always = intervals.always_intervals(rules[name])
        assert all(in_order) or not always, name


def test_keys_between_two_ends_are_an_interval():
    """In blocks, by query, by key and as kernels evaluate it; ends may be past the keys."""
    T, S, block = 40, 50, (4, 8)
    rng = np.random.default_rng(0)
    lo = np.sort(rng.integers(-30, 60, (3, T)), axis=-1)
    hi = np.sort(lo + rng.integers(-2, 40, (3, T)), axis=-1)
    see = (lo[..., None] <= np.arange(S)) & (np.arange(S) < hi[..., None])
    rule = Between(*(jnp.asarray(x, jnp.int32) for x in (lo, hi)))
    mask = BlockMask.from_rule(rule, (T, S), block=block)
    np.testing.assert_array_equal(mask.to_dense(), see[:, None])
    assert mask.is_rule  # to_dense asks the rule; below, the blocks
    again = BlockMask.from_classes(mask.blocks(), rule, (T, S), block)
    np.testing.assert_array_equal(again.to_dense(), see[:, None])
    assert len(np.unique(mask.blocks())) == 3  # empty, partial and full
    by_query = intervals.intervals_of(rule, (T, S))
    by_key = intervals.transposed(by_query, S)
    assert intervals.always_intervals(rule)
    translated = kernel_rule.translate(rule, T, S)
    q, k = np.ogrid[:T, :S]
    for b in range(3):
        ends, queries = (np.asarray(x[b, 0])[..., None] for x in (by_query, by_key))
        assert (inside(ends, np.arange(S)) == see[b]).all()
        assert (inside(queries, np.arange(T)) == see[b].T).all()
        rows = [x[b][:, None] for x in translated.rows]
        assert (translated.allows(b, 0, q, k, rows, []) == see[b]).all()


def test_documents_of_one_array_have_the_intervals_of_two():
    """With causality no second search is needed; padding and ids out of order are as before."""
    specs = interval_specs(2, 12, 12)
    names = ("in order", "one row out of order", "padding at the end", "padding at the start")
    ids = [spec[1][1] if spec[0] == "and" else spec[1] for spec, _ in map(specs.get, names)]

    @jax.jit
    def both(q_ids, kv_ids):
        limits = masks.causal() & masks.sliding_window(7, None)
        rules = (masks.documents(q_ids), masks.documents(q_ids, kv_ids))
        return [intervals.intervals_of(limits & rule, (12, 12)) for rule in rules]

    array = jnp.asarray(np.concatenate(ids), jnp.int32)
    one, two = both(array, jnp.array(array))
    assert (one == two).all()
    assert (one < 0).all((1, 2, 3)).tolist() == [False] * 3 + [True] + [False] * 4


@pytest.mark.parametrize("name", ["strided", "three", "two and two", "not documents", "array"])
def test_rules_of_another_kind_have_no_intervals(name):
    """More than two intervals, gaps, complements: the rule itself decides."""
    specs = zoo(*SIZES[1])
    two = ("or", specs["documents"], ("first", 3))
    specs["three"] = ("or", two, ("sliding_window", 4, 4))
    specs["two and two"] = ("and", two, ("or", ("sliding_window", 4, 4), ("first", 2)))
    rule = to_rule(specs[name])
    assert jax.eval_shape(lambda: intervals.intervals_of(rule, SIZES[1][2:])) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_answers_about_one_token(name):
    B, N, T, S = SIZES[1]
    spec = zoo(B, N, T, S)[name]
    expected = oracle.allowed(spec, B, N, T, S)
    rule = to_rule(spec)
    for n, q, k in [(0, 0, 0), (1, 32, 5), (1, 7, 56)]:
        answer = rule(0, n, q, k)
        assert jnp.asarray(answer).dtype == bool
        assert bool(answer) == expected[0, n, q, k]


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_travels_through_jit(name):
    """As an argument: other contents, the same program."""
    sizes = SIZES[0]
    first, second = (to_rule(zoo(*sizes, seed=seed)[name]) for seed in (0, 1))
    traced_tokens(first, *sizes)
    programs = traced_tokens._cache_size()
    again = traced_tokens(second, *sizes)
    assert traced_tokens._cache_size() == programs
    assert (again == oracle.allowed(zoo(*sizes, seed=1)[name], *sizes)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_a_pytree(name):
    sizes = SIZES[0]
    spec = zoo(*sizes)[name]
    rule = to_rule(spec)
    leaves, structure = jax.tree.flatten(rule)
    assert bool(leaves) == has_data(spec)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(rule)
    assert (traced_tokens(again, *sizes) == traced_tokens(rule, *sizes)).all()
    assert str(again) == str(rule)


FREE = [name for name in NAMES if not has_data(zoo(*SIZES[0])[name])]


@pytest.mark.parametrize("name", FREE)
def test_rules_without_data_compare_by_value(name):
    spec = zoo(*SIZES[0])[name]
    one, two = to_rule(spec), to_rule(spec)
    assert one is not two or name in {"everything", "causal"}
    assert one == two
    assert hash(one) == hash(two)
    others = [to_rule(zoo(*SIZES[0])[other]) for other in FREE if other != name]
    assert one not in others


def test_a_rule_without_data_can_be_a_static_argument():
    traces = []

    @jax.jit
    def rows(x, rule):
        traces.append(rule)
        return rule(0, 0, x, x)

    static = jax.jit(rows.__wrapped__, static_argnums=1)
    x = jnp.arange(4)
    static(x, masks.sliding_window(3, 2) & masks.causal())
    static(x, masks.sliding_window(3, 2) & masks.causal())
    assert len(traces) == 1
    static(x, masks.sliding_window(4, 2) & masks.causal())
    assert len(traces) == 2


def test_equivalent_spellings_of_a_window_are_equal():
    assert masks.sliding_window(3) == masks.sliding_window(3, 3) == masks.sliding_window((3, 3))
    assert masks.sliding_window(3, 0) == masks.sliding_window((3, 0)) != masks.sliding_window(3)
    assert masks.sliding_window(None, 0) != masks.sliding_window(0, None)
    sizes = (1, 1, 20, 20)
    for one, two in [
        (masks.sliding_window(None, 0), masks.causal()),
        (masks.sliding_window(None, None), masks.everything()),
        (masks.longformer(3, 2), masks.sliding_window(3) | masks.global_tokens(2)),
        (masks.longformer((3, 1), 2), masks.sliding_window(3, 1) | masks.global_tokens(2)),
        (masks.bigbird(3, 2, 0.3), masks.longformer(3, 2) | masks.random(0.3, 0, 64)),
        (masks.dilated(2, 3), masks.sliding_window(6) & masks.strided(3)),
        (masks.random(1.0), masks.everything()),
        (masks.random(0.0), ~masks.everything()),
        (masks.prefix(7), masks.first(7)),
    ]:
        assert (tokens(one, *sizes) == tokens(two, *sizes)).all(), (str(one), str(two))


def test_algebra():
    """The laws of sets, at every token, over every two of a few rules; one program for all."""
    sizes = SIZES[0]
    everything = masks.everything()
    some = [to_rule(zoo(*sizes)[name]) for name in ("causal", "documents", "array")]
    at = [jnp.asarray(x) for x in np.ix_(*map(range, sizes))]

    def tokens_of(rule):
        return jnp.broadcast_to(rule(*at), sizes)

    @jax.jit
    def laws(some):
        equal = []
        for a in some:
            equal += [(~~a, a), (a & a, a), (a | a, a), (a & everything, a)]
            equal += [(a | everything, everything), (a & ~a, ~everything), (a | ~a, everything)]
        for a, b in itertools.combinations(some, 2):
            equal += [(a & b, b & a), (a | b, b | a), (~(a & b), ~a | ~b)]
            equal += [(a & (a | b), a), ((a & b) | (a & ~b), a)]
        held = [(tokens_of(x) == tokens_of(y)).all() for x, y in equal]
        return jnp.stack(held), jnp.stack([tokens_of(x).mean() for x in (everything, *some)])

    held, shares = map(np.asarray, laws(some))
    assert held.tolist() == [True] * (3 * 7 + 3 * 5)
    assert shares[0] == 1
    assert len(set(shares)) == 4  # else the laws would hold of anything


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (masks.causal(), "causal()"),
        (masks.sliding_window(3, 2) & masks.causal(), "sliding_window(3, 2) & causal()"),
        (masks.chunked(8), "chunked(8)"),
        (masks.first(4), "first(4)"),
    ],
)
def test_str_of_a_rule_is_the_expression_that_builds_it(rule, words):
    assert str(rule) == words


def test_str_of_combined_rules_keeps_the_precedence():
    """Without parentheses (a | b) & c and a | (b & c) would print alike."""
    a, b, c = masks.first(2), masks.chunked(4), masks.causal()
    assert str((a | b) & c) != str(a | (b & c))
    assert str(~(a & b)) != str(~a & b)
    for rule in ((a | b) & c, a | (b & c), ~(a & b), ~a & b):
        assert eval(str(rule), vars(masks)) == rule


ENDS = [-(2**31), -(2**31) + 3, -(2**30), -5, 0, 7, 2**30, 2**31 - 4, 2**31 - 1]


@pytest.mark.parametrize(
    "spec",
    [
        ("causal",),
        ("sliding_window", 5, 3),
        ("sliding_window", 2**31 - 1, 2**31 - 1),
        ("sliding_window", None, 2**31 - 1),
        ("sliding_window", 2**30, 0),
        ("chunked", 7),
        ("chunked", 2**31 - 1),
        ("first", 2**31 - 1),
        ("strided", 7),
        ("strided", 2**31 - 1),
        ("dilated", (3, 2), 5),
        ("not", ("sliding_window", 5, 3)),
    ],
    ids=str,
)
def test_positions_at_the_ends_of_int32_do_not_wrap_round(spec):
    """Sentinels such as INT_MAX, asked token by token and block by block."""
    at = np.array(ENDS)
    size = len(at)
    see = oracle.allowed(spec, 1, 1, size, size, q_positions=at, kv_positions=at)[0, 0]
    rule = to_rule(spec)
    assert (np.broadcast_to(rule(0, 0, at[:, None], at[None]), (size, size)) == see).all()
    mask = BlockMask.from_rule(rule, (size, size), block=2, q_positions=at, kv_positions=at)
    assert (np.asarray(mask.to_dense())[0, 0] == see).all()


def test_integers_of_a_function_count_as_true_unless_zero():
    """1 & 2 is 0 bit by bit, but both are true."""
    q, k = np.ogrid[:8, :8]
    both = masks.rule(lambda b, n, q, k: q - k) & masks.rule(lambda b, n, q, k: 2 * (q - k))
    assert (np.asarray(both(0, 0, q, k)) == (q != k)).all()
    assert (np.asarray((~both)(0, 0, q, k)) == (q == k)).all()


def test_a_rule_and_an_array():
    """In either order, NumPy's or JAX's."""
    q, k = np.ogrid[:8, :8]
    bits = np.random.default_rng(0).random((8, 8)) < 0.5
    for array in (bits, jnp.asarray(bits)):
        for rule in (masks.causal() & array, array & masks.causal()):
            assert (np.asarray(rule(0, 0, q, k)) == (bits & (k <= q))).all()
        assert (np.asarray((array | masks.causal())(0, 0, q, k)) == (bits | (k <= q))).all()


def test_rules_are_frozen():
    for rule in (masks.sliding_window(3), masks.causal() & masks.first(2)):
        name = dataclasses.fields(rule)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, name, 1)


def test_random_keeps_its_density_and_differs_by_head_and_seed():
    sizes = (1, 8, 128, 128)
    one, two = (tokens(masks.random(0.3, seed, 2), *sizes) for seed in (0, 1))
    # 8 * 64 * 64 = 32,768 cells: the share kept has a standard deviation of 0.0025.
    assert abs(one.mean() - 0.3) < 0.0125
    assert abs((one & two).mean() - 0.09) < 0.01
    assert abs((one[:, 0] & one[:, 1]).mean() - 0.09) < 0.03


def test_a_function_reads_positions_unless_it_carries_arrays():
    B, N, T, S = 1, 2, 6, 6
    at = jnp.arange(T)[::-1]
    moved = [jnp.asarray(x) for x in np.ix_(range(B), range(N), range(T), range(S))]

    def below(b, n, q, k, *_):
        return k <= q

    plain = np.tril(np.ones((T, S), bool))
    table = jnp.zeros((B, N), jnp.int32)
    for rule, expected in [
        (masks.rule(below), plain.T),  # positions are reversed, so k <= q becomes k >= q
        (masks.rule(below, reads="indices"), plain),
        (masks.rule(below, table), plain),
        (masks.rule(below, table, reads="positions"), plain.T),
        (masks.rule(shifted_by_table, table), plain),
    ]:
        answer = masks.at_positions(rule, at, at)(*moved)
        assert (np.broadcast_to(answer, (B, N, T, S)) == expected).all()


def test_lengths_and_documents_do_not_follow_positions():
    T = 8
    at = jnp.arange(T)[::-1]
    moved = [jnp.asarray(x) for x in np.ix_(range(1), range(1), range(T), range(T))]
    for rule in (
        masks.lengths(query=jnp.array([5]), key_value=jnp.array([3])),
        masks.documents(jnp.array([[0, 0, 0, 1, 1, 2, -1, -1]])),
        masks.array(jnp.arange(T * T).reshape(1, 1, T, T) % 3 == 0),
    ):
        here, there = rule(*moved), masks.at_positions(rule, at, at)(*moved)
        assert (np.asarray(here) == np.asarray(there)).all()


def test_numbered_changes_b_and_n_of_functions_but_not_the_indices_of_arrays():
    B, N, T, S = 2, 2, 5, 5
    lengths = jnp.array([2, 4])
    moved = [jnp.asarray(x) for x in np.ix_(range(B), range(N), range(T), range(S))]
    batch, heads = jnp.array([4, 5]), jnp.array([2, 3])

    def is_number(b, n, q, k):
        return (b == 5) & (n == 2)

    answer = masks.numbered(masks.rule(is_number), batch=batch, heads=heads)(*moved)
    answer = np.broadcast_to(answer, (B, N, T, S))
    assert answer[1, 0].all()
    assert answer.sum() == T * S
    prefix = masks.numbered(masks.prefix(lengths), batch=batch, heads=heads)(*moved)
    plain = masks.prefix(lengths)(*moved)
    assert (np.asarray(prefix) == np.asarray(plain)).all()


@pytest.mark.parametrize(
    "rule",
    [
        masks.causal(),
        masks.everything(),
        masks.causal() & masks.documents(np.array([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])),
        masks.array(np.random.default_rng(0).random((2, 1, 12, 12)) < 0.5) | masks.first(2),
    ],
    ids=str,
)
def test_a_rule_at_chosen_queries_is_the_rule_of_those_queries(rule):
    index = np.array([[1, 4, 6, 11], [0, 3, 9, 10]])
    b, i, k = np.ogrid[:2, :4, :12]
    got = at_queries(rule, jnp.asarray(index))(b, 0, i, k)
    want = rule(b, 0, index[:, :, None], k)
    np.testing.assert_array_equal(*np.broadcast_arrays(got, want))


def test_a_rule_is_the_combination_of_its_conjuncts():
    parts = [masks.causal(), masks.prefix(3) | masks.causal(), masks.documents(jnp.zeros(8, int))]
    nested = parts[0] & (parts[1] & parts[2])
    assert [x is y for x, y in zip(conjuncts(nested), parts, strict=True)] == [True] * 3
    assert combine(conjuncts(parts[0])) is parts[0]
    assert conjuncts(masks.everything()) == []


@pytest.mark.parametrize("implementation", ["xla", "dense", "reference"])
def test_a_rule_may_return_a_constant(implementation):
    """A Python bool or integer instead of an array."""
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40, 2, 8)), jnp.float32)
    for constant, other in ((True, masks.everything()), (0, ~masks.everything())):
        rule = masks.rule(lambda b, n, q, k, constant=constant: constant)
        found, want = (
            dot_product_attention(q, q, q, mask=x, implementation=implementation)
            for x in (rule, other)
        )
        np.testing.assert_array_equal(found, want)
