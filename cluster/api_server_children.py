"""API server processes as children of the command: started, heard, told, started anew.

Each has a listening socket of its own and a channel to the command, on which a thread listens.
Metrics are collected here (`metrics_hub`); what all other messages mean, and what follows when a
child is gone, is decided by `api_servers`, whose part this is.
"""

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from cluster.api_server_process import ApiServerConfig
from cluster.api_server_process import main as api_server_main
from cluster.channel import AnyMessage, Channel, Part, Scrape
from cluster.http_socket import join_group
from cluster.metrics_hub import MetricsHub
from cluster.supervisor import Child, Supervisor

logger = logging.getLogger(__name__)


class ApiServerChildren:
    """By client index.

    Args:
        configs: settings of each.
        http_sockets: one for each; they listen already.
        supervisor: has the processes.
        take: takes in a message, on the thread that listens to that child.
        on_garbled: called with index, epoch and why, once nobody listens to a child any more.
    """

    def __init__(
        self,
        configs: Sequence[ApiServerConfig],
        http_sockets: Sequence[socket.socket],
        supervisor: Supervisor,
        take: Callable[[int, AnyMessage], None],
        on_garbled: Callable[[int, int, str], None],
    ) -> None:
        self._configs = configs
        self._http_sockets = http_sockets
        self._address: tuple[str, int] = http_sockets[0].getsockname()[:2]
        self._supervisor = supervisor
        self._take = take
        self._on_garbled = on_garbled
        ends = [Pipe(duplex=True) for _ in configs]
        self.channels = [Channel(ours) for ours, _ in ends]
        self._their_ends = [theirs for _, theirs in ends]
        self._metrics = MetricsHub(self.channels)
        self._listeners: list[threading.Thread] = []

    def start(self) -> None:
        """Start them all. Returns when the processes exist."""
        self._supervisor.start(
            [
                _child(config, http_socket, connection)
                for config, http_socket, connection in zip(
                    self._configs, self._http_sockets, self._their_ends, strict=True
                )
            ],
            "spawn",
        )
        # The children's are to be the only ones: they close when those do.
        for http_socket in self._http_sockets:
            http_socket.close()
        for connection in self._their_ends:
            connection.close()
        self._supervisor.watch()
        self._metrics.start()
        self._listeners = [self._start_listener(index, 0) for index in range(len(self.channels))]

    def name(self, index: int) -> str:
        """As people find it, in the log and among processes."""
        return f"{self._configs[index].title} pid={self._supervisor.pids[index]}"

    # ------------------------------------------------------------------------------ messages

    def tell(self, index: int, message: AnyMessage) -> None:
        """One that is gone is told nothing."""
        self.channels[index].send(message)

    def tell_all(self, message: AnyMessage) -> None:
        """Everybody."""
        for channel in self.channels:
            channel.send(message)

    def tell_others(self, index: int, message: AnyMessage) -> None:
        """All but one."""
        for other, channel in enumerate(self.channels):
            if other != index:
                channel.send(message)

    def _start_listener(self, index: int, epoch: int) -> threading.Thread:
        listener = threading.Thread(
            target=self._listen,
            args=(index, epoch, self.channels[index]),
            name="api-server",
            daemon=True,
        )
        listener.start()
        return listener

    def _listen(self, index: int, epoch: int, channel: Channel) -> None:
        try:
            while True:
                self._sort(index, channel.receive())
        except EOFError:
            pass
        except Exception as error:  # of ours, or its messages cannot be read
            logger.warning("nobody listens to %s", self._configs[index].title, exc_info=True)
            why = f"cannot be followed: {type(error).__name__}: {error}"
            self._on_garbled(index, epoch, why)
        self._metrics.drop(index)

    def _sort(self, index: int, message: AnyMessage) -> None:
        match message:
            case Scrape(number):
                self._metrics.ask(index, number)
            case Part(families):
                self._metrics.take(index, families)
            case _:
                self._take(index, message)

    # ------------------------------------------------------------- one takes another's place

    def hear_out(self, index: int) -> None:
        """Wait until what a child has said that is gone is taken in."""
        self._listeners[index].join(1.0)

    def restart(self, index: int, epoch: int) -> Channel:
        """Start another in the place of a child that is gone. Nobody listens before `listen`.

        Raises:
            ServerError: stopped meanwhile, or what is left of the earlier one survives.
            OSError: the machine has no room for it.
        """
        config = dataclasses.replace(self._configs[index], joins=True)
        ours, theirs = Pipe(duplex=True)
        http_socket = join_group(*self._address)
        try:
            self.channels[index] = channel = Channel(ours)
            self._metrics.replace(index)
            child = dataclasses.replace(_child(config, http_socket, theirs), epoch=epoch)
            self._supervisor.restart(index, child, "spawn")
        finally:
            http_socket.close()
            theirs.close()
        return channel

    def listen(self, index: int, epoch: int) -> None:
        """Take in what it says."""
        self._listeners[index] = self._start_listener(index, epoch)


def _child(
    config: ApiServerConfig, http_socket: socket.socket, connection: "Connection[bytes, bytes]"
) -> Child:
    return Child(
        kind="API server",
        title=config.title,
        main=api_server_main,
        arguments=(config, http_socket, connection),
    )
