"""`raywire bench serve`: load on a running OpenAI-compatible server, and what its clients see.

The clock of a request starts when it is sent and looks at events as they arrive, as vLLM's own
benchmark does: `ttft` to the first, `itl` between two, `tpot` per token after the first, `e2el` to
the last.
"""

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from cluster.bench.http_load import Answer, Endpoint, LoadResult, run_load
from cluster.bench.machine import Load, others_now
from cluster.bench.results import Measured, Results
from cluster.bench.workload import (
    Item,
    TokenRange,
    arrivals_s,
    random_items,
    read_dataset,
    take,
)
from cluster.server_url import server_url
from engine.errors import ConfigError

_CHAT = "/v1/chat/completions"
_QUIET_S = 1.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The flags of the command."""

    base_url: str | None
    host: str
    port: int
    endpoint: str
    model: str | None
    header: Sequence[str]
    api_key: str | None
    num_prompts: int
    request_rate: float
    max_concurrency: int | None
    input_len: int
    output_len: int
    dataset: Path | None
    token_ids: str
    temperature: float
    top_p: float | None
    ignore_eos: bool
    num_warmups: int
    repeats: int
    seed: int

    @property
    def url(self) -> str:
        return server_url(self.base_url or f"http://{self.host}:{self.port}")


def measure_serve(settings: ServeSettings) -> Results:
    """Warm up, then load the server as often as asked.

    Raises:
        ConfigError: the settings cannot work, no server is there, or it refuses every request.
    """
    headers = _headers(settings.header)
    if settings.api_key is not None:
        headers.setdefault("Authorization", f"Bearer {settings.api_key}")
    endpoint = Endpoint.parse(settings.url, settings.endpoint, headers)
    model = settings.model or _first_model(settings.url, headers)
    source = _Source(settings, model)
    if settings.num_warmups:
        warm_up = run_load(
            endpoint, source.bodies(settings.num_warmups), max_concurrency=settings.max_concurrency
        )
        _check(warm_up)
    others = others_now(_QUIET_S)
    loads = []
    for _ in range(settings.repeats):
        loads.append(
            run_load(
                endpoint,
                source.bodies(settings.num_prompts),
                arrivals_s=arrivals_s(settings.num_prompts, settings.request_rate, source.noise),
                max_concurrency=settings.max_concurrency,
            )
        )
        _check(loads[-1])
    # The server's own work is no foreign one, so it is asked while nothing is going on.
    load = Load(others=max(others, others_now(_QUIET_S)))
    return _results({**_shown(settings), "model": model}, loads, load)


def _shown(settings: ServeSettings) -> dict[str, Any]:
    """What JSON can hold, and nothing secret."""
    secret = ("header", "api_key")
    shown = {name: value for name, value in asdict(settings).items() if name not in secret}
    return {
        **shown,
        "dataset": settings.dataset and settings.dataset.name,
        "request_rate": str(settings.request_rate),
    }


class _Source:
    """Makes the bodies of requests, new prompts each time."""

    def __init__(self, settings: ServeSettings, model: str) -> None:
        self.noise = random.Random(settings.seed)
        self._settings = settings
        self._model = model
        self._ids = TokenRange.parse(settings.token_ids)
        self._dataset: list[Item] | None = None
        if settings.dataset is not None:
            self._dataset = read_dataset(settings.dataset, settings.output_len)
        elif settings.endpoint == _CHAT:
            raise ConfigError(f"{_CHAT} takes texts: give it a --dataset")

    def bodies(self, count: int) -> list[dict[str, Any]]:
        settings = self._settings
        if self._dataset is not None:
            return [self._body(item) for item in take(self._dataset, count)]
        items = random_items(count, settings.input_len, settings.output_len, self._ids, self.noise)
        return [self._body(item) for item in items]

    def _body(self, item: Item) -> dict[str, Any]:
        body = completion_body(self._model, item, ignore_eos=self._settings.ignore_eos)
        body["temperature"] = self._settings.temperature
        if self._settings.top_p is not None:
            body["top_p"] = self._settings.top_p
        if self._settings.endpoint == _CHAT:
            prompt = body.pop("prompt")
            if not isinstance(prompt, str):
                raise ConfigError(f"{_CHAT} takes texts, and the dataset has token ids")
            body["messages"] = [{"role": "user", "content": prompt}]
        return body


def completion_body(model: str, item: Item, *, ignore_eos: bool = True) -> dict[str, Any]:
    """A streamed completion, greedy."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": item.prompt,
        "max_tokens": item.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "ignore_eos": True} if ignore_eos else body


def _headers(pairs: Iterable[str]) -> dict[str, str]:
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--header must be KEY=VALUE, not {pair}")
        headers[name] = value
    return headers


def _first_model(url: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    # No proxy: what is measured is the server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, too
        hint = "; it may still be loading" if error.code == HTTPStatus.SERVICE_UNAVAILABLE else ""
        raise ConfigError(f"{url}/v1/models answers {error.code} {error.reason}{hint}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"no answer from {url}/v1/models: {reason}") from error


def _check(load: LoadResult) -> None:
    """A server that has answered nothing has not been measured."""
    if not load.good:
        raise ConfigError(f"all {len(load.errors)} requests failed: {load.errors[0]}")


def _results(settings: dict[str, Any], loads: Sequence[LoadResult], load: Load) -> Results:
    def rate(name: str, count: Callable[[LoadResult], float]) -> Measured:
        return Measured(name, "1/s", [[count(each) / each.wall_s] for each in loads])

    def times(name: str, of: Callable[[Answer], list[float]]) -> Measured:
        return Measured(
            name,
            "ms",
            [[1e3 * time_s for answer in each.good for time_s in of(answer)] for each in loads],
        )

    errors = [error for each in loads for error in each.errors]
    return Results(
        command="serve",
        settings=settings,
        figures=[
            rate("requests", lambda each: len(each.good)),
            rate("output tokens", lambda each: each.num_tokens),
            rate(
                "all tokens",
                lambda each: sum(a.num_prompt_tokens + a.num_tokens for a in each.good),
            ),
            times("ttft, first token", lambda answer: [answer.first_token_s]),
            times("itl, between events", lambda answer: answer.between_events_s),
            times("tpot, per token after the first", _per_token),
            times("e2el, to the last token", lambda answer: [answer.whole_s]),
        ],
        load=load,
        counts={"requests sent": sum(len(each.answers) for each in loads), "errors": len(errors)},
        notes=[
            *([f"first error: {errors[0]}"] if errors else []),
            f"--seed {settings['seed']} makes these prompts again",
        ],
    )


def _per_token(answer: Answer) -> list[float]:
    return [] if answer.per_token_s is None else [answer.per_token_s]
