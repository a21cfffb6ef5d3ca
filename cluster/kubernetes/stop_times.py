"""How long a server on Kubernetes has to end. Shared by what is rendered and what is checked. Pure.

    head      pre-stop 5 s | drain: --shutdown-timeout | engine cores and Ray end: 30 s
    worker    its hook waits for the head's streams, as long as the head has     | Ray ends: 30 s

Kubernetes counts from the beginning of the hook, and kills what still runs behind the last bar.
"""

import math

PRE_STOP_S = 5
"""Between leaving the Service and the drain: endpoints are taken out everywhere meanwhile."""
AFTER_DRAIN_S = 30
"""For the end of engine cores, and for Ray's."""


def job_stop_s(drain_s: float) -> int:
    """How long Ray waits for the driver to end."""
    return math.ceil(drain_s) + AFTER_DRAIN_S // 2


def head_grace_s(drain_s: float) -> int:
    """The least that the head has, and each of its workers."""
    return PRE_STOP_S + math.ceil(drain_s) + AFTER_DRAIN_S


def head_grace_told(drain_s: float) -> str:
    """That number, for people, and what it is made of."""
    return (
        f"{head_grace_s(drain_s)}: {PRE_STOP_S} until no endpoint leads here, {drain_s:g} for"
        f" running requests, {AFTER_DRAIN_S} for the end of engine cores and Ray"
    )


def worker_grace_s(head_grace_s: int) -> int:
    """What a worker has that is to end in order behind its head."""
    return head_grace_s + AFTER_DRAIN_S
