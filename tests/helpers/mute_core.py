"""`python -m tests.helpers.mute_core serve …`: the command, whose engine cores load, connect to
their API servers, and do not say READY.

Spawned children import the main module of their parent, so they are changed too.
"""

import logging

import zmq

from engine.curve import CurveLink
from engine.input_thread import InputThread

logger = logging.getLogger(__name__)

_connect = InputThread._connect


def connect_and_wait(
    self: InputThread, address: str, link: CurveLink | None
) -> "zmq.Socket[bytes]":
    socket = _connect(self, address, link)
    logger.info("connected, and mute")
    socket.poll()  # nobody speaks first but it; ends with the context
    return socket


InputThread._connect = connect_and_wait  # type: ignore[method-assign]

if __name__ == "__main__":
    from cluster.__main__ import main

    main()
