"""What is replaced in JAX's layout inference gives what JAX's own function gives."""

from __future__ import annotations

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
