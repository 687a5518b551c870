"""docs/cases.md and the tests here tell of the same rows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "cases.md"

LAST = {"S": 7, "A": 48, "B": 25, "C": 22, "D": 23}
"""The last row of each section."""

GAPS = {"S": (), "A": (3, 7, 11, 15, 26, 43), "B": (1, 5), "C": (3, 5, 9), "D": (2, 3, 18)}
"""Numbers that no row has."""

ROWS = [
    f"{section}{number}"
    for section, last in LAST.items()
    for number in range(1, last + 1)
    if number not in GAPS[section]
]

_ROW = re.compile(r"^\| ([A-Z]\d+) \|(.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)`")
_REPORT = re.compile(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|blob)/\S+\)")
_REASON = 20
"""Characters that a reason has at least."""


def table() -> dict[str, list[str]]:
    """The other cells of each row."""
    return {
        row: [cell.strip() for cell in cells.split(" | ")]
        for row, cells in _ROW.findall(PAGE.read_text())
    }


def names() -> Iterator[str]:
    """The names of all tests in this folder but the ones of this module."""
    for module in sorted(HERE.glob("test_*.py")):
        if module != Path(__file__):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield node.name


def row_of(test: str) -> str:
    """`test_a16_one_flipped_bit` shows row A16."""
    return test.split("_")[1].upper()


def test_every_row_is_there_once_and_in_order() -> None:
    rows = [row for row, _ in _ROW.findall(PAGE.read_text())]
    assert rows == ROWS


def test_every_row_has_its_report_and_a_test_or_a_reason_and_none_is_open() -> None:
    known = set(names())
    for row, (report, wrong, shown) in table().items():
        assert _REPORT.search(report) or report == "none was found", row
        assert len(wrong) > _REASON, row
        named = _TEST.findall(shown)
        assert set(named) <= known, row
        assert all(row_of(test) == row for test in named), row
        assert named or len(shown) > _REASON, row
        assert not re.search(r"\bopen:", shown), row


def test_every_test_is_in_its_row() -> None:
    named = {row: set(_TEST.findall(shown)) for row, (_, _, shown) in table().items()}
    for test in names():
        assert test in named[row_of(test)], test
