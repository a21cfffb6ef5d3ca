"""A helper process on a leash: writes its pid to a file and sleeps for ever, or, given an exit
code, answers and exits with it: `python -m tests.helpers.leashed PID_FILE [EXIT_CODE]`."""

import os
import sys
import time
from pathlib import Path

from engine import leash

if __name__ == "__main__":
    leash.hold_on("Helper")
    draft = Path(f"{sys.argv[1]}.draft")
    draft.write_text(str(os.getpid()))
    draft.rename(sys.argv[1])
    if len(sys.argv) > 2:
        sys.stdout.write("an answer\n")
        sys.stderr.write("a word\n")
        sys.exit(int(sys.argv[2]))
    time.sleep(600)
