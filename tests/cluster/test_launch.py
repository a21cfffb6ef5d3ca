"""What `cluster/launch.py` hands to whom. That it starts and stops is in tests/integration."""

from pathlib import Path

from cluster import environment, launch
from tests.helpers.wires import ipc_wires


def test_a_slow_step_is_no_hang_if_the_operator_allows_it(tmp_path: Path) -> None:
    """The API server's patience follows the executors' timeout, and ends after it."""
    variables = environment.read({"RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "600"})
    client = launch.make_client(ipc_wires(tmp_path), 1, variables)
    assert client.step_limit_s > variables.execute_model_timeout_s == 600
