"""Folders in the cache appear whole or not at all."""

import contextlib
import threading
from pathlib import Path

from workers.atomic_folder import discard_draft, new_folder


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    """Nobody sees a half-written model."""
    target = tmp_path / "models" / "m"

    with new_folder(target) as folder:
        assert folder is not None
        (folder / "weights").write_text("w")
        assert not target.exists()

    assert (target / "weights").read_text() == "w"


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """The second conversion is none."""
    (tmp_path / "m").mkdir()

    with new_folder(tmp_path / "m") as folder:
        assert folder is None


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """A conversion that fails can be tried again."""
    with contextlib.suppress(KeyboardInterrupt), new_folder(tmp_path / "m") as folder:
        assert folder is not None
        (folder / "weights").write_text("w")
        raise KeyboardInterrupt

    assert not (tmp_path / "m").exists()
    assert [file.name for file in tmp_path.iterdir()] == [".m.lock"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """A draft without a writer never becomes part of a model."""
    draft = tmp_path / ".m.draft"
    draft.mkdir()
    (draft / "stale").write_text("x")

    with new_folder(tmp_path / "m") as folder:
        assert folder is not None
        assert not list(folder.iterdir())


def test_a_draft_is_discarded_unless_it_is_being_written(tmp_path: Path) -> None:
    """The parent of a killed writer cleans up behind it, not under the next one."""
    (tmp_path / ".m.draft").mkdir()
    discard_draft(tmp_path / "m")
    assert not (tmp_path / ".m.draft").exists()

    with new_folder(tmp_path / "m") as folder:
        assert folder is not None
        discard_draft(tmp_path / "m")
        assert folder.exists()


def test_one_writes_while_the_others_wait(tmp_path: Path) -> None:
    """Of many starts at once exactly one does the work, and all find it done."""
    written, found = [], []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait(10)
        with new_folder(tmp_path / "m") as folder:
            if folder is not None:
                written.append(number)
                (folder / "by").write_text(str(number))
        found.append((tmp_path / "m" / "by").read_text())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(written) == 1
    assert found == [str(written[0])] * 8
