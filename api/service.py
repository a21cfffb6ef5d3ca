"""What the routes of one API server share: settings, engine client, metrics, and its state.

Made by `process`, which moves it through its states; read by the edge and the routes.
"""

from dataclasses import dataclass, field
from typing import Literal

from api.admission import Admission
from api.body_reader import BodyReader
from api.brought_templates import BroughtTemplates
from api.chat_template import ChatTemplate
from api.config import ApiConfig
from api.connection_book import open_book
from api.engine_client import EngineClient
from api.guard import Guard
from api.input_processor import InputProcessor
from api.markup import Markup
from api.metric_families import render
from api.metrics import Metrics, MetricsExchange
from api.sampling_defaults import SamplingDefaults
from api.threads import TextThreads
from api.tokenizer import Tokenizer
from engine.errors import NotFoundError, RaywireError

State = Literal["starting", "serving", "draining", "hung", "dead"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the API server knows of the model, once the engine cores are ready."""

    tokenizer: Tokenizer
    template: ChatTemplate
    markup: Markup
    inputs: InputProcessor
    max_model_len: int
    loaded_at: int
    """Seconds since the epoch."""

    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For requests that do not say how to sample."""

    brought_templates: BroughtTemplates = field(default_factory=BroughtTemplates)
    """Of requests that bring their own."""


class Service:
    """State and parts of one API server."""

    def __init__(
        self, config: ApiConfig, client: EngineClient, exchange: MetricsExchange | None = None
    ) -> None:
        self.config = config
        self.client = client
        self.guard = Guard(config.access, config.allowed_origins)
        self.metrics = Metrics(config.served_model_names[0], len(client.engines), config.first_rank)
        self.admission = Admission(
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            lambda: client.num_in_flight,
            self.metrics.flow,
        )
        self.connections = open_book(config.send_timeout_s, len(client.engines))
        self._exchange = exchange
        self.ranks = range(config.first_rank, config.first_rank + len(client.engines))
        """Of the engine cores, as clients count them."""
        self.bodies = BodyReader(config.max_body_bytes, config.body_timeout_s)
        self.threads = TextThreads(config.num_text_threads)
        self.num_active = 0
        """Requests being answered, probes and metrics aside: their bodies are complete."""
        self._phase: Literal["starting", "serving", "draining"] = "starting"
        self._model: LoadedModel | None = None
        client.on_stats = self.metrics.on_stats
        client.on_load = self.metrics.on_load
        self.metrics.watch_engines(client.engines)
        self.metrics.watch(
            "wire_dropped_messages",
            "Messages from engine cores that were stale or broke the protocol",
            lambda: client.num_stale_messages + client.num_bad_messages,
        )
        self.metrics.watch(
            "wire_refused_connections",
            "Connections of strangers to the encrypted wires",
            lambda: client.num_refused_connections,
        )
        self.metrics.watch(
            "api_server_requests_active",
            "Requests being answered, from the end of their body",
            lambda: self.num_active,
        )
        self.metrics.count(
            "connections_ended",
            "Connections that the server has ended, by what the client did",
            "reason",
            self.connections.counts,
        )
        self.metrics.count(
            "admission_rejections",
            "Requests refused because a limit was reached, by its name",
            "reason",
            lambda: self.admission.num_refused,
        )
        self.metrics.watch(
            "unauthorized_requests",
            "Requests refused for want of a valid key",
            lambda: self.guard.num_refused,
        )
        if exchange is not None:
            exchange.attach(self.metrics.read)

    @property
    def state(self) -> State:
        if self.client.death is not None:
            return "hung" if any(e.state == "hung" for e in self.client.engines) else "dead"
        return self._phase

    @property
    def model(self) -> LoadedModel:
        """The model; only while serving, which the edge sees to."""
        assert self._model is not None
        return self._model

    def serve(self, model: LoadedModel) -> None:
        """Begin to take requests."""
        self._model = model
        self._phase = "serving"

    def drain(self) -> None:
        """Take no more requests."""
        self._phase = "draining"

    def cut(self, error: RaywireError) -> None:
        """End all requests now, in whatever state they are."""
        self.bodies.cut(error)
        self.threads.cut(error)
        self.client.fail_all(error)

    async def render_metrics(self) -> bytes:
        """What Prometheus reads: of all API servers on the port, whichever it has reached.

        Raises:
            UnavailableError: the others' part is missing. Without it the counters would fall.
        """
        if self._exchange is None:
            return self.metrics.render()
        return render(await self._exchange.collect())

    def close(self) -> None:
        self.threads.close()

    def check_model_name(self, name: str | None) -> None:
        """Raise NotFoundError unless this is what we serve. Leaving it out means just that."""
        if name is not None and name not in self.config.served_model_names:
            shown = ", ".join(self.config.served_model_names)
            raise NotFoundError(f"no model {name[:200]!r} here; there is {shown}", "model")
