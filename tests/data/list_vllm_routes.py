"""Write `vllm_routes.json`: the routes of vLLM's server, and what each depends on.

    VLLM_VENV/bin/python tests/data/list_vllm_routes.py > tests/data/vllm_routes.json

Run with the interpreter of an installed vLLM, beside which Cohere's package must be, or its routes
are not there. Only methods, paths and conditions are taken over.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, version
from typing import Any

DEVELOPERS = "VLLM_SERVER_DEV_MODE"
LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
COHERE = "VLLM_ENABLE_COHERE_API"
TASKS = ("generate", "transcription", "realtime")
FLAGS = ("--enable-tokenizer-info-endpoint", "--enable-fault-tolerance")
CONDITIONS = {
    "/v1/audio": "a speech model",
    "/v1/realtime": "a speech model",
    "/adapters": LORA,
    "/v1/load_lora": LORA,
    "/v1/unload_lora": LORA,
    "/cohere": COHERE,
    "/tokenizer_info": FLAGS[0],
    "/fault_tolerance": FLAGS[1],
}
"""Of what is only there with everything switched on, by the beginning of the path; others belong
to the mode for developers."""

ROUTERS = {
    "pooling.embed": "a pooling model",
    "pooling.pooling": "a pooling model",
    "pooling.classify": "a pooling model",
    "pooling.scoring": "a pooling model",
    "serve.profile": "--profiler-config",
}
"""Those that need more than flags to be attached."""


def application(tasks: tuple[str, ...], flags: Iterable[str]) -> Any:
    cli_args = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    arguments = cli_args.make_arg_parser(parser).parse_args(list(flags))
    return importlib.import_module("vllm.entrypoints.launchers.app").build_app(arguments, tasks)


def routes_of(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "original_router", None)  # FastAPI includes routers lazily
        if included is not None:
            yield from routes_of(included.routes)
        elif methods := getattr(route, "methods", None):
            yield from (f"{method} {route.path}" for method in methods - {"HEAD"})
        elif type(route).__name__ == "Mount":
            yield f"GET {route.path}"
        else:
            yield f"WEBSOCKET {route.path}"


def condition(route: str) -> str:
    path = route.split()[1]
    found = (words for start, words in CONDITIONS.items() if path.startswith(start))
    return next(found, DEVELOPERS)


def all_routes() -> dict[str, str]:
    found = dict.fromkeys(routes_of(application(("generate",), ()).routes), "by default")
    os.environ.update(dict.fromkeys((DEVELOPERS, LORA, COHERE), "1"))
    for route in routes_of(application(TASKS, FLAGS).routes):
        found.setdefault(route, condition(route))
    for name, words in ROUTERS.items():
        module = importlib.import_module(f"vllm.entrypoints.{name}.api_router")
        for route in routes_of(module.router.routes):
            found.setdefault(route, words)
    return found


if __name__ == "__main__":
    package = packages_distributions()["vllm"][0]
    by_path = sorted(all_routes().items(), key=lambda each: each[0].split()[::-1])
    json.dump({"vllm": version(package), "routes": dict(by_path)}, sys.stdout, indent=1)
