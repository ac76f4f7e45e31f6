"""The suite `selection`, with plain JAX in place of the kernels."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests.conditions import needs_newer_jax
from tools.selection_tables import selection as table
from xsake.bench import programs
from xsake.bench.suites import selection
from xsake.block_scores import queries

pytestmark = needs_newer_jax
SHAPE, BLOCK = (1, 300, 2, 64), 128


@pytest.fixture
def kernels(monkeypatch):
    """Scores of two warpgroups are wrong by 1."""
    from xsake.backends.hopper import best_blocks, outliers, scores

    def plain_outliers(q, block, parts, *, scale):
        chosen = jax.vmap(lambda q: queries.outliers(q, block // parts, block))(q)
        return (chosen * scale).astype(q.dtype)

    def sums(chosen, k, block, *, causal, parts, keys_per_peak, tiling):
        found = selection._plain(chosen, k, block, keys_per_peak)
        unseen = jnp.arange(found.shape[3]) // parts < jnp.arange(found.shape[2])[:, None]
        return jnp.where(unseen, 7.0, found + (tiling.warpgroups == 2))

    def plain_best(sums, counts, **how):
        return [sums.sum() + counts.sum()] * 5

    monkeypatch.setattr(programs, "why_not", lambda need: None)
    monkeypatch.setattr(outliers, "outliers", plain_outliers)
    monkeypatch.setattr(scores, "sums", sums)
    monkeypatch.setattr(best_blocks, "best_blocks", plain_best)
    monkeypatch.setattr(selection, "time_on_device", lambda fn, *args: fn(*args) is not None)


def test_every_kernel_is_timed_and_a_tiling_with_wrong_scores_is_not(tmp_path, kernels):
    selection.main(tmp_path / "out.json", shapes=(SHAPE,), blocks=(BLOCK,), density=0.9)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["provenance"]["commit"]
    first, *tilings, last = found["rows"]
    assert (first["kernel"], last["kernel"]) == ("outliers", "best_blocks")
    assert len(tilings) > 6
    for row in tilings:
        assert row["kernel"] == "scores"
        is_wrong = row["warpgroups"] == 2
        assert ("device_seconds" in row) is not is_wrong
        assert row["largest_error"] == pytest.approx(float(is_wrong), abs=1e-3)
    assert {row["keys_per_peak"] for row in tilings} == {1, 4}
    assert first["device_seconds"] > 0
    assert last["device_seconds"] > 0


def test_the_table_has_a_line_for_each_kernel_and_tiling():
    shape = {"shape": "1·8192·16·128", "block": 128}
    tiling = {"warpgroups": 4, "q_bytes": 128 << 10, "k_bytes": 96 << 10, "q_groups": 2}
    scores = shape | {"kernel": "scores", "keys_per_peak": 1} | tiling
    rows = [
        shape | {"kernel": "outliers", "device_seconds": 2e-6},
        scores | {"device_seconds": 3.25e-5},
        scores | {"keys_per_peak": 4},
    ]
    head, lines = table({"rows": rows})
    assert head[0] == "B·N·T·H"
    assert head[3:5] == ["keys per peak", "compute warpgroups"]
    assert list(lines) == [
        ["1·16·8192·128", "128", "queries", "", "", "", "", "", "2.0"],
        ["1·16·8192·128", "128", "scores", "1", "4", "128", "96", "2", "32.5"],
        ["1·16·8192·128", "128", "scores", "4", "4", "128", "96", "2", "wrong"],
    ]


def test_a_tiling_whose_scores_are_no_numbers_is_recorded_as_wrong(tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(selection, "_error", lambda found, wanted: float("nan"))
    with pytest.raises(ValueError, match="no tiling has the right scores"):
        selection.main(tmp_path / "out.json", shapes=(SHAPE,), blocks=(BLOCK,), density=0.9)
    _, *tilings = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(tilings) > 6
    assert not any("device_seconds" in row or row["largest_error"] for row in tilings)


@pytest.mark.parametrize("keys_per_peak", [1, 4])
def test_the_definition_is_the_logarithm_of_a_sum_over_keys(keys_per_peak):
    chosen, k = (
        jax.random.normal(jax.random.key(i), (1, x, 2, 64)) for i, x in ((0, 48), (1, 300))
    )
    found = selection._plain(chosen, k, BLOCK, keys_per_peak)
    assert found.shape == (1, 2, 3, 48)
    logits = jnp.einsum("rh,sh->rs", chosen[0, :, 1], k[0, 256:300, 1], precision="highest")
    weight = jnp.pad(jnp.exp2(logits), ((0, 0), (0, 84)))
    wanted = jnp.log(weight.reshape(48, keys_per_peak, -1).max(1).sum(1))
    assert jnp.allclose(found[0, 1, 2], wanted, atol=1e-4)


def test_blocks_that_the_kernels_do_not_take_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        selection.main(tmp_path / "out.json", blocks=(32,))
    assert capsys.readouterr().err == "--blocks are (32,); choose among (64, 128)\n"
