"""The offline class: `LLM(model).generate(prompts, SamplingParams(...))`.

The same engine processes and wires as a server's, without HTTP. Names and results are vLLM's.

    caller's thread          prompts -> requests            results in the order of the prompts
                                          |                              ^
    thread "raywire-llm"                  +--> EngineClient --ZeroMQ--> engine core --> workers

This module composes, as `cluster` does for the command; so `LLM.__init__` imports from `cluster`,
the one exception to who may import whom.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from api import sampling_defaults
from api.chat_template import ChatTemplate, Message
from api.engine_client import EngineClient
from api.input_processor import InputProcessor
from api.loop_thread import LoopThread
from api.offline import (
    Batch,
    CompletionOutput,
    Job,
    Logprob,
    RequestOutput,
    show_progress,
)
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from api.typed_tokens import unmarked
from engine.config import DType, Policy
from engine.errors import EngineDeadError, InvalidRequestError, UnavailableError
from engine.lifecycle import here_only
from engine.utility import Statistics

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or an object with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`."""


_UTILITY_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class LLM:
    """A model, loaded and ready. Use it as a context manager, or call `close`; the end of the
    process closes it too. Methods may be called from several threads.

    Where engines are spawned rather than forked (CUDA is initialised, or other threads run), the
    script needs the usual `if __name__ == "__main__":`.

    Args:
        model: a hub id, a folder, a .gguf file, "demo" or "scripted".
        tensor_parallel_size: workers that share each layer.
        pipeline_parallel_size: groups of workers that share the layers.
        dtype: of weights and arithmetic; "auto" is the model's own.
        max_model_len: longest prompt plus output in tokens; None is the model's own, "auto" what
            fits in memory.
        max_num_seqs: sequences that may run together.
        max_num_batched_tokens: tokens of one step, prefill and decode together.
        enable_chunked_prefill: spread long prompts over several steps.
        async_scheduling: plan each step while the one before it runs; None: where computing leaves
            a core free.
        enable_prefix_caching: share the KV cache of equal beginnings.
        kv_cache_memory_bytes: size of the KV cache of each worker.
        block_size: tokens per KV block; None is what suits the device.
        num_gpu_blocks_override: exactly so many KV blocks.
        scheduling_policy: "fcfs" or "priority".
        seed: start of the noise of requests without a seed of their own.
        device: "auto", "cpu" or "cuda".
        quantization: "int8" makes 8-bit integers of the weights of a bfloat16 model, on CPU.
        enforce_eager: on a GPU, launch each kernel of a decode by itself instead of CUDA graphs.
        attention_backend: None picks the fastest that works.
        linear_backend: "native" computes with raywire's own kernels, "torch" without them; "auto"
            with them where they can be had.
        chat_template: Jinja text in place of the model's own template.
        generation_config: where `get_default_sampling_params` looks: "auto" is the model's
            generation_config.json, "vllm" nowhere; else a folder with such a file.
        override_generation_config: what comes before that, by the same names.
        startup_timeout: seconds until the model must be loaded.
        log_level: of the engine's processes.

    Raises:
        ConfigError: the arguments, the model or this machine cannot work.
        EngineDeadError: the engine died while it started; the cause is in the log.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: DType = "auto",
        quantization: Literal["int8"] | None = None,
        max_model_len: int | Literal["auto"] | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_chunked_prefill: bool = True,
        async_scheduling: bool | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        scheduling_policy: Policy = "fcfs",
        seed: int = 0,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        enforce_eager: bool = False,
        attention_backend: str | None = None,
        linear_backend: Literal["auto", "native", "torch"] = "auto",
        chat_template: str | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        startup_timeout: float = 600.0,
        log_level: str | None = None,
    ) -> None:
        # Here and not at the top: `cluster` imports this package, and this is the one import the
        # other way (import-linter knows).
        from cluster.config import EngineOptions
        from cluster.library import start_engines

        sampling_defaults.check_override(override_generation_config or {})
        options = EngineOptions(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            async_scheduling=async_scheduling,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            scheduling_policy=scheduling_policy,
            seed=seed,
            device=device,
            enforce_eager=enforce_eager,
            attention_backend=attention_backend,
            linear_backend=linear_backend,
            startup_timeout=startup_timeout,
            log_level=log_level,
        )
        self._policy = scheduling_policy
        self._engines = start_engines(options)  # may fork: no thread and no ZeroMQ before
        self._connect(startup_timeout)
        try:
            # The engine core loads the model meanwhile.
            self._tokenizer = Tokenizer.load(self._engines.model.path)
            self._template = ChatTemplate.load(self._tokenizer, chat_template)
            self._defaults = sampling_defaults.read(
                self._engines.model.path, generation_config, override_generation_config
            )
            self._wait_ready()
        except BaseException:  # a KeyboardInterrupt too leaves no process behind
            self.close()
            raise

    def _connect(self, timeout_s: float) -> None:
        """Begin to wait for the engine. From here on `close` ends it, and so does the process."""
        self._client = self._engines.client
        self._loop = LoopThread("raywire-llm")
        end = here_only(_end)
        self._end = weakref.finalize(self, end, self._loop, self._client, self._engines.close)
        self._pid = os.getpid()
        self._ready = self._loop.submit(self._client.wait_ready(timeout_s))

    def _wait_ready(self) -> None:
        """Wait until the engine says what it can. Raises EngineDeadError with the cause."""
        try:
            limits = self._ready.result()[0]
        except EngineDeadError as death:
            raise self._engines.explain(death) from None
        self._engines.connected()
        self._profile_directory: str | None = None
        self._inputs = InputProcessor(
            self._tokenizer, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size
        )

    def close(self) -> None:
        """End the engine and free everything. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, as the engine has fitted it."""
        return self._inputs.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use that are given none: what the model's makers recommend."""
        return SamplingParams(**self._defaults.as_params())  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all together, and return the results in their order.

        Args:
            prompts: one, or a list of them.
            sampling_params: for all of them, or one for each; None:
                `get_default_sampling_params`. `max_tokens` beyond the model's
                length means up to it; the finish reason is then "length".
            use_tqdm: show a progress bar.
            priority: one number for each prompt; lower runs first, with the priority policy.

        Raises:
            InvalidRequestError: a prompt or a parameter is wrong; nothing has been sent. Or a
                structured output cannot be compiled; then the other prompts are aborted.
            ContextLengthError: a prompt is too long; nothing has been sent.
            EngineDeadError: the engine has died.
        """
        read = [_read(item, f"prompts[{i}]") for i, item in enumerate(_as_list(prompts))]
        self._encode([prompt for prompt in read if prompt.text is not None])
        return self._run(
            read, self._spread(sampling_params, len(read)), use_tqdm=use_tqdm, priorities=priority
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, all together, and return the results in their order.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            add_generation_prompt: begin a new message of the assistant.
            continue_final_message: continue the last message instead.
            tools: JSON schemas of functions, for templates that show them.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError, ContextLengthError, EngineDeadError: as in `generate`.
        """
        conversations = _as_conversations(messages)
        rendered = [
            _Prompt(
                self._template.render(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=chat_template_kwargs,
                ),
                [],
            )
            for conversation in conversations
        ]
        self._encode(rendered, add_special_tokens=False)
        return self._run(rendered, self._spread(sampling_params, len(rendered)), use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests run: their blocks are in use."""
        forgotten: bool = self._call_engine("reset_prefix_cache")
        return forgotten

    def statistics(self) -> Statistics:
        """Counters of the engine core and of each of its workers, since their start."""
        counted: Statistics = self._call_engine("statistics")
        return counted

    def start_profile(self, directory: str | PathLike[str]) -> None:
        """Record what each worker does, until `stop_profile` writes it down.

        Args:
            directory: for one `rank<N>.trace.json` per worker, in Chrome's format: open it with
                chrome://tracing or ui.perfetto.dev. Made if need be.

        Raises:
            InvalidRequestError: the folder cannot be made.
            RequestFailedError: it runs already, or does not work.
        """
        path = os.path.abspath(directory)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(f"cannot make {path}: {error}", "directory") from error
        self._call_engine("profile", True, path)
        self._profile_directory = path

    def stop_profile(self) -> None:
        """Stop recording and write the traces, into the folder that `start_profile` was given.

        Raises:
            InvalidRequestError: nothing is being recorded.
            RequestFailedError: they cannot be written.
        """
        if self._profile_directory is None:
            raise InvalidRequestError("stop_profile needs start_profile before it")
        self._call_engine("profile", False, self._profile_directory)
        self._profile_directory = None

    def _call_engine(self, method: str, *args: object) -> Any:
        """Call a method of `engine.utility` on the one engine core."""
        self._check_open()
        # Traces of a long run take minutes to write.
        calling = self._client.utility(method, *args, timeout_s=_UTILITY_TIMEOUT_S)
        return self._loop.submit(calling).result()[0]

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise UnavailableError(
                f"this LLM belongs to process {self._pid}, and a fork cannot use it: neither its"
                " sockets nor its threads are there"
            )
        if not self._end.alive:
            raise UnavailableError("this LLM has been closed")

    def _encode(self, prompts: Sequence[_Prompt], *, add_special_tokens: bool = True) -> None:
        """Fill in the token ids of texts, in parallel."""
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens)
        for prompt, text, token_ids in zip(prompts, texts, encoded, strict=True):
            prompt.text, prompt.token_ids = unmarked(text), token_ids

    def _spread(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """One for each prompt."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise InvalidRequestError(
                f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for"
                " each",
                "sampling_params",
            )
        return list(params)

    def _run(
        self,
        prompts: Sequence[_Prompt],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Check everything, then send everything, then wait."""
        self._check_open()
        if priorities is not None and self._policy != "priority":
            raise InvalidRequestError(
                "priority needs LLM(..., scheduling_policy='priority')", "priority"
            )
        if priorities is not None and len(priorities) != len(prompts):
            raise InvalidRequestError(
                f"{len(priorities)} priorities for {len(prompts)} prompts: give one for each",
                "priority",
            )
        jobs = [
            Job(
                prompts[i].text,
                prompts[i].token_ids,
                self._inputs.make_requests(
                    prompts[i].token_ids,
                    params[i],
                    cuts_max_tokens=True,
                    priority=0 if priorities is None else priorities[i],
                    cache_salt=prompts[i].cache_salt,
                    param=f"prompts[{i}]",
                ),
                params[i],
                self._tokenizer,
            )
            for i in range(len(prompts))
        ]
        batch = Batch(jobs)
        try:
            running = self._loop.submit(batch.run(self._client))
            show_progress(batch.done, len(jobs), is_shown=use_tqdm)
            running.result()
        finally:  # a KeyboardInterrupt, whenever it comes, aborts what still runs
            self._loop.call(batch.cancel)
        return [job.result() for job in jobs]


def _end(loop: LoopThread, client: EngineClient, end_engines: Callable[[], object]) -> None:
    """Undo the start, in reverse order. Holds no LLM: it runs when that is gone."""

    async def close_client() -> None:
        client.close()  # on the loop that watches its sockets

    with contextlib.suppress(TimeoutError):
        loop.submit(close_client()).result(5.0)
    loop.stop()
    end_engines()


# ------------------------------------------------------------------------------------- arguments


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, also where one was given by itself."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]  # type: ignore[list-item]  # token ids, then
    return list(prompts)  # type: ignore[arg-type]


def _read(prompt: Prompt, where: str) -> _Prompt:
    """What is to be continued, from any of the forms that a prompt has."""
    salt = None
    given: object = prompt
    if isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt")
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if salt is not None and not isinstance(salt, str):
            raise InvalidRequestError(f"{where}.cache_salt must be a string", where)
    if isinstance(given, str):
        if not given:
            raise InvalidRequestError(f"{where} must not be empty", where)
        return _Prompt(given, [], salt)
    if isinstance(given, np.ndarray):
        return _Prompt(None, given.tolist(), salt)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return _Prompt(None, list(given), salt)
    raise InvalidRequestError(f"{where} must be a text or token ids, not {given!r:.80}", where)


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Several conversations, also where one was given by itself."""
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
