"""/v1/responses with answers of a given form, through the `openai` client and the whole system.

The scripted model samples at random, so it writes whatever the grammar allows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import responses as sdk
from pydantic import BaseModel, Field

from tests.helpers.responses import TEMPLATE
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server

pytestmark = pytest.mark.slow

RANDOM: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 1500}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    kind: Literal["cat", "dog"]


class GetWeather(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("scripted")
    model = make_scripted_model(folder, kind="cycle", token_ids=list(b"abc"))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    flags = ("--served-model-name", "m", "--chat-template", str(template))
    with running_server(str(model), *flags) as it:
        yield it


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as client:
        yield client


def test_parses_into_a_model(client: openai.OpenAI) -> None:
    """`.parse` with Pydantic, and the same streamed."""
    hot = {"temperature": 100.0}
    whole = client.responses.parse(text_format=Person, extra_body=hot, **RANDOM)
    with client.responses.stream(text_format=Person, extra_body=hot, **RANDOM) as stream:
        streamed = stream.get_final_response()

    for response in (whole, streamed):
        assert isinstance(response.output_parsed, Person), response.output_text
        assert response.status == "completed"


def test_calls_are_made_where_they_must_be(client: openai.OpenAI) -> None:
    """Required, and with arguments that the client can read into its model."""
    tool = openai.pydantic_function_tool(GetWeather)["function"]
    tools: list[Any] = [{"type": "function", **tool}]

    response = client.responses.create(
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"temperature": 100.0},
        **RANDOM,
    )

    [call] = response.output
    assert isinstance(call, sdk.ResponseFunctionToolCall)
    assert call.name == "GetWeather"
    GetWeather.model_validate_json(call.arguments)


def test_broken_schemas_name_their_place(client: openai.OpenAI) -> None:
    """Before anything runs, or where the compiler finds it."""
    schemas: list[dict[str, Any]] = [{"type": "no"}, {"type": "string", "pattern": "(?=x)"}]
    for schema in schemas:
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(text=form, **RANDOM)
        assert (caught.value.param or "").startswith("text.format")
