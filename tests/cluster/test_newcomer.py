"""What an API server is told that takes the place of another."""

from multiprocessing import Pipe
from pathlib import Path

from cluster.channel import Allow, Begin, Channel, Wires
from cluster.deadline import Deadline
from cluster.newcomer import Memory
from engine.bound import BoundSocket, ServerWires
from engine.wire import EngineReady, Fingerprint


def ready(index: int, epoch: int) -> EngineReady:
    fingerprint = Fingerprint(1, "", {}, "", "")
    return EngineReady(
        engine_index=index,
        epoch=epoch,
        max_model_len=8,
        num_gpu_blocks=8,
        block_size=16,
        kv_cache_size_tokens=128,
        dtype="float32",
        vocab_size=8,
        max_num_seqs=8,
        fingerprint=fingerprint,
    )


def test_it_is_told_what_the_others_know() -> None:
    """Its wires, who may connect, which engine cores are ready and which are lost."""
    memory = Memory()
    wires = [
        ServerWires(request=BoundSocket(f"ipc://r{i}"), output=BoundSocket(f"ipc://o{i}"))
        for i in range(2)
    ]
    memory.keep(wires)
    memory.begin(Path("folder"), None, Deadline(60.0), None)
    memory.allow([b"k"])
    for index in range(3):
        memory.take_ready(ready(index, 0))
    memory.take_loss(1, 0)
    memory.take_ready(ready(1, 0))  # another API server has heard it late
    memory.take_loss(2, 0)
    memory.take_ready(ready(2, 1))

    ours, theirs = Pipe(duplex=True)
    memory.tell(Channel(ours), 1, 7.0)
    newcomer = Channel(theirs)
    assert newcomer.receive() == Wires("ipc://r1", "ipc://o1", None, False)
    assert newcomer.receive() == Allow([b"k"])
    begin = newcomer.receive()
    assert begin == Begin("folder", None, 7.0, None, [ready(0, 0), ready(2, 1)], {1: 1, 2: 1})
    newcomer.close()
    ours.close()
