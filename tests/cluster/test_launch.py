"""What `cluster/launch.py` hands to whom. That it starts and stops is in tests/integration."""

from cluster import environment, launch
from cluster.addresses import ipc_folder


def test_a_slow_step_is_no_hang_if_the_operator_allows_it() -> None:
    """The API server's patience follows the executors' timeout, and ends after it."""
    variables = environment.read({"RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "600"})
    with ipc_folder(None) as folder:
        client = launch.make_client(folder, 1, variables)
    assert client.step_limit_s > variables.execute_model_timeout_s == 600
