"""Writes docs/notes/test-claims.md: what became of every test of an earlier commit.

    python -m tools.test_claims COMMIT

A test is a function `test_…`. One whose name is gone is looked up by its body: the function of
today that shares most of its tokens stands beside it.
"""

from __future__ import annotations

import ast
import collections
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path("docs/notes/test-claims.md")
HEAD = """# Every test of an earlier commit, and where it is now

Written by `python -m tools.test_claims {commit}`, which compares `{commit}` with the working tree.
A test whose name changed is found by its body; the share of tokens that both have is beside it.
`slow`: `make test-slow` only; `some slow`: some of its cases, as far as its decorators say so.
[tests.md](tests.md) has all that moved, with the reasons.

| | tests (functions) |
|---|---|
| before | {before} |
| with the same name now | {same} |
| with another name now | {renamed} |
| now | {now} |
"""

# Tests that were written anew; their bodies have little in common.
REWRITTEN = {
    "test_a_command_that_cannot_run_says_why": "test_a_wrong_call_is_one_sentence",
    "test_eight_devices_train_as_one_does": (
        "test_training_on_eight_devices_equals_training_on_one"
    ),
    "test_mistakes_are_told_in_a_sentence": "test_user_errors_are_one_sentence",
    "test_more_devices_than_there_are_is_refused": "test_sizes_that_do_not_fit_raise",
    "test_plot_gives_axes": "test_a_plot_names_its_head_has_a_legend_and_is_not_clipped",
}


class Test(NamedTuple):
    """A test function."""

    file: str
    name: str
    tokens: collections.Counter[str]
    slow: str  # "", "slow" or "some slow"


def main(commit: str) -> None:
    """Writes the page."""
    listed = _git("ls-tree", "-r", "--name-only", commit, "tests").split()
    listed = [file for file in listed if is_test(file)]
    before = [x for file in listed for x in tests_of(file, _git("show", f"{commit}:{file}"))]
    files = sorted(str(x) for x in Path("tests").rglob("*.py") if is_test(str(x)))
    now = [x for file in files for x in tests_of(file, Path(file).read_text())]
    by_name: dict[str, list[Test]] = {}
    for test in now:
        by_name.setdefault(test.name, []).append(test)
    lines: list[str] = []
    module, renamed = "", 0
    for test in before:
        if test.file != module:
            module = test.file
            lines += ["", f"## {module}", "", "| test | now | |", "|---|---|---|"]
        candidates = by_name.get(REWRITTEN.get(test.name, test.name), [])
        same = max(candidates or now, key=lambda x: likeness(test, x))
        is_same = same.name == test.name
        name = "" if is_same else f"`{same.name}` ({likeness(test, same):.2f})"
        renamed += not is_same
        place = "" if same.file == test.file else f"`{same.file}` "
        lines.append(f"| `{test.name}` | {place}{name} | {same.slow} |")
    head = HEAD.format(
        commit=commit, before=len(before), same=len(before) - renamed, renamed=renamed, now=len(now)
    )
    PAGE.write_text(head + "\n".join(lines) + "\n")


def is_test(file: str) -> bool:
    """Whether pytest collects it."""
    return Path(file).name.startswith("test_") and file.endswith(".py")


def tests_of(file: str, source: str) -> list[Test]:
    """The test functions of a file."""
    return [
        Test(file, node.name, tokens_of(node), slow_of(node))
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def tokens_of(test: ast.FunctionDef) -> collections.Counter[str]:
    """Names, attributes and constants of its body, and of what it is parametrised with."""
    found: collections.Counter[str] = collections.Counter()
    for part in [*test.decorator_list, *test.body]:
        for node in ast.walk(part):
            for field in ("id", "attr", "arg", "value"):
                value = getattr(node, field, None)
                if isinstance(value, str | int | float):
                    found.update(str(value).split())
    return found


def slow_of(test: ast.FunctionDef) -> str:
    """Whether it is marked slow, or some of its parameters are."""
    marks = [ast.unparse(x) for x in test.decorator_list]
    if "pytest.mark.slow" in marks:
        return "slow"
    return "some slow" if any("mark.slow" in x for x in marks) else ""


def likeness(one: Test, two: Test) -> float:
    """The share of tokens that both have."""
    common = (one.tokens & two.tokens).total()
    return common / max(one.tokens.total(), two.tokens.total(), 1)


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
