"""Names of requests."""

import os

from api.ids import new_id


def test_ids_are_unique_and_as_long_as_asked() -> None:
    """With their prefix, in hexadecimal."""
    ids = {new_id("x-", 64) for _ in range(10_000)}

    assert len(ids) == 10_000
    assert {len(each) for each in ids} == {2 + 16}


def test_forked_process_makes_other_ids() -> None:
    """A fork copies the generator, and must not copy its future."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, new_id().encode())
        os._exit(0)
    theirs = os.read(reader, 100).decode()
    os.wait()
    os.close(reader)
    os.close(writer)

    assert new_id() != theirs
