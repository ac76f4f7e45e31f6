import dataclasses

import numpy as np
import pytest

from tests.hads.test_plan import profile_of
from xsake.hads import Profile, make, worst_of


def test_a_head_that_one_kind_of_text_needs_keeps_its_blocks():
    """On the second kind head 1 of layer 0 costs a hundred times more; budgets by it alone or by
    the worst give it blocks that the first kind alone takes away."""
    prose, look_up = profile_of(seed=1), profile_of(seed=1)
    cost = look_up.statistics.cost["kl"]["mean_query"]
    cost[0, 1] *= 100
    both = worst_of({"text": prose, "retrieval": look_up})
    np.testing.assert_array_equal(both.cost("kl", "mean_query"), cost)
    alone, worst, wanted = (make(x, 0.6, "kl").counts for x in (prose, both, look_up))
    assert worst[0, 1].sum() > alone[0, 1].sum()
    np.testing.assert_array_equal(worst, wanted)
    assert worst.sum() == alone.sum()


def test_statistics_are_means_over_documents_and_facts_name_the_kinds(tmp_path):
    prose, look_up = profile_of(seed=1), profile_of(seed=2)
    look_up = dataclasses.replace(
        look_up, facts=dataclasses.replace(look_up.facts, documents=12, data_hash="other")
    )
    both = worst_of({"text": prose, "retrieval": look_up})
    want = (prose.statistics.mass + 3 * look_up.statistics.mass) / 4
    np.testing.assert_allclose(both.statistics.mass, want, rtol=1e-5)
    assert both.facts.kinds == "4 of text, 12 of retrieval"
    assert both.facts.documents == 16
    assert both.facts.data_hash not in (prose.facts.data_hash, look_up.facts.data_hash)
    both.save(tmp_path / "profile")
    assert Profile.load(tmp_path / "profile").facts == both.facts
    assert make(both, 0.6).terms.notes[0].endswith("several kinds: 4 of text, 12 of retrieval")


def test_kinds_that_were_not_calibrated_alike_are_refused():
    prose, look_up = profile_of(), profile_of()
    other = dataclasses.replace(
        look_up, facts=dataclasses.replace(look_up.facts, model_hash="another")
    )
    with pytest.raises(ValueError, match="differ in model_hash: a model and another"):
        worst_of({"text": prose, "retrieval": other})
    del look_up.statistics.cost["kl"]["pooled"]
    with pytest.raises(ValueError, match="calibrate them with the same selectors"):
        worst_of({"text": prose, "retrieval": look_up})
    with pytest.raises(ValueError, match="needs at least one kind, got none"):
        worst_of({})
