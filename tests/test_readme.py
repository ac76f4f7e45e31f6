"""Every ```python block of README.md and docs/*.md runs, in order, in one namespace per page.

Blocks that are not meant to run are fenced as ```text, ```console, …; all others run.
"""

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,})\s*(?P<language>[^\s`{]*)[^`]*")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The python blocks of a Markdown text, each with the line number of its first line.

    A closing fence has at least as many marks and no info string. The indentation of the opening
    fence (a block inside a list) is removed from every line.
    """
    blocks = []
    opened = None  # the open fence: (match, line number)
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.fullmatch(line)
        if opened is None:
            if fence:
                opened, lines = (fence, number), []
            continue
        start, start_number = opened
        closes = fence and not fence["language"] and fence["marks"].startswith(start["marks"])
        if not closes:
            indent = len(start["indent"])
            lines.append(line[indent:] if not line[:indent].strip() else line)
            continue
        if start["language"].lower() in ("python", "py", "python3"):
            blocks.append((start_number + 1, "\n".join(lines) + "\n"))
        opened = None
    if opened is not None:
        raise ValueError(f"the fence of line {opened[1]} is never closed: add a closing fence")
    return blocks


def run(blocks: list[tuple[int, str]], filename: str, module: types.ModuleType) -> None:
    """Executes blocks in the module's namespace; tracebacks name the page and its line."""
    for line, source in blocks:
        code = compile("\n" * (line - 1) + source, filename, "exec")
        exec(code, vars(module))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=() if page == README else pytest.mark.second_python,
        )
        for page in PAGES
    ],
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    if page == README:
        assert blocks, "README.md shows no ```python block; its first screen has an example"
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look there
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)  # what a block writes does not land in the repository
    run(blocks, str(page.relative_to(ROOT)), module)


def test_the_mask_in_the_readme_is_what_the_example_prints(capsys):
    """README's first ```text block equals the output of its first python block."""
    text = README.read_text(encoding="utf-8")
    drawn = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    run(python_blocks(text)[:1], "README.md", types.ModuleType("page"))
    assert capsys.readouterr().out == drawn[1]


def test_only_python_fences_are_found_with_their_line_numbers():
    text = (
        "# Title\n\n```python\nx = 1\n```\n\n```text\nnot python (\n```\n"
        "- a list\n  ```py\n  if x:\n      x += 1\n  ```\n"
        "````python\ny = '''\n```\n'''\n````\n"
    )
    assert python_blocks(text) == [
        (4, "x = 1\n"),
        (12, "if x:\n    x += 1\n"),
        (16, "y = '''\n```\n'''\n"),
    ]


def test_blocks_share_one_namespace_and_errors_name_the_line():
    module = types.ModuleType("page")
    with pytest.raises(ZeroDivisionError) as caught:
        run(python_blocks("```python\nx = 0\n```\n\n```python\n\n1 / x\n```\n"), "P.md", module)
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("P.md", 7)


def test_an_unclosed_fence_raises():
    with pytest.raises(ValueError, match="the fence of line 2 is never closed"):
        python_blocks("text\n```python\nx = 1\n")
