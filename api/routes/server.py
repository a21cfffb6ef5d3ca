"""GET /version, /load and /server_info: about the server. Nothing in them is a secret, a path or an
address."""

import os
import platform
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import engine
from api import answer
from api.engine_handle import EngineHandle
from api.routing import Route
from api.service import Service
from engine.errors import InvalidRequestError

ConfigFormat = Literal["text", "json"]


class Version(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    server_load: int
    """Requests that this API server is answering."""


class ServerInfo(msgspec.Struct):
    """In vLLM's words, so that its tools find what they look for."""

    vllm_config: str | dict[str, Any]
    """As text or as an object, by `config_format`."""
    vllm_env: dict[str, str]
    """Empty: the environment is nobody's business."""
    system_env: dict[str, Any]


def routes(service: Service) -> list[Route]:
    async def version(request: Request) -> Response:
        return answer.json_response(Version(engine.__version__))

    async def load(request: Request) -> Response:
        return answer.json_response(ServerLoad(service.num_active))

    async def server_info(request: Request) -> Response:
        settings = _settings(service)
        is_text = _config_format(request) == "text"
        shown = _as_text(settings) if is_text else settings
        return answer.json_response(ServerInfo(shown, {}, _system(service)))

    return [
        Route(("GET",), "/version", version, summary="The server's version", answer=Version),
        Route(("GET",), "/load", load, summary="Requests in work", answer=ServerLoad),
        Route(
            ("GET",),
            "/server_info",
            server_info,
            summary="Settings of the server, its engines and its machine",
            query={"config_format": ConfigFormat},
            answer=ServerInfo,
        ),
    ]


def _config_format(request: Request) -> ConfigFormat:
    match request.query_params.get("config_format", "text"):
        case "text":
            return "text"
        case "json":
            return "json"
        case other:
            raise InvalidRequestError(
                f"config_format must be text or json, not {other[:40]!r}", "config_format"
            )


def _settings(service: Service) -> dict[str, Any]:
    """What was asked for and what came of it, with names as in vLLM's settings."""
    config, model = service.config, service.model
    return {
        "model": {
            "served_model_name": list(config.served_model_names),
            "max_model_len": model.max_model_len,
            "vocab_size": model.inputs.vocab_size,
            "default_sampling_params": model.sampling_defaults.as_params(),
        },
        "scheduler": {"policy": config.scheduling_policy},
        "parallel": {
            "data_parallel_size": len(service.ranks),
            "data_parallel_start_rank": service.ranks.start,
        },
        "frontend": {
            "tool_call_parser": config.tool_call_parser,
            "reasoning_parser": config.reasoning_parser,
            "root_path": config.root_path,
            "max_body_bytes": config.max_body_bytes,
            "max_n": config.max_n,
            "max_sequences": config.max_sequences,
        },
        "engines": [_engine(each) for each in service.client.engines],
    }


def _engine(handle: EngineHandle) -> dict[str, Any]:
    shown: dict[str, Any] = {"rank": handle.rank, "state": handle.state}
    if (ready := handle.ready) is not None:
        shown |= {
            "dtype": ready.dtype,
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "block_size": ready.block_size,
            "num_gpu_blocks": ready.num_gpu_blocks,
            "kv_cache_size_tokens": ready.kv_cache_size_tokens,
            "enable_prefix_caching": ready.has_prefix_cache,
        }
    return shown


def _as_text(settings: dict[str, Any]) -> str:
    """A line for each part."""
    return "\n".join(
        f"{part}: {msgspec.json.encode(values).decode()}" for part, values in settings.items()
    )


def _system(service: Service) -> dict[str, Any]:
    readies = [each.ready for each in service.client.engines if each.ready is not None]
    return {
        "raywire_version": engine.__version__,
        "python_version": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "packages": readies[0].fingerprint.packages if readies else {},
    }
