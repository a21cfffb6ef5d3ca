"""A cable that is long and loses something: passes Ethernet frames between two interfaces.

    python -S -E slow_link.py ONE OTHER DELAY_S LOSS SEED

`tests/integration/hosts.py` runs it in the namespace of its switch, where the kernel has no netem.
Each frame arrives DELAY_S later, in order, and a fraction LOSS of them never. Frames of a sender
that leaves segmenting to its network card are larger than a cable's, and are lost whole. Prints
`up`, and ends when its standard input does.
"""

import heapq
import os
import random
import select
import socket
import sys
import time

_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_ALL_PROTOCOLS = 3
_BUFFER_BYTES = 8 << 20
_LARGEST_FRAME = 1 << 17


def main(one: str, other: str, delay_s: float, loss: float, seed: int) -> None:
    ends = (_open(one), _open(other))
    chance = random.Random(seed)
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    os.write(1, b"up\n")
    while True:
        wait_s = under_way[0][0] - time.monotonic() if under_way else None
        watched = [0, *(end.fileno() for end in ends)]
        readable = select.select(watched, [], [], wait_s and max(0.0, wait_s))[0]
        if 0 in readable:
            return
        for index, end in enumerate(ends):
            if end.fileno() not in readable:
                continue
            frame = end.recv(_LARGEST_FRAME)
            if chance.random() >= loss:
                number += 1
                target = 1 - index
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, target, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(under_way)
            ends[target].send(frame)


def _open(interface: str) -> socket.socket:
    """Frames with the header that tells what is left to the card: checksum and segments."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    end.bind((interface, 0))
    return end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
