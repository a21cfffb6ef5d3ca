"""What the processes of a server ask the system for: addresses, names of hosts, files."""

import os
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "audited"


@dataclass(frozen=True, slots=True)
class Audit:
    """The notes of all processes that were started with `environment`. Those of native code are
    not there: libzmq's own connections, Rust's files."""

    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """For the process to be watched, and its children."""
        path = os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "RAYWIRE_TEST_AUDIT": str(self.file)}

    def lines(self) -> list[str]:
        """All notes so far, in order: the event, and what was asked for."""
        return self.file.read_text(encoding="utf-8").splitlines()
