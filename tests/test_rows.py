"""Every fault and every attack that the documents speak of has a test, or a written reason.

A test says what it proves by a mark (`tests/rows.py`), so none can be renamed or dropped without
its promise being missed here.
"""

import re

from tests.rows import DOCUMENT, REASONS, ROWS, SECURITY, marked_tests, proofs, section


def test_each_row_is_proved_or_has_a_reason() -> None:
    """All 92, and none has both."""
    assert len(ROWS) == 92
    assert ROWS.keys() - proofs().keys() - REASONS.keys() == set()
    assert (proofs().keys() | REASONS.keys()) - ROWS.keys() == set()
    assert proofs().keys() & REASONS.keys() == set()


def test_the_documents_name_the_tests() -> None:
    """If this fails because a mark has changed: `python -m tests.rows --write`."""
    assert section("F") in DOCUMENT.read_text(encoding="utf-8")
    assert section("S") in SECURITY.read_text(encoding="utf-8")


def test_marks_are_found_wherever_pytest_finds_them() -> None:
    """On a function, on one of its cases, and on the whole module; and not on helpers."""
    source = """
pytestmark = [pytest.mark.slow, pytest.mark.row("F-05")]

@pytest.mark.row("F-01", "F-03")
def test_one() -> None: ...

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.row("S-01"))])
async def test_two(n: int) -> None: ...

@pytest.mark.row("F-09")
def helper() -> None: ...
"""
    assert sorted(marked_tests(source)) == [
        ("F-01", "test_one"),
        ("F-03", "test_one"),
        ("F-05", "test_one"),
        ("F-05", "test_two"),
        ("S-01", "test_two"),
    ]


def test_each_fault_is_in_the_document() -> None:
    """With what happens and within which time, one line of the table each."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (F-\d+) \| (.+?) \| (.+?) \|(.*?)\|$", text, re.MULTILINE)
    assert [(row, what) for row, what, *_ in rows] == [
        (row, what) for row, what in ROWS.items() if row.startswith("F")
    ]
