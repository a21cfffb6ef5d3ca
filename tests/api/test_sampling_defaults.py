"""What a model's makers recommend, or its operator says, holds for requests that say nothing."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import sampling_defaults
from api.sampling import SamplingParams
from api.sampling_defaults import SamplingDefaults, check_override, read
from engine.errors import ConfigError
from tests.helpers.http_server import HttpServer, serving

FILE = "generation_config.json"
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}


def folder_with(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text)
    return folder


# ------------------------------------------------------------------------------------------ reading


def test_a_folder_without_the_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As GPT-2 and the demo model: not a word about it either."""
    with caplog.at_level(logging.INFO):
        assert read(tmp_path) == SamplingDefaults()
        folder_with(tmp_path, {"eos_token_id": 1, "top_k": None, "temperature": 1.0})
        assert read(tmp_path) == SamplingDefaults()
    assert not caplog.records


def test_what_is_taken_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that differ from those of another server are explained by it."""
    folder_with(tmp_path, {**RECOMMENDED, "do_sample": False, "eos_token_id": [1]})
    with caplog.at_level(logging.INFO):
        found = read(tmp_path, override={"top_p": 1, "min_p": 0.1})
    assert found.values == {
        **{"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
        "min_p": 0.1,
    }
    (line,) = caplog.messages
    assert "temperature=0.6 top_k=20 min_p=0.1 repetition_penalty=1.1" in line
    assert line.endswith(f"from={FILE},--override-generation-config")


def test_the_source_is_the_model_nothing_or_another_folder(tmp_path: Path) -> None:
    """`--generation-config`; the limit of a folder that was named is one for everybody, as in
    vLLM."""
    own = folder_with(tmp_path / "own", {"temperature": 0.5, "max_new_tokens": 7})
    other = folder_with(tmp_path / "other", {"temperature": 0.7, "max_new_tokens": 9})

    assert read(own) == SamplingDefaults({"temperature": 0.5}, 7, None)
    assert read(own, "vllm") == SamplingDefaults()
    assert read(own, str(other)) == SamplingDefaults({"temperature": 0.7}, 9, 9)
    override = {"max_new_tokens": 3, "temperature": None}
    assert read(own, override=override) == SamplingDefaults({}, 3, 3)
    assert read(own, "vllm", {"top_k": 4}) == SamplingDefaults({"top_k": 4})
    with pytest.raises(ConfigError, match=r"--generation-config .*: there is no generation_config"):
        read(own, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**30),
    ],
)
def test_a_wrong_value_of_a_file_is_left_out_and_one_of_the_operator_ends_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    """A model is not lost for its file, which its operator has not written."""
    folder_with(tmp_path, {"presence_penalty": 0.5, name: value})
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == SamplingDefaults({"presence_penalty": 0.5})
    (line,) = caplog.messages
    assert line.startswith(f"{FILE}: {name} must be ")
    assert len(line) < 200

    with pytest.raises(ConfigError, match=f"--override-generation-config: {name} must be "):
        check_override({name: value})


def test_names_that_nothing_heeds_end_the_start() -> None:
    """A slip of the pen would go unnoticed otherwise."""
    with pytest.raises(ConfigError, match="has 'temprature'; there are temperature, top_p"):
        check_override({"temprature": 1})


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", "[" * 100_000])
def test_a_broken_file_ends_the_start(tmp_path: Path, text: str) -> None:
    """The model's end tokens are in it too: nobody wants to serve without."""
    folder_with(tmp_path, "")
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=FILE):
        read(tmp_path)


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.dictionaries(st.sampled_from([*sampling_defaults._NEUTRAL]), _VALUES))
def test_whatever_passes_can_be_sampled_with(values: dict[str, Any]) -> None:
    """What the operator may say is what `SamplingParams` takes, no more."""
    try:
        check_override(values)
    except ConfigError:
        return
    SamplingParams(**read(Path("/nowhere"), override=values).as_params())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ routes


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    content = {**RECOMMENDED, "max_new_tokens": 40}
    with serving(start=lambda folder: folder_with(folder, content)) as server:
        yield server


@pytest.fixture(scope="module")
def limited() -> Iterator[HttpServer]:
    with serving(override_generation_config={"max_new_tokens": 8, "temperature": 0.25}) as server:
        yield server


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}


def sampled(server: HttpServer, route: str, **fields: Any) -> dict[str, Any]:
    """What the engine would be asked for."""
    answer = server.http.post(f"{route}/render", json={**BODIES[route], **fields})
    assert answer.status_code == 200, answer.text
    rendered = answer.json()
    (one,) = rendered if isinstance(rendered, list) else [rendered]
    params: dict[str, Any] = one["sampling_params"]
    return params


@pytest.mark.parametrize("route", BODIES)
def test_every_route_fills_in_what_is_left_out(server: HttpServer, route: str) -> None:
    """And null leaves out as well; what a request says holds."""
    params = sampled(server, route, temperature=None)
    assert RECOMMENDED.items() <= params.items()

    params = sampled(server, route, temperature=0, top_k=3)
    assert (params["temperature"], params["top_k"], params["top_p"]) == (0, 3, 0.95)


def test_the_models_limit_is_for_chats_that_name_none(server: HttpServer) -> None:
    """Completions have OpenAI's 16, as in vLLM; who asks for more gets more."""
    expected = {
        "/v1/chat/completions": 40,
        "/v1/responses": 40,
        "/v1/completions": 16,
        "/v1/messages": 50,
    }
    assert {route: sampled(server, route)["max_tokens"] for route in BODIES} == expected
    assert sampled(server, "/v1/chat/completions", max_tokens=41)["max_tokens"] == 41


def test_a_limit_of_the_operator_is_for_everybody(limited: HttpServer) -> None:
    """More is cut rather than refused, as in vLLM."""
    for route in BODIES:
        assert sampled(limited, route)["max_tokens"] == 8
        assert sampled(limited, route)["temperature"] == 0.25
    assert sampled(limited, "/v1/chat/completions", max_completion_tokens=9)["max_tokens"] == 8
    assert sampled(limited, "/v1/completions", max_tokens=3)["max_tokens"] == 3
    assert sampled(limited, "/v1/responses", max_output_tokens=99)["max_tokens"] == 8


def test_messages_that_are_cut_by_the_limit_say_so(limited: HttpServer) -> None:
    """Not that the model's length is used up."""
    body = {**BODIES["/v1/messages"], "messages": [{"role": "user", "content": "long enough"}]}
    answer = limited.http.post("/v1/messages", json=body).json()
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 8)


def test_a_search_takes_the_limit_and_nothing_else(server: HttpServer) -> None:
    """It looks for what is likeliest; a recommended penalty is no mistake of its request."""
    params = sampled(server, "/v1/chat/completions", use_beam_search=True, n=2)
    assert params["max_tokens"] == 40


def test_responses_and_the_servers_own_account_show_them(server: HttpServer) -> None:
    """As the values that were used."""
    response = server.http.post("/v1/responses", json=BODIES["/v1/responses"]).json()
    shown = server.http.get("/server_info", params={"config_format": "json"}).json()
    assert (response["temperature"], response["top_p"]) == (0.6, 0.95)
    model = shown["vllm_config"]["model"]
    assert model["default_sampling_params"] == {**RECOMMENDED, "max_tokens": 40}
