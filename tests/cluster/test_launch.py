"""What `cluster/launch.py` hands to whom. That it starts and stops is in tests/integration."""

from api.engine_client import EngineClient
from cluster import environment


def test_a_slow_step_is_no_hang_if_the_operator_allows_it() -> None:
    """The API server's patience follows the executors' timeout, and ends after it."""
    variables = environment.read({"RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "600"})
    client = EngineClient(step_timeout_s=variables.execute_model_timeout_s)
    assert client.step_limit_s > variables.execute_model_timeout_s == 600
