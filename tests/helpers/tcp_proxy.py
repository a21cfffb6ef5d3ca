"""A TCP connection's man in the middle: remembers every byte, and can cut the link for a while."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

_POLL_S = 0.02


class TcpProxy:
    """Listens on loopback and passes everything on to `target`, `tcp://host:port`. A context
    manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        """All that has gone through, both ways."""
        self._peers: dict[socket.socket, socket.socket] = {}
        self._link = threading.Lock()
        self._is_ending = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_ending.set()
        self._thread.join()
        self._selector.close()
        for each in (self._listener, *self._peers):
            each.close()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing gets through while the block runs, as on a link that is down; it waits."""
        with self._link:
            yield

    def _run(self) -> None:
        while not self._is_ending.is_set():
            ready = self._selector.select(_POLL_S)
            with self._link:
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peers:
                        self._pass_on(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target)
        except ConnectionRefusedError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            self.seen += data
            self._peers[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (source, self._peers[source]):
                del self._peers[each]
                self._selector.unregister(each)
                each.close()
