"""What is replaced in Mosaic GPU gives what its own functions give."""

from __future__ import annotations

import types

import pytest

from tests.conditions import needs_newer_jax
from xsake import _jax


@needs_newer_jax
def test_equal_variables_of_layouts_are_those_that_jax_finds():
    """JAX 0.11 gets our function in place of its own; here both are compared."""
    from jax.experimental.mosaic.gpu import constraints

    a, b, c, d, e, f = map(constraints.Variable, "abcdef")
    pairs = [(a, b), (c, d), (e, e), (d, a), (b, c)]
    system = constraints.ConstraintSystem(
        constraints=[
            *(constraints.Equals(*sides) for sides in pairs),
            constraints.Divides(f, (64,)),
        ]
    )
    theirs = constraints.compute_transitively_equal_vars(system)
    ours = _jax.equal_variables(system)
    assert {x: set(y) for x, y in ours.items()} == {x: set(y) for x, y in theirs.items()}
    assert set(ours[b]) == {a, c, d}


@needs_newer_jax
def test_constraints_of_layouts_are_reduced_as_jax_reduces_them():
    """A constraint that stays the same is reduced again only if a variable of it is assigned."""
    from jax.experimental.mosaic.gpu import constraints
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    a, b = map(constraints.Variable, "ab")
    layout, other = map(constraints.RegisterLayout, (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT))
    theirs = getattr(constraints.reduce_constraint, "__wrapped__", constraints.reduce_constraint)
    reduced = []

    def counted(constraint, assignments):
        reduced.append(constraint)
        return theirs(constraint, assignments)

    ours = _jax.reduce_once(counted)
    for constraint in [
        constraints.Equals(a, b),
        constraints.Relayout(a, b, 32, strict=True),
        constraints.Equals(constraints.Reduce(a, (1,), False), b),
        constraints.OneOf(b, (layout, other)),
    ]:
        reduced.clear()
        for assigned in ({}, {}, {}, {b: layout}):
            assert ours(constraint, assigned) == theirs(constraint, assigned)
        assert len(reduced) == 2


def test_a_list_with_a_set_and_a_kept_hash_give_what_they_replace():
    hashed = []

    class Key:
        def __init__(self, x):
            self.x = x

        def __eq__(self, other):
            return self.x == other.x

        @_jax.hash_once
        def __hash__(self):
            hashed.append(self.x)
            return hash(self.x)

    keys = [Key(x) for x in (3, 1, 2)]
    found = _jax.with_set(lambda unknowns, fuel: (unknowns, Key(1) in unknowns, Key(4) in unknowns))
    unknowns, *held = found(keys, fuel=1)
    assert unknowns == keys
    assert held == [True, False]
    assert found(unknowns, fuel=1)[0] is unknowns
    assert hash(keys[0]) == hash(Key(3))
    assert hashed.count(3) == 2


@needs_newer_jax
def test_systems_of_constraints_are_joined_as_jax_joins_them():
    from jax.experimental.mosaic.gpu import constraints
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    a, b = map(constraints.Variable, "ab")
    layout, other = map(constraints.RegisterLayout, (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT))

    def system(assignments):
        return constraints.ConstraintSystem(assignments, [constraints.Relayout(a, b, 32)])

    for one, two in [({a: layout}, {b: other}), ({a: layout}, {a: layout}), ({}, {})]:
        assert _jax.join(system(one), system(two)) == system(one) & system(two)
    for wrong in (system({a: other}), constraints.Unsatisfiable()):
        assert isinstance(_jax.join(system({a: layout}), wrong), constraints.Unsatisfiable)


def test_a_cache_lasts_as_long_as_the_function_that_it_is_for():
    calls = []
    module = types.SimpleNamespace(square=lambda x: calls.append(x) or x * x)
    original = module.square

    def run(fails):
        assert [module.square(x) for x in (2, 3, 2)] == [4, 9, 4]
        if fails:
            raise ValueError("as it is")

    cached = _jax.with_cache(run, module, "square")
    cached(False)
    with pytest.raises(ValueError, match="as it is"):
        cached(True)
    assert calls == [2, 3] * 2
    assert module.square is original


@needs_newer_jax
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0), (0, 13, 0)])
def test_other_versions_of_jax_keep_their_functions(monkeypatch, version):
    from jax.experimental.mosaic.gpu import constraints, core, dialect_lowering, layout_inference

    def functions():
        return [
            constraints.compute_transitively_equal_vars,
            constraints.reduce_constraint,
            constraints.Variable.__hash__,
            core._mosaic_gpu_lowering_rule,
            dialect_lowering.lower_mgpu_dialect,
            getattr(constraints.ConstraintSystem, "__iand__", None),
            layout_inference.find_assignments_for,
            layout_inference.ValueSite.__hash__,
        ]

    before = functions()
    monkeypatch.setattr(_jax, "version", lambda: version)
    _jax.speed_up_first_calls()
    assert functions() == before


@needs_newer_jax
def test_new_kernels_of_xsake_are_compiled_while_others_are_lowered(monkeypatch):
    """Once each, only on a GPU; an error of the compiler is left to the program's compilation."""
    from jax.experimental.mosaic.gpu import core

    known, compiled = {b"old": b"old"}, []
    monkeypatch.setattr(core, "KNOWN_KERNELS", known)

    def compile_kernel(*args):
        compiled.append(args[:2])
        raise RuntimeError("no such kernel")

    def lower(ctx, *args, module, **kwargs):
        known[ctx] = b"lowered " + ctx
        return args, kwargs

    def run(platform, name, kernel):
        monkeypatch.setattr(_jax, "platform", lambda: platform)
        operation = types.SimpleNamespace(attributes={"sym_name": name})
        module = types.SimpleNamespace(operation=operation)
        assert rule(kernel, 1, 2, module=module, more=3) == ((1, 2), {"more": 3})

    monkeypatch.setattr(_jax, "compile_kernel", compile_kernel)
    rule = _jax.with_early_compilation(lower)
    run("cpu", "xsake_forward", b"a")
    run("gpu", "another_forward", b"b")
    run("gpu", "xsake_forward", b"a")
    for _ in range(2):
        run("gpu", "xsake_forward", b"c")
    run("gpu", "xsake_delta", b"d")
    _jax._compilers().shutdown()
    _jax._compilers.cache_clear()
    assert sorted(compiled) == [(b"c", b"lowered c"), (b"d", b"lowered d")]
