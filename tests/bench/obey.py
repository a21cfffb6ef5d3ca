"""A process that stays up and does what it is told, under the Python of any engine.

    python -P obey.py FILE.py REPLY_FD '{"arguments": "as JSON"}'

FILE has `open_commands(**arguments)`, which returns functions by name. Then each line on standard
input is `[name, arguments]`, and each answer a line on the descriptor REPLY_FD: standard output is
for whatever the engine prints. The first answer says that all is loaded. Ends with its input.

Standard library only, and nothing of ours is imported: see `obedient` for the other side.
"""

import importlib.util
import json
import os
import sys
from typing import Any


def main() -> None:
    file, reply_fd, arguments = sys.argv[1:4]
    commands = _load(file).open_commands(**json.loads(arguments))
    with os.fdopen(int(reply_fd), "w", buffering=1) as replies:
        replies.write("true\n")
        for line in sys.stdin:
            name, arguments = json.loads(line)
            replies.write(json.dumps(commands[name](**arguments)) + "\n")


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("commands", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["commands"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
