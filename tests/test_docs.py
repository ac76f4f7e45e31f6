"""Every measured number in README and docs comes from a result file; links lead somewhere."""

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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_figures_lead_to_files_of_the_repository(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [x for x in targets if "://" not in x and not (page.parent / x).exists()]
    assert not missing, f"{page.name} links to {missing}, which do not exist"


def test_the_api_reference_names_modules_that_exist():
    modules = [x.replace(".", "/") for x in api.MODULES if not x.startswith("!")]
    missing = [x for x in modules if not any((ROOT / f"{x}{end}").is_file() for end in ENDS)]
    assert not missing
