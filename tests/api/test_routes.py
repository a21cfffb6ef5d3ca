"""Every route of vLLM is served, or documented as absent: the walk over its list.

tests/data/vllm_routes.json  <->  the application  <->  docs/api.md, "Routes"
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

import pytest

from api.app import all_routes
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.keys import AccessConfig, Keys
from api.routes import unserved
from api.service import Service

ROOT = Path(__file__).resolve().parents[2]
VLLM = json.loads((ROOT / "tests/data/vllm_routes.json").read_text(encoding="utf-8"))["routes"]


class Row(NamedTuple):
    """What the documents say of a route."""

    here: Literal["yes", "refused", "no"]
    vllm: Literal["always", "on request", "no"]
    note: str


def _rows() -> Iterator[tuple[str, Row]]:
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("\n## Routes\n")[2]
    for line in section.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            routes, here, vllm, note = (cell.strip() for cell in line.strip("|").split("|"))
            for route in re.findall(r"`([A-Z]+ /[^`]*)`", routes):
                yield route, Row(cast("Literal['yes']", here), cast("Literal['no']", vllm), note)


ROWS = dict(_rows())


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, bool]]:
    """Method and path of each route, and whether it is only there to refuse."""
    keys = AccessConfig(admin=Keys(hashes=(b"h",)))  # with all routes there may be
    config = ApiConfig(served_model_names=("m",), access=keys, profile_dir="p")
    service = Service(config, EngineClient(1))
    refusing = {route.path for route in unserved.routes(service)}
    yield {
        f"{method} {re.sub(r':[a-z]+}', '}', route.path)}": route.path in refusing
        for route in all_routes(service)
        for method in route.methods
    }
    service.close()


def test_every_route_has_one_row(served: dict[str, bool]) -> None:
    """Those of vLLM and ours, and no others."""
    listed = [route for route, _ in _rows()]
    assert len(listed) == len(ROWS)
    assert ROWS.keys() == VLLM.keys() | served.keys()


def test_rows_say_what_there_is(served: dict[str, bool]) -> None:
    """Served, refused with a reason, or absent: as the application has it."""
    shown = {route: row.here for route, row in ROWS.items() if row.here != "no"}
    assert shown == {route: "refused" if is_bad else "yes" for route, is_bad in served.items()}


def test_rows_say_what_vllm_has() -> None:
    """By its own list."""
    for route, row in ROWS.items():
        condition = VLLM.get(route, "no")
        expected = {"by default": "always", "no": "no"}.get(condition, "on request")
        assert row.vllm == expected, route


def test_what_is_absent_has_a_reason() -> None:
    """In a few words."""
    assert all(len(row.note) > 5 for row in ROWS.values() if row.here != "yes")


def test_codes_of_errors_are_in_the_documents() -> None:
    """All that a route or the edge may answer with."""
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    described = set(re.findall(r"`([a-z_]+)`", section.partition("\n## ")[0]))
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "api").rglob("*.py"))
    used = {code for text in sources for code in re.findall(r'code="([a-z_]+)"', text)}
    assert used - described == set()
