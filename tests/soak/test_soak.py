"""The soak run itself: a short one in `make test-slow`; `make soak` is half an hour."""

from pathlib import Path

import pytest

from cluster.chaos.plan import make_plan
from tests.soak.parts import PARTS, Part
from tests.soak.report import as_json, markdown
from tests.soak.run import run_part

pytestmark = pytest.mark.slow


@pytest.mark.row("F-54")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part", [part for part in PARTS if part.name == "scripted, exit"], ids=lambda part: part.mode
)
def test_mixed_load_survives_faults(part: Part, tmp_path: Path) -> None:
    """No wrong answer, no hang, nothing left; a request fails only with its server."""
    plan = make_plan(11, 60.0, 20.0, part.kinds)
    outcome = run_part(part, 11, plan, 60.0, tmp_path)

    assert outcome.complaints == []
    assert len(outcome.faults) == 3
    assert outcome.num_compared > 20
    assert f"**{part.name}**" in markdown(as_json([outcome], 11, 1.0))
