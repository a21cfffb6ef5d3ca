"""How long a server may drain where it is a job of a Ray cluster. Pure; used by `launch`.

`ray job stop` sends SIGTERM, waits for 3 s or what RAY_JOB_STOP_WAIT_TIME_S of the job's own
environment says, and then kills. A drain that is cut by that leaves clients without an answer, so
it ends by itself before.
"""

from cluster.environment import RAY_STOP_VARIABLE, Environment

_MIN_RESERVE_S = 1.0
_MAX_RESERVE_S = 5.0
"""Kept back from the wait, a third of it within these bounds: engine cores end after the drain."""


def drain_s(shutdown_timeout_s: float, environment: Environment) -> float:
    """How long running requests have after a stop.

    Args:
        shutdown_timeout_s: `--shutdown-timeout`.
        environment: of the command.
    """
    if not environment.is_ray_job:
        return shutdown_timeout_s
    wait_s = environment.ray_job_stop_wait_s
    reserve_s = min(_MAX_RESERVE_S, max(_MIN_RESERVE_S, wait_s / 3))
    return min(shutdown_timeout_s, max(0.0, wait_s - reserve_s))


def stop_advice(shutdown_timeout_s: float, environment: Environment) -> str | None:
    """What to tell an operator whose drain is shorter than he asked for; None if it is not."""
    granted_s = drain_s(shutdown_timeout_s, environment)
    if granted_s == shutdown_timeout_s:
        return None
    return (
        f"`ray job stop` kills this server {environment.ray_job_stop_wait_s:g} s after it has asked"
        f" it to stop, so requests get {granted_s:g} s to finish instead of"
        f" {shutdown_timeout_s:g}: submit the job with {RAY_STOP_VARIABLE} in"
        " --runtime-env-json's env_vars"
    )
