"""The public JSON-Schema-Test-Suite: how much of JSON Schema structured output can promise."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers import json_schema_suite
from tests.helpers.json_schema_suite import Tally

pytestmark = pytest.mark.slow

NUM_INSTANCES = 1257
NUM_RIGHT = 567
NUM_REFUSED_VALID = 22

WHOLLY_UNSUPPORTED = {
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties"),
    *("if-then-else", "not", "dynamicRef", "refRemote", "defs", "vocabulary"),
}
"""Files of the suite of which no schema is compiled; `defs` are schemas of schemas."""


@pytest.fixture(scope="module")
def tallies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tally]:
    try:
        archive = json_schema_suite.fetch(tmp_path_factory.mktemp("suite"))
    except (subprocess.SubprocessError, StopIteration) as error:
        pytest.skip(f"the suite cannot be downloaded: {error}")
    return json_schema_suite.run(archive)


def test_nothing_invalid_is_ever_accepted(tallies: dict[str, Tally]) -> None:
    """What is generated under a schema that was not refused is valid under it."""
    assert not any(each.accepted_invalid for each in tallies.values())


def test_the_published_rates_hold(tallies: dict[str, Tally]) -> None:
    """`docs/api.md` has them, and each file."""
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    assert whole.num_supported + whole.num_unsupported == NUM_INSTANCES
    assert whole.num_right >= NUM_RIGHT
    assert len(whole.refused_valid) <= NUM_REFUSED_VALID
    assert {name for name, each in tallies.items() if not each.num_supported} == WHOLLY_UNSUPPORTED
    row = json_schema_suite.table(tallies).splitlines()[-1]
    published = Path("docs/api.md").read_text(encoding="utf-8")
    for count in row.split("|")[2:-1]:
        assert count.strip() in published, row
