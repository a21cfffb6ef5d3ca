"""What is wrong with a Ray cluster, or with this machine's Ray: one line each, with a way out. Used
by `ray_session`.

Nothing here imports Ray.
"""

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence

from engine.errors import ConfigError

_REACH_TIMEOUT_S = 8.0
"""A node that does not take a TCP connection within it is taken for unreachable."""

OLDEST_RAY = (2, 55)
"""As `pyproject.toml` has it. Before 2.52 a web page could run code through the jobs API on the
loopback device (CVE-2025-62593), before 2.54 delete jobs (CVE-2026-27482)."""


def check_version(version: str) -> None:
    """Raise ConfigError where this Ray is too old. Packages may be, whatever was asked for."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if tuple(numbers) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise ConfigError(
            f"Ray {version} is too old, its jobs API can be attacked from a web page: install"
            f" 'ray[default]>={oldest}' on all nodes"
        )


def check_reachable(address: str) -> None:
    """Raise ConfigError unless something takes TCP connections at `host:port`. Ray would try for
    minutes, and then abort."""
    host, _, port = address.rpartition(":")
    try:
        if not port.isdecimal():
            raise OSError("that is no host:port")
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = "it does not answer" if isinstance(error, TimeoutError) else error
        raise ConfigError(
            f"no Ray cluster can be reached at {address}: {reason}; --ray-address is the head's"
            " host:port, 6379 unless `ray start --head` was told another"
        ) from error


_VERSIONS = re.compile(
    r"cluster was started with:\s*Ray: (\S+)\s*Python: (\S+)"
    r".*was started with:\s*Ray: (\S+)\s*Python: (\S+)",
    re.DOTALL,
)


def explain(error: BaseException, address: str) -> str:
    """What an operator should read of Ray's refusal: one line with a way out. Pure."""
    text = "\n".join(f"{type(each).__name__}: {each}" for each in _chain(error))
    if versions := _VERSIONS.search(text):
        return (
            "the Ray cluster at {} runs Ray {} with Python {}, and this command Ray {} with Python"
            " {}: all nodes and the command need the same Ray and the same minor version of"
            " Python".format(address, *versions.groups())
        )
    if "InvalidAuthToken" in text or "AuthenticationError" in text:
        return (
            f"the Ray cluster at {address} wants another token: set RAY_AUTH_MODE=token and"
            " RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on its head node"
        )
    cause = str([*_chain(error)][-1]).strip()
    if "Traceback" in cause:
        cause = cause.rpartition("\n")[2]
    return f"cannot use the Ray cluster at {address}: {' '.join(cause.split())[:500]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, …"""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def why_open(environ: Mapping[str, str], addresses: Sequence[str]) -> str | None:
    """What to say of a cluster that asks nobody for a token, where a network reaches it. Pure.

    Args:
        environ: of this process. Ray lets nobody in who does not have the cluster's token, so who
            is in without one knows that there is none.
        addresses: of the cluster's nodes.
    """
    if environ.get("RAY_AUTH_MODE", "disabled").lower() == "token":
        return None
    reachable = [each for each in addresses if not _is_loopback(each)]
    if not reachable:
        return None
    return (
        f"this Ray cluster asks for no token: whoever reaches its ports on {', '.join(reachable)}"
        " can run code on all of its nodes. Start Ray with RAY_AUTH_MODE=token and a secret"
        " RAY_AUTH_TOKEN on every node, and give the command the same"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False
