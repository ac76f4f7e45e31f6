"""The program that measures first calls: its cases, and one of them in this process."""

from __future__ import annotations

import jax
import pytest

from xsake.bench.suites import first_call
from xsake.cli import machine


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_variant_of_a_case_has_a_record(platform):
    """Names are distinct, and layers are compared with the same step without attention."""
    found = list(first_call.cases(platform, list(first_call.PROBLEMS)))
    names = [(case, variant) for _, case, variant, _ in found]
    assert len(set(names)) == len(names)
    steps = {(arguments[2], variant) for kind, _, variant, arguments in found if kind == "layers"}
    assert steps == {(count, by) for count in (2, 12) for by in ("xsake", "without")}


@pytest.mark.parametrize("variant", ["xsake", "jax.nn"])
def test_the_stages_add_up_to_the_first_call(variant):
    shape = first_call.Shape(1, 16, 2, 1, 8, "window and documents")
    record = first_call.measure("attention", (shape, variant))
    stages = [record[f"{x}_seconds"] for x in ("trace", "lower", "compile", "run")]
    assert all(x > 0 for x in stages)
    assert sum(stages) == pytest.approx(record["first_call_seconds"])


def test_doctor_says_whether_compiled_programs_are_kept(tmp_path):
    assert machine.compilation_cache().startswith("off; JAX_COMPILATION_CACHE_DIR")
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert machine.compilation_cache() == f"on: {tmp_path}"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
