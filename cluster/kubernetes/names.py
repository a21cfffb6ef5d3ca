"""What things are called on Kubernetes: labels, names, ports, places in a container. Shared by what
is rendered and what is checked."""

import importlib.metadata

APP = "raywire"
APP_LABEL = "app.kubernetes.io/name"
"""On every pod of ours; Service, NetworkPolicy and budget choose by it."""

ROLE_LABEL = "raywire.io/role"
"""head or worker."""

GATEWAY_LABEL = "raywire.io/gateway"
"""Pods that may send requests have it, with the value `true`; whichever namespace they are in."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Of a RayJob or RayCluster: Kueue lets it wait until there is room for all of it."""

ENTRYPOINT_ANNOTATION = "raywire.io/entrypoint"
"""Of a RayCluster: the job to submit to it."""

ACCEPTED_ANNOTATION = "raywire.io/accepted-findings"
"""`rule: reason`, one a line: what `raywire lint k8s` shall report and not fail for."""

KEYS_SECRET = "raywire-keys"
API_KEYS = "api-keys"
"""Key of that Secret: one API key a line."""
METRICS_KEY = "metrics-key"
"""Key of that Secret: what Prometheus shows."""
HUB_TOKEN = "hub-token"
"""Key of that Secret, which may be missing: for models of the hub that ask for one."""

TLS_SECRET = "raywire-tls"
"""A Secret of the type kubernetes.io/tls, where the server speaks HTTPS itself."""
CERTIFICATE = "tls.crt"
PRIVATE_KEY = "tls.key"

KEYS_FOLDER = "/etc/raywire/keys"
TLS_FOLDER = "/etc/raywire/tls"
CACHE_FOLDER = "/var/cache/raywire"

GCS_PORT = 6379
DASHBOARD_PORT = 8265
CLIENT_PORT = 10001
"""Ray Client listens there. Nobody needs it, and all of Ray's ports run code."""
METRICS_PORT = 8080

CONTAINER = "ray"


def ray_version() -> str:
    """What is installed here: head, workers and driver have to have the same."""
    return importlib.metadata.version("ray")
