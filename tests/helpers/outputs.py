"""Reads what an engine core sends about one request, as the routes and `LLM` do."""

from api.request_stream import RequestStream
from engine.wire import EngineCoreOutput


async def read(stream: RequestStream) -> list[EngineCoreOutput]:
    """All outputs up to the last one."""
    outputs: list[EngineCoreOutput] = []
    while not stream.is_finished:
        if (output := stream.take()) is not None:
            outputs.append(output)
        else:
            await stream.wakeup.wait()
    return outputs
