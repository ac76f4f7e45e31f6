"""Every figure in README and docs comes from a result file."""

import re
from pathlib import Path

import pytest

from tools import tables as report

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A number with a unit of something measured. Sizes that are chosen (tokens, heads, bytes of an
# argument) and ratios that define something are not figures.
FIGURE = re.compile(
    r"\d[\d,.]*\s?(?:TFLOP/s|GFLOP/s|tokens/s|GB/s|TB/s|µs|ms\b|seconds\b|minutes\b|"
    r"(?:×|times) (?:faster|slower))"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_result_files_say(page):
    text = page.read_text()
    assert report.filled(text, ROOT / "benchmarks" / "results") == text, (
        f"run `python -m tools.tables {page.relative_to(ROOT)}`"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_stands_outside_a_table(page):
    found = FIGURE.findall(report.outside(page.read_text()))
    assert not found, f"{page.name} states {found} without a result file"


def test_a_typed_figure_is_found():
    assert FIGURE.findall("it reaches 612 TFLOP/s")
    assert FIGURE.findall("in 3.5 ms")
    page = "<!-- table hopper hopper-2026-11-17.json -->\n999 TFLOP/s\n<!-- end -->"
    assert "999" not in report.filled(page, ROOT / "benchmarks" / "results")
    assert not report.outside(page)
