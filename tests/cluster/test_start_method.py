"""Fork or spawn for the engine of an `LLM`."""

import re
import sys
import threading

import pytest

from cluster.start_method import Circumstances, choose, observe


def test_a_script_forks() -> None:
    """The fast way, when nothing speaks against it."""
    assert choose(Circumstances(), None) == ("fork", None)


@pytest.mark.row("F-12")
@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Circumstances(is_cuda_initialized=True), "CUDA is initialised"),
        (Circumstances(other_threads=["prefetch"]), r"other threads .*\(prefetch\)"),
    ],
)
def test_what_a_fork_would_break_makes_it_spawn(seen: Circumstances, reason: str) -> None:
    """With a warning, since the script now needs its `__main__` guard."""
    method, warning = choose(seen, None)

    assert method == "spawn"
    assert warning is not None
    assert re.search(reason, warning)
    assert "__main__" in warning


def test_macos_spawns_without_a_word() -> None:
    """Nobody expects anything else there."""
    assert choose(Circumstances(is_fork_usual=False), None) == ("spawn", None)


@pytest.mark.parametrize("requested", ["fork", "spawn"])
def test_the_variable_decides_where_set(requested: str) -> None:
    """Whatever we would have chosen."""
    seen = Circumstances(is_cuda_initialized=True, other_threads=["a"], is_fork_usual=False)

    assert choose(seen, requested) == (requested, None)  # type: ignore[arg-type]


def test_threads_are_seen() -> None:
    """Any other Python thread of the process counts."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="someone")
    thread.start()
    try:
        assert "someone" in observe().other_threads
    finally:
        stop.set()
        thread.join()
    assert "someone" not in observe().other_threads


def test_cuda_is_asked_only_of_a_torch_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is looked up, never imported: the API process must stay without it."""

    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

    class Torch:
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert observe().is_cuda_initialized
    monkeypatch.delitem(sys.modules, "torch")
    assert not observe().is_cuda_initialized
    assert "torch" not in sys.modules
