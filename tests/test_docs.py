"""Every measured number in README and docs comes from a result file; links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from tools import api, tables

ROOT = Path(__file__).parent.parent
ENDS = (".py", "/__init__.py")  # of a module, of a package
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A number with a unit of measurement. Configured sizes (tokens, heads, bytes of an argument) and
# ratios in definitions are exempt.
MEASURED = re.compile(
    r"\d[\d,.]*\s?(?:TFLOP/s|GFLOP/s|tokens/s|GB/s|TB/s|µs|ms\b|seconds\b|minutes\b|"
    r"(?:×|times) (?:faster|slower))"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_equal_what_the_result_files_give(page):
    text = page.read_text()
    assert tables.fill(text, ROOT / "benchmarks" / "results") == text, (
        f"run `python -m tools.tables {page.relative_to(ROOT)}`"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_measured_number_is_outside_a_table(page):
    found = MEASURED.findall(tables.without_tables(page.read_text()))
    assert not found, f"{page.name} has measured numbers {found} outside a generated table"


def test_a_hand_written_number_is_detected():
    assert MEASURED.findall("it reaches 612 TFLOP/s")
    assert MEASURED.findall("in 3.5 ms")
    page = "<!-- table hopper hopper-2026-11-17.json -->\n999 TFLOP/s\n<!-- end -->"
    assert "999" not in tables.fill(page, ROOT / "benchmarks" / "results")
    assert not tables.without_tables(page)


@pytest.mark.parametrize("commit", ["aa96d63a9bb1c0ffee", "eb3619a"])
def test_a_table_says_if_files_differed_from_the_commit(tmp_path, commit):
    report = {
        "machine": {"device": "NVIDIA H200"},
        "versions": {"jax": "0.11.2"},
        "date": "2026-11-18",
        "command": "xsake bench",
        "results": [],
    }
    page, lines = "<!-- table hopper-costs x.json -->\n<!-- end -->", []
    for mark in ("", "+"):
        (tmp_path / "x.json").write_text(json.dumps(report | {"commit": commit + mark}))
        lines.append(tables.fill(page, tmp_path))
    assert f"commit {commit[:12]}, 2026" in lines[0]
    assert f"commit {commit[:12]}+ (with changes), 2026" in lines[1]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_figures_lead_to_files_of_the_repository(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [x for x in targets if "://" not in x and not (page.parent / x).exists()]
    assert not missing, f"{page.name} links to {missing}, which do not exist"


def test_the_api_reference_names_modules_that_exist():
    modules = [x.replace(".", "/") for x in api.MODULES if not x.startswith("!")]
    missing = [x for x in modules if not any((ROOT / f"{x}{end}").is_file() for end in ENDS)]
    assert not missing
