"""Write `vllm_fields.json`: the request fields of vLLM's chat and completion routes.

    VLLM_VENV/bin/python tests/data/list_vllm_fields.py > tests/data/vllm_fields.json

Run with the interpreter of an installed vLLM. Only names, types and defaults are taken over.
"""

import json
import re
import sys
from importlib.metadata import packages_distributions, version
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest


def fields_of(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    return {
        name: {"type": _type_name(field), "default": _default(field)}
        for name, field in model.model_fields.items()
    }


def _type_name(field: FieldInfo) -> str:
    annotation = field.annotation
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return re.sub(r"\b[a-z_0-9]+\.|, FieldInfo\(.*?\)\]\)", "", str(annotation))


def _default(field: FieldInfo) -> Any:
    if field.default_factory is not None:
        return f"{field.default_factory.__name__}()"
    return "required" if field.default is PydanticUndefined else field.default


if __name__ == "__main__":
    package = packages_distributions()["vllm"][0]
    fields = {
        "vllm": version(package),
        "chat": fields_of(ChatCompletionRequest),
        "completions": fields_of(CompletionRequest),
    }
    json.dump(fields, sys.stdout, indent=1, default=str)
