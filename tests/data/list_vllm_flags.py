"""Write `vllm_flags.json`: the options of `vllm serve`, each with all of its names.

    VLLM_VENV/bin/python tests/data/list_vllm_flags.py > tests/data/vllm_flags.json

Run with the interpreter of an installed vLLM. Only the names are taken over.
"""

import importlib
import json
import sys
from importlib.metadata import packages_distributions, version
from typing import Any


def parser() -> Any:
    cli_args = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    empty = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    return cli_args.make_arg_parser(empty)


if __name__ == "__main__":
    package = packages_distributions()["vllm"][0]
    options = (action.option_strings for action in parser()._actions)
    flags = sorted(" ".join(names) for names in options if names and "--help" not in names)
    json.dump({"vllm": version(package), "flags": flags}, sys.stdout, indent=1)
