"""A checkpoint to this rank's model: transformers' definition, our part of the weights.

    config.json    -> the model on the meta device: shapes, no memory
    pipeline plan  -> layers of other stages are passed through
    tensor plan    -> parameters shrink to this rank's part
    safetensors    -> each parameter reads just its slice

No rank ever holds more than its own part. Names that a checkpoint spells differently are found by
`_spellings`; a parameter that is not found at all is an error.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.pytorch_utils import Conv1D

from engine.config import ModelConfig
from engine.errors import ConfigError
from workers import resources
from workers.attention import select
from workers.kv_cache import check_fits
from workers.lean_imports import lean_imports
from workers.parallel import Parallel
from workers.pipeline_parallel import keep_stage
from workers.supported import weight_files
from workers.tensor_parallel import Cut, shard

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNSTEADY_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest sequence seen: in a batch, a request's
tokens would depend on its neighbours."""

_CONFIG_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    StrictDataclassError,
)
"""What transformers raises over a config.json with wrong types, or sizes that contradict each
other."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """transformers' model with this rank's weights, in evaluation mode on its device."""

    model: Any
    config: Any
    dtype: torch.dtype
    weight_bytes: int


def load(
    settings: ModelConfig, parallel: Parallel, device: torch.device, num_local: int
) -> LoadedModel:
    """Load this rank's part of a model.

    Args:
        settings: which folder, which dtype.
        parallel: which part.
        device: where the weights go.
        num_local: workers that share this machine's memory.

    Raises:
        ConfigError: the folder is incomplete, the architecture cannot be split that way, or the
            weights do not fit into memory.
    """
    folder = Path(settings.path)
    config = read_config(folder)
    dtype = _dtype(settings.dtype, config)
    model = _on_meta(config, dtype)
    transposed = _use_linear(model)
    whole_shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    sources = _tied_names(model, config)
    keep_stage(model, config, parallel.place)
    cuts = shard(model, config, parallel)
    _tie_head(model, config)

    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    _check_memory(weight_bytes, device, num_local)
    with _Checkpoint(weight_files(folder), f"{model.base_model_prefix}.") as checkpoint:
        for name, parameter in list(model.named_parameters()):
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            whole = checkpoint.find(sources.get(name, name), whole_shapes[name], name in transposed)
            whole.read_into(weight, cuts.get(name))
            _set_parameter(model, name, weight)
    _tie_head(model, config)
    model.to(device)  # buffers: rotary frequencies and the like
    return LoadedModel(model.eval(), config, dtype, weight_bytes)


def read_config(folder: Path) -> Any:
    """transformers' configuration of the text model in a folder."""
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = whole.get_text_config()
        if config.dtype is None:
            config.dtype = whole.dtype  # an image model says it once, above its parts
    except _CONFIG_ERRORS as error:
        raise ConfigError(_refusal(error)) from error
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") in _UNSTEADY_ROPE:
            raise ConfigError(
                f"the model's rotary embedding is {parameters['rope_type']!r}, under which a"
                " request's tokens depend on its neighbours; it is not supported"
            )
    return config


def _refusal(error: Exception) -> str:
    return f"transformers cannot use this config.json: {' '.join(str(error).split())}"


def _dtype(name: str, config: Any) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return dtype if dtype in _DTYPES.values() else torch.float32


def _on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters that have shapes and no memory, and real buffers."""
    config.pad_token_id = None  # of no use without padding; costs checks in every forward pass
    select.register()
    try:
        # The model's own module is imported here.
        with lean_imports(), _parameters_on_meta(), initialization.no_init_weights():
            return AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=select.IMPLEMENTATION,
                trust_remote_code=False,
            )
    except _CONFIG_ERRORS as error:
        raise ConfigError(_refusal(error)) from error


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    # torch.device("meta") would take the buffers as well, and those that a model computes for
    # itself, such as rotary frequencies, are in no checkpoint.
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _EmptyOnMeta(TorchFunctionMode):
    """Gives layers their weights without memory, not even for a moment: a single one may be larger
    than this machine."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _use_linear(model: nn.Module) -> frozenset[str]:
    """Replace GPT-2's Conv1D by the linear layers they are. Returns the names of their weights,
    which checkpoints hold transposed."""
    transposed = set()
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            num_inputs, num_outputs = module.weight.shape
            linear = nn.Linear(num_inputs, num_outputs, device="meta", dtype=module.weight.dtype)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, linear)
            transposed.add(f"{name}.weight")
    return frozenset(transposed)


def _tie_head(model: Any, config: Any) -> None:
    """Let the head use the embedding's weight, where the model wants that and has both here."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and head is not None and isinstance(embedding, nn.Embedding):
        head.weight = embedding.weight


def _tied_names(model: Any, config: Any) -> dict[str, str]:
    """By parameter, the one in the checkpoint that it is the same as."""
    if not config.tie_word_embeddings:
        return {}
    name_of = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return {f"{name_of[id(head)]}.weight": f"{name_of[id(embedding)]}.weight"}


def _check_memory(weight_bytes: int, device: torch.device, num_local: int) -> None:
    if device.type == "cuda":
        check_fits(weight_bytes, torch.cuda.mem_get_info(device)[0], "the model's weights")
        return
    check_fits(weight_bytes, resources.available_memory(), "the model's weights")
    # The others load at the same time, so that what is free now is not ours alone.
    total = resources.total_memory() // num_local
    check_fits(weight_bytes, total, f"the model's weights (one of {num_local} workers here)")


def _set_parameter(model: nn.Module, name: str, weight: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(weight, requires_grad=False))


class _Checkpoint:
    """The safetensors files of a folder, open for reading slices."""

    def __init__(self, files: Iterable[Path], prefix: str) -> None:
        self._files = files
        self._prefix = prefix
        self._open = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> "_Checkpoint":
        for path in self._files:
            try:
                file = self._open.enter_context(safetensors.safe_open(path, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"cannot read weight file {path}: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def find(self, name: str, shape: tuple[int, ...], is_transposed: bool) -> "_Whole":
        """Return the tensor of a parameter whose whole shape this is."""
        for spelling in self._spellings(name):
            if (file := self._file_of.get(spelling)) is not None:
                whole = _Whole(file.get_slice(spelling), is_transposed)
                if whole.shape != shape:
                    raise ConfigError(
                        f"weight {spelling} has shape {whole.shape}; config.json says {shape}"
                    )
                return whole
        raise ConfigError(f"the weight files are incomplete: they have no {name}")

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        yield name.removeprefix(self._prefix)  # GPT-2 of the hub
        yield f"language_model.{name}"  # the text model of an image model
        yield name.replace(self._prefix, f"{self._prefix}language_model.", 1)  # the same, newer


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor in a file, of which nothing has been read yet."""

    slice: Any
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.slice.get_shape())
        return shape[::-1] if self.is_transposed else shape

    def read_into(self, weight: Tensor, cut: Cut | None) -> None:
        """Fill `weight` with all of it, or with the ranges of a cut and its padding."""
        if cut is None:
            weight.copy_(self._read(0, 0, self.shape[0]))
            return
        filled = 0
        for first, last in cut.ranges:
            part = weight.narrow(cut.dim, filled, last - first)
            part.copy_(self._read(cut.dim, first, last))
            filled += last - first
        weight.narrow(cut.dim, filled, cut.num_padding).zero_()

    def _read(self, dim: int, first: int, last: int) -> Tensor:
        file_dim = 1 - dim if self.is_transposed else dim
        part: Tensor = self.slice[:, first:last] if file_dim else self.slice[first:last]
        return part.T if self.is_transposed else part
