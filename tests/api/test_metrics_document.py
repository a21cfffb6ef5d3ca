"""docs/metrics.md <-> the code <-> vLLM's list: every metric is documented, with its type."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from api.app import all_routes
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.metric_families import Family
from api.metrics_merge import age_family
from api.service import Service

ROOT = Path(__file__).resolve().parents[2]
VLLM = json.loads((ROOT / "tests/data/vllm_metrics.json").read_text(encoding="utf-8"))


class Row(NamedTuple):
    """What the document says of a metric."""

    kind: str
    meaning: str
    vllm: str


def rows() -> Iterator[tuple[str, Row]]:
    for line in (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, kind, meaning, vllm = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                yield name, Row(kind, meaning, vllm)


def families() -> list[Family]:
    """All that an API server may tell."""
    service = Service(ApiConfig(served_model_names=("m",)), EngineClient(1))
    try:
        all_routes(service)  # some add their own
        return [*service.metrics.read(), age_family({0: 1.0})]
    finally:
        service.close()


ROWS = dict(rows())
FOUND = {f.name + "_total" * (f.kind == "counter"): f for f in families()}


def test_every_metric_is_documented_and_no_other() -> None:
    """By the name that a scraper sees, and its type."""
    assert ROWS.keys() == FOUND.keys()
    ours = {name: family for name, family in FOUND.items() if name.startswith("raywire:")}
    assert {name: ROWS[name].kind for name in ours} == {n: f.kind for n, f in ours.items()}
    assert all(len(row.meaning) > 8 for row in ROWS.values())


def test_names_that_vllm_has_are_shown_beside_ours() -> None:
    """The same behind the prefix; else there is none."""
    for name, family in FOUND.items():
        if name.startswith("raywire:"):
            bare = family.name.removeprefix("raywire:")
            shown = name.replace("raywire:", "vllm:")
            assert ROWS[name].vllm == (f"`{shown}`" if bare in VLLM["metrics"] else ""), name


def test_labels_that_the_code_knows_are_in_the_document() -> None:
    """Whoever writes a query needs them."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    for label in {label for family in FOUND.values() for label in family.label_names}:
        assert f"`{label}`" in text


def test_the_list_of_vllm_is_complete() -> None:
    """It was made from an installed package."""
    assert VLLM["vllm"] == "0.32.0"
    assert {"num_requests_running", "cache_config_info", "lora_requests_info"} <= {*VLLM["metrics"]}
