"""What the kubelet asks a pod, as shell commands. Pure.

A pod's readiness cannot wait for the server: the operator submits the job, which is the server,
once the pods are ready. And a head that is not ready must stay reachable for its workers, or a
drain would cut them off. So the probes ask Ray first, and the server if it is there:

    startup     Ray has come up; the others wait for it
    readiness   and nothing listens on the HTTP port yet, or /ready says 200: a server that loads,
                drains or sheds load gets no traffic
    liveness    and nothing listens, or /live does not say 503: a restart is the remedy for a core
                that is dead or hangs, and for nothing else

Workers have no server; Ray answers for them, and the head for what runs on them.
"""

from dataclasses import dataclass
from typing import Any

AGENT_PORT = 52365
"""Where Ray's agent of each node tells of its health."""

_TIMEOUT_S = 4
"""Of one question; a probe may ask two."""


@dataclass(frozen=True, slots=True)
class Probe:
    command: str
    period_s: int
    num_failures: int
    """In a row, before it counts."""
    initial_delay_s: int = 0

    def to_manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = {
            "exec": {"command": ["bash", "-c", self.command]},
            "periodSeconds": self.period_s,
            "timeoutSeconds": 2 * _TIMEOUT_S + 2,
            "failureThreshold": self.num_failures,
        }
        if self.initial_delay_s:
            manifest["initialDelaySeconds"] = self.initial_delay_s
        return manifest


def ray_is_up() -> str:
    """Exits with 0 if Ray's own processes of this node are well."""
    return f"curl -sf -m {_TIMEOUT_S} http://127.0.0.1:{AGENT_PORT}/api/healthz >/dev/null"


def _status_of(path: str, port: int, *, is_tls: bool) -> str:
    """Prints the status; 000 if nobody listens, or nobody answers in time. Whose certificate it is
    does not matter here: it names the server, not the loopback address."""
    scheme, flags = ("https", "-kso") if is_tls else ("http", "-so")
    url = f"{scheme}://127.0.0.1:{port}{path}"
    return f"curl {flags} /dev/null -m {_TIMEOUT_S} -w '%{{http_code}}' {url} || true"


def _is_listening(port: int) -> str:
    return f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null"


def can_take_requests(port: int, *, is_tls: bool = False) -> str:
    """Exits with 0 while a server on `port` takes requests, or none is there."""
    return (
        f"{ray_is_up()} && {{ ! {_is_listening(port)} ||"
        f' [ "$({_status_of("/ready", port, is_tls=is_tls)})" = 200 ]; }}'
    )


def needs_no_restart(port: int, *, is_tls: bool = False) -> str:
    """Exits with 0 unless Ray, or a server on `port`, is beyond help. One that listens and does not
    answer counts as such: /live needs nobody but the event loop."""
    return (
        f"{ray_is_up()} && {{ ! {_is_listening(port)} ||"
        f' case "$({_status_of("/live", port, is_tls=is_tls)})" in 000|503) false;; esac; }}'
    )


def head_probes(port: int, *, is_tls: bool = False) -> dict[str, Any]:
    """Of the pod that the server runs in."""
    ready = Probe(can_take_requests(port, is_tls=is_tls), period_s=5, num_failures=2)
    alive = Probe(needs_no_restart(port, is_tls=is_tls), period_s=10, num_failures=6)
    return {
        "startupProbe": Probe(ray_is_up(), period_s=5, num_failures=60).to_manifest(),
        "readinessProbe": ready.to_manifest(),
        "livenessProbe": alive.to_manifest(),
    }


def worker_probes() -> dict[str, Any]:
    """Of a pod that engine cores run in."""
    return {
        "startupProbe": Probe(ray_is_up(), period_s=5, num_failures=60).to_manifest(),
        "readinessProbe": Probe(ray_is_up(), period_s=5, num_failures=4).to_manifest(),
        "livenessProbe": Probe(ray_is_up(), period_s=10, num_failures=6).to_manifest(),
    }
