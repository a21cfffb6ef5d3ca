"""How the command collects metrics, over real channels; API servers are played by the tests."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

import pytest

from api.metric_families import Family, Series
from cluster.channel import Channel, Part, PartWanted, Scrape, Whole
from cluster.metrics_exchange import MetricsExchange
from cluster.metrics_hub import MetricsHub
from engine.errors import UnavailableError

LONG_S = 30.0
SHORT_S = 0.05


def part(value: float) -> list[Family]:
    """One counter."""
    return [Family("requests", "counter", "text", "sum", (), [Series((), [value])])]


def total(families: list[Family]) -> float:
    [family] = [each for each in families if each.name == "requests"]
    return family.series[0].values[0]


def ages(families: list[Family]) -> dict[str, float]:
    [family] = [each for each in families if each.name.endswith("age_seconds")]
    return {series.labels[0]: series.values[0] for series in family.series}


def not_counted(value: float) -> list[Family]:
    """One of an engine core, one of a process."""
    return [
        Family("engine_up", "gauge", "text", "max", (), [Series((), [value])]),
        Family("process_cpu_seconds", "counter", "text", "each", (), [Series((), [value])]),
    ]


class World:
    """A hub and the other ends of its channels."""

    def __init__(self, num_api_servers: int, timeout_s: float) -> None:
        ends = [Pipe(duplex=True) for _ in range(num_api_servers)]
        self._ours = [Channel(ours) for ours, _ in ends]
        self.api_servers = [Channel(theirs) for _, theirs in ends]
        self.hub = MetricsHub(self._ours, timeout_s)
        self.hub.start()

    def answer(self, index: int, value: float) -> None:
        """Be asked, and answer."""
        assert self.api_servers[index].receive() == PartWanted()
        self.hub.take(index, part(value))

    def whole(self, index: int) -> Whole:
        message = self.api_servers[index].receive()
        assert isinstance(message, Whole)
        return message

    def close(self) -> None:
        for each in (*self._ours, *self.api_servers):
            each.close()


@contextlib.contextmanager
def world(num_api_servers: int = 2, timeout_s: float = LONG_S) -> Iterator[World]:
    with contextlib.closing(World(num_api_servers, timeout_s)) as made:
        yield made


def test_a_scrape_of_one_is_answered_with_all() -> None:
    """The one scraped is asked like the others."""
    with world() as it:
        it.hub.ask(1, number=7)
        it.answer(0, 3.0)
        it.answer(1, 4.0)

        whole = it.whole(1)

    assert (whole.number, total(whole.families)) == (7, 7.0)
    assert ages(whole.families).keys() == {"0", "1"}


def test_who_does_not_answer_counts_with_what_it_said_last() -> None:
    """The total does not fall, the scrape comes back, and says how old that part is."""
    with world(timeout_s=SHORT_S) as it:
        it.hub.take(0, part(3.0))
        it.hub.ask(1, number=1)
        it.answer(1, 4.0)

        families = it.whole(1).families

    assert total(families) == 7.0
    assert ages(families)["0"] >= SHORT_S


def test_who_owes_an_answer_is_not_asked_again() -> None:
    """Of a stopped process nothing is read: messages would pile up until they hold the command."""
    with world(timeout_s=SHORT_S) as it:
        for number in (1, 2):
            it.hub.ask(1, number)
            it.answer(1, 4.0)
            assert it.whole(1).number == number
        it.answer(0, 3.0)  # the first question was the only one
        it.hub.ask(1, number=3)
        it.answer(0, 5.0)
        it.answer(1, 4.0)
        assert total(it.whole(1).families) == 9.0


def test_nobody_waits_for_an_api_server_that_has_gone() -> None:
    """What it counted stays in."""
    with world() as it:
        it.hub.take(0, part(3.0))
        it.hub.drop(0)
        it.hub.ask(1, number=1)
        it.answer(1, 4.0)

        assert total(it.whole(1).families) == 7.0


def test_a_scrape_during_a_collection_gets_the_next_one() -> None:
    """It counts all that had happened before it."""
    with world() as it:
        it.hub.ask(0, number=1)
        it.answer(0, 1.0)
        it.hub.ask(1, number=1)  # the collection waits for 1
        it.answer(1, 1.0)
        assert total(it.whole(0).families) == 2.0
        it.answer(0, 2.0)
        it.answer(1, 2.0)
        assert total(it.whole(1).families) == 4.0


# ------------------------------------------------------------------------ the other end


@contextlib.contextmanager
def listening(exchange: MetricsExchange, channel: Channel) -> Iterator[None]:
    """Hand the command's words to `exchange` from a thread, as an API server process does."""

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                match channel.receive():
                    case PartWanted():
                        exchange.on_part_wanted()
                    case Whole() as whole:
                        exchange.on_whole(whole)

    thread = threading.Thread(target=listen)
    thread.start()
    yield
    thread.join(LONG_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def api_server() -> Iterator[tuple[MetricsExchange, Channel]]:
    """An exchange, and the command's end of its channel."""
    ours, theirs = (Channel(each) for each in Pipe(duplex=True))
    exchange = MetricsExchange(ours)
    with contextlib.closing(ours), listening(exchange, ours), contextlib.closing(theirs):
        yield exchange, theirs


def test_an_api_server_answers_on_its_event_loop() -> None:
    """Its metrics belong to that thread. While it starts there are none, after its end the last."""
    read_by: list[threading.Thread] = []

    def read() -> list[Family]:
        read_by.append(threading.current_thread())
        return part(len(read_by))

    async def serve(exchange: MetricsExchange, command: Channel) -> None:
        exchange.attach(read)
        command.send(PartWanted())
        assert await asyncio.to_thread(command.receive) == Part(part(1.0))

    with api_server() as (exchange, command):
        command.send(PartWanted())
        assert command.receive() == Part([])
        asyncio.run(serve(exchange, command))
        exchange.close()
        assert command.receive() == Part(part(2.0))
        command.send(PartWanted())  # too late, and no error

    assert read_by == [threading.main_thread()] * 2


def test_a_newcomer_ignores_the_answer_to_whoever_was_there_before() -> None:
    """Who died while it waited for an API server that was slow to answer. The newcomer loads, and
    goes on to listen."""
    with api_server() as (_, command):
        command.send(Whole(1, part(1.0)))
        command.send(PartWanted())
        assert command.receive() == Part([])


def test_a_scrape_ignores_the_answer_to_an_earlier_one() -> None:
    """That has been given up, and may not know what has happened since."""

    async def scrape(exchange: MetricsExchange, answer: Callable[[], None]) -> list[Family]:
        exchange.attach(list)
        answering = asyncio.create_task(asyncio.to_thread(answer))
        families = await exchange.collect()
        await answering
        return families

    with api_server() as (exchange, command):

        def answer() -> None:
            assert command.receive() == Scrape(1)
            command.send(Whole(0, part(1.0)))
            command.send(Whole(1, part(2.0)))

        assert total(asyncio.run(scrape(exchange, answer))) == 2.0


def test_without_the_others_part_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap is harmless; counters that fall are taken for a restart, and counted twice."""
    monkeypatch.setattr("cluster.metrics_exchange._TIMEOUT_S", SHORT_S)

    async def scrape(exchange: MetricsExchange) -> None:
        exchange.attach(list)
        with pytest.raises(UnavailableError, match="not collected in time"):
            await exchange.collect()

    with api_server() as (exchange, command):
        asyncio.run(scrape(exchange))
        assert command.receive() == Scrape(1)


def test_what_a_dead_api_server_has_counted_stays() -> None:
    """Counters do not fall when another one takes its place; what it saw of others, and what was of
    its process, goes."""
    world = World(2, LONG_S)
    try:
        world.hub.take(1, [*part(5.0), *not_counted(1.0)])
        world.hub.drop(1)
        world.hub.replace(1)
        world.hub.ask(0, 1)
        world.answer(0, 2.0)
        world.answer(1, 1.0)
        families = world.whole(0).families
        assert total(families) == 8.0
        assert {family.name for family in families} & {"engine_up", "process_cpu_seconds"} == set()
        assert sorted(ages(families)) == ["0", "1"]
    finally:
        world.close()
