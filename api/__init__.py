"""The API server's package, and the offline interface: `from api import LLM, SamplingParams`.

Names load on first use, so that importing one module of the package does not import them all.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from api.llm import LLM, CompletionOutput, RequestOutput
    from api.sampling import SamplingParams
    from api.structured.options import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'api' has no attribute {name!r}")
    if name == "SamplingParams":
        from api.sampling import SamplingParams  # on first use, as the docstring says

        return SamplingParams
    if name == "StructuredOutputsParams":
        from api.structured.options import StructuredOutputsParams  # on first use

        return StructuredOutputsParams
    from api import llm  # on first use

    return getattr(llm, name)
