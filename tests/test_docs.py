"""Every measured number in README and docs comes from a result file; links lead somewhere."""

import collections
import json
import re
from pathlib import Path

import pytest

from tools import api, tables

ROOT = Path(__file__).parent.parent
ENDS = (".py", "/__init__.py")  # of a module, of a package
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)
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
    (tmp_path / "x.json").write_text(json.dumps(report | {"commit": commit, "xla_flags": "--f=0"}))
    assert "JAX 0.11.2, `XLA_FLAGS=--f=0`, commit" in tables.fill(page, tmp_path)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: collections.Counter[str] = collections.Counter()
    for heading in re.findall(r"^#+ +(.*?) *$", FENCED.sub("", text), re.MULTILINE):
        found[re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")] += 1
    return {
        f"{slug}-{i}" if i else slug  # the second heading with the same words ends with -1
        for slug, count in found.items()
        for i in range(count)
    }


def wrong_anchors(page: Path) -> list[str]:
    """Links of the page to a heading that its target does not have."""
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", FENCED.sub("", page.read_text()))
    return [
        f"{target}#{anchor}"
        for target, anchor in links
        if "://" not in target
        and anchor not in anchors((page.parent / target if target else page).read_text())
    ]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_to_headings_of_the_pages(page):
    wrong = wrong_anchors(page)
    assert not wrong, f"{page.name} links to {wrong}, which are no headings"


def test_a_wrong_anchor_is_detected(tmp_path):
    other = "# Bias beside `jax.nn`: runs\n```\n# Code\n```\n## A\n## A\n"
    (tmp_path / "other.md").write_text(other)
    page = tmp_path / "page.md"
    right = "[a](other.md#bias-beside-jaxnn-runs) [b](other.md#a-1) [c](#here) [d](https://x.y/#z)"
    page.write_text(f"# Here\n{right} [e](other.md#code) [f](#there) [g](other.md#a-2)\n")
    assert wrong_anchors(page) == ["other.md#code", "#there", "other.md#a-2"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_and_figures_lead_to_files_of_the_repository(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [x for x in targets if "://" not in x and not (page.parent / x).exists()]
    assert not missing, f"{page.name} links to {missing}, which do not exist"


def test_the_api_reference_names_modules_that_exist():
    modules = [x.replace(".", "/") for x in api.MODULES if not x.startswith("!")]
    missing = [x for x in modules if not any((ROOT / f"{x}{end}").is_file() for end in ENDS)]
    assert not missing
