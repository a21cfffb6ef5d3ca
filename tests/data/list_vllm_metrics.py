"""Write `vllm_metrics.json`: the names of vLLM's metrics.

    VLLM_VENV/bin/python tests/data/list_vllm_metrics.py > tests/data/vllm_metrics.json

Run with the interpreter of an installed vLLM, whose files are read and not run. Only the names are
taken over.
"""

import json
import re
import sys
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    files = Path(package.origin).parent.rglob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    names = {name for text in texts for name in re.findall(r'"vllm:(\w+)"', text)}
    listed = {"vllm": version(packages_distributions()["vllm"][0]), "metrics": sorted(names)}
    json.dump(listed, sys.stdout, indent=1)
    sys.stdout.write("\n")
