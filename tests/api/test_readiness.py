"""What `/ready` says of an API server."""

from typing import Any, cast

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.readiness import assess
from api.service import Service


def test_load_is_shed_for_the_limit_that_was_reached() -> None:
    """Of prompt tokens too many may wait while few requests are in flight."""
    config = ApiConfig(served_model_names=("m",), max_num_queued_reqs=10, max_num_queued_tokens=100)
    service = Service(config, EngineClient(1))
    service.close()
    service.serve(cast(Any, None))
    service.metrics.flow.on_sent(120)

    found = assess(service)

    assert found.status == "shedding"
    assert found.reason == (
        "120 prompt tokens wait, of 100 that this API server lets wait (--max-num-queued-tokens)"
    )
