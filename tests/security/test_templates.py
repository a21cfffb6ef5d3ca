"""Chat templates are programs. Those of clients are refused unless the operator trusts them, and
whatever one does, the others are served."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from api import template_sandbox
from tests.helpers.http_server import HttpServer, serving

RENDER_S = 0.3
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
MILLION = "{% for a in range(1000) %}{% for b in range(1000) %}{{ b }}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_sandbox, "MAX_RENDER_S", RENDER_S)
        patch.setattr(template_sandbox, "MAX_RENDERED_CHARS", 100_000)
        with serving(trust_request_chat_template=True) as server:
            yield server


@pytest.mark.row("S-29")
def test_a_clients_template_is_refused_by_default() -> None:
    """Whatever it is, before anybody reads it."""
    with serving() as server:
        for template in ("{{ messages }}", LOOP, "{% broken", "x" * 1_000_000):
            response = server.chat(chat_template=template)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "unsupported_parameter"
            assert response.json()["error"]["param"] == "chat_template"


@pytest.mark.row("S-29")
@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        MILLION,
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * ['x'] }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_an_endless_template_is_the_clients_fault(server: HttpServer, template: str) -> None:
    """Cut by its time, by what it writes, or by the size of a number; and the next is served."""
    began = time.process_time()
    response = server.chat(chat_template=template)

    assert response.status_code == 400, response.text
    assert time.process_time() - began < 10 * RENDER_S  # of all threads of this process
    assert response.json()["error"]["param"] == "chat_template"
    assert server.chat(chat_template="{{ messages[0].content }}").status_code == 200


@pytest.mark.row("S-28")
def test_nobody_waits_for_a_template(server: HttpServer) -> None:
    """Rendering is not on the event loop: probes are answered while a template runs."""
    done = threading.Event()

    def ask() -> None:
        server.chat(chat_template=LOOP + "{# another one #}")
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    slowest_s, num_answers = 0.0, 0
    while not done.is_set():
        began = time.monotonic()
        assert server.http.get("/live").status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - began)
        num_answers += 1

    assert num_answers > 2
    assert slowest_s < 1.0


RESERVED = ("messages", "tools", "documents", "chat_template", "self")


@pytest.mark.row("S-28")
def test_a_clients_variables_are_only_the_templates(server: HttpServer) -> None:
    """Reserved names are refused; others reach the template, and nothing of ours."""
    for name in (*RESERVED, "add_generation_prompt", "continue_final_message"):
        response = server.chat(chat_template_kwargs={name: True})
        assert response.status_code == 400, name
        assert name in response.json()["error"]["message"]

    names = ("tokenize", "return_dict", "padding", "environment", "loop", "trust_remote_code")
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}" + "".join(
        f" {name}={{{{ {name} }}}}" for name in names if name != "loop"
    )
    asked: dict[str, Any] = {"chat_template_kwargs": dict.fromkeys(names, "theirs")}
    answer = server.chat(chat_template=shown, return_prompt_text=True, **asked).json()
    assert answer["prompt_text"] == "hi tokenize=theirs return_dict=theirs padding=theirs" + (
        " environment=theirs trust_remote_code=theirs"
    )
