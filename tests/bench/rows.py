"""The rows of the table: what is compared, in which unit, and the bar that we have set ourselves.

`ROWS` has them in the order of the document; sections fill in figures by key.
"""

import statistics
from dataclasses import dataclass

from tests.bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach."""

    times: float | None = None
    """So many times as good as the peer."""
    at_most: float | None = None
    """In the row's unit."""
    text: str | None = None
    """In place of the plain one."""

    def shown(self, unit: str) -> str:
        if self.text is not None:
            return self.text
        return f"≥ {self.times:g} ×" if self.times is not None else f"≤ {self.at_most:g} {unit}"

    def is_met(self, figure: Figure, is_rate: bool) -> bool | None:
        """None where there is no peer to compare with."""
        if self.at_most is not None:
            return statistics.median(figure.ours) <= self.at_most
        ratios = figure.ratios(is_rate)
        return statistics.median(ratios) >= (self.times or 0) if ratios else None


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    label: str
    unit: str
    bar: Bar | None = None
    is_rate: bool = False
    """More is better."""
    peer: str = "vLLM"
    """Whom `theirs` are of."""

    @property
    def is_beside_vllm(self) -> bool:
        return self.peer.startswith("vLLM")


def _decode_rows() -> list[Row]:
    bars = {1: 1.15, 8: 1.5, 32: 1.4}
    rows = [
        Row(f"decode-{size}", f"decode step, greedy, batch {size}", "ms", Bar(bar))
        for size, bar in bars.items()
    ]
    rows += [
        Row(f"sampled-{size}", f"decode step, temperature and top-p, batch {size}", "ms", Bar(bar))
        for size, bar in {8: 2.7, 32: 3.4}.items()
    ]
    return rows + [
        Row(f"prefill-{length}", f"prefill, {length:,} tokens", "ms", Bar(1.5))
        for length in (128, 1024)
    ]


def _float32_rows() -> list[Row]:
    peer = "vLLM in float32"
    rows = [
        Row(f"float32-decode-{size}", f"vLLM in float32: decode, batch {size}", "ms", peer=peer)
        for size in (1, 8, 32)
    ]
    return rows + [
        Row(f"float32-prefill-{length}", f"vLLM in float32: prefill, {length:,}", "ms", peer=peer)
        for length in (128, 1024)
    ]


def _int8_rows() -> list[Row]:
    plain = "our bf16"
    return [
        Row("int8-decode-1", "int8: decode step, batch 1", "ms", Bar(1.3), peer=plain),
        Row("int8-prefill-128", "int8: prefill, 128 tokens", "ms", Bar(1.4), peer=plain),
        Row("int8-prefill-1024", "int8: prefill, 1,024 tokens", "ms", Bar(1.4), peer=plain),
        Row(
            "int8-perplexity",
            "int8: perplexity",
            "",
            Bar(1 / 1.02, text="≤ 2% worse"),
            peer=plain,
        ),
    ]


def _server_rows() -> list[Row]:
    rows = []
    for count in (1, 8, 32):
        streams = f"{count} stream{'s' * (count > 1)}"
        rows += [
            Row(f"http-{count}", f"HTTP: output, {streams}", "tokens/s", Bar(1.3), is_rate=True),
            Row(
                f"between-{count}",
                f"HTTP: between tokens, 99%, {streams}",
                "ms",
                Bar(1.0, text="no worse"),
            ),
            Row(f"first-{count}", f"HTTP: first token, median, {streams}", "ms"),
        ]
    return rows


def _process_rows() -> list[Row]:
    return [
        Row("start-demo", "command to first token, Gemma", "s", Bar(at_most=12)),
        Row("start-tiny", "command to first token, tiny model", "s", Bar(at_most=8)),
        Row("memory-demo", "memory of all processes (PSS), Gemma", "GiB", Bar(at_most=1.8)),
        Row("memory-tiny", "memory of all processes (PSS), tiny model", "GiB", Bar(at_most=0.7)),
        Row(
            "waiting",
            "CPU of the engine core while it waits for a step",
            "cores",
            Bar(at_most=0.03),
        ),
        Row("idle", "idle CPU, all processes", "cores", Bar(at_most=0.02)),
        Row("stop", "SIGTERM to the end", "s"),
    ]


def _part_rows() -> list[Row]:
    return [
        Row("ring-1k", "ring round trip, 1 KiB, 2 readers, quiet", "µs", Bar(at_most=85)),
        Row(
            "ring-1k-busy",
            "ring round trip, 1 KiB, 2 readers, beside 2 busy threads",
            "µs",
            Bar(at_most=60),
        ),
        Row("ring-12m", "ring round trip, 12 MiB, 1 reader", "ms", Bar(at_most=3.8)),
        Row("codec-1k", "wire 1 codec, request of 1k tokens", "µs", Bar(at_most=20)),
        Row("codec-100k", "wire 1 codec, request of 100k tokens", "µs", Bar(at_most=100)),
        Row("schedule-1", "schedule + update + encode, 1 running", "µs", Bar(at_most=30)),
        Row("schedule-32", "schedule + update + encode, 32 running", "µs", Bar(at_most=200)),
        Row("schedule-256", "schedule + update + encode, 256 running", "µs", Bar(at_most=1500)),
        Row("hash", "block hashes per 1k tokens, block 16, SHA-256", "µs", Bar(at_most=70)),
        Row("overhead-16", "engine step beside the model, 16 running", "ms", Bar(at_most=0.5)),
        Row("overhead-256", "engine step beside the model, 256 running", "ms", Bar(at_most=2.5)),
        Row(
            "requests-64",
            "front end: 1-token requests, concurrency 64, tiny model",
            "1/s",
            Bar(2.0),
            is_rate=True,
        ),
        Row(
            "streamed-64",
            "front end: streamed output, 64 streams, tiny model",
            "tokens/s",
            Bar(2.0),
            is_rate=True,
        ),
    ]


ROWS = [
    *_decode_rows(),
    *_float32_rows(),
    *_int8_rows(),
    *_server_rows(),
    *_process_rows(),
    *_part_rows(),
]
