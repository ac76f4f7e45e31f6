"""The density that a batch of packed documents visits is that of its masks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.hads.test_documents import T, inputs, packed, plan_of
from xsake import BlockMask, masks
from xsake.model import PRESETS
from xsake.train.config import Config, Data
from xsake.train.planning import visited_density


def config(separate=True):
    model = dataclasses.replace(PRESETS["tiny"], context=1024)
    return Config(model=model, data=Data(separate=separate, length=T))


@pytest.mark.parametrize("selector", ["static", "gaussian"])
def test_the_visited_density_is_what_the_masks_list(selector):
    ids, (q, k) = packed(1), inputs(1)
    plan = plan_of(selector)
    found = [plan.mask(layer, q, k, segment_ids=ids).density() for layer in range(2)]
    assert visited_density(config(), plan, ids) == pytest.approx(np.mean(found), abs=1e-6)
    assert visited_density(config(), plan, ids) < plan.density


def test_dense_attention_visits_blocks_within_documents_or_all_without_separate():
    ids = np.repeat(np.arange(8), [200, 17, 300, 1, 130, 90, 250, 12])[None]
    rule = masks.causal() & masks.documents(jnp.asarray(ids))
    mask = BlockMask.from_rule(rule, (1000, 1000), batch=1)
    found = visited_density(config(), None, ids)
    assert found == pytest.approx(float(mask.density()), abs=1e-6)
    assert found < 1
    assert visited_density(config(separate=False), None, ids) == 1
