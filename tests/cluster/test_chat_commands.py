"""`raywire chat` and `raywire complete`: on a terminal, through pipes, and without a server."""

import json
import subprocess
import sys
from typing import Any

import pytest

from cluster.chat.conversation import Chat, Completions
from tests.helpers.canned_http import canned_server, stream
from tests.helpers.fake_engine import endless_answer, text_as_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.server import ROOT
from tests.helpers.terminal import CTRL_C, CTRL_D, on_terminal


def url(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def run(*args: str, keys: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cluster", *args],
        input=keys,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def prompts(server: HttpServer) -> list[str]:
    """What the engine was given, as text."""
    return [
        bytes(each for each in request.prompt_token_ids.tolist() if each < 256).decode()
        for request in server.engine.received
        if request.prompt_token_ids is not None
    ]


# ---------------------------------------------------------------------------------------- pure


def test_a_chat_remembers() -> None:
    """All that was said goes with each message, and the system's prompt before all."""
    chat = Chat("be kind")
    chat.ask("a")
    chat.end("A")

    assert chat.ask("b")["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "b"},
    ]


def test_a_message_without_an_answer_is_forgotten() -> None:
    """Many templates refuse two messages of the user in a row."""
    chat = Chat()
    chat.ask("a")
    chat.end("")

    assert chat.ask("b")["messages"] == [{"role": "user", "content": "b"}]


def test_prompts_stand_by_themselves() -> None:
    """A completion has no history."""
    completions = Completions()
    completions.ask("a")
    completions.end("A")

    assert completions.ask("b") == {"prompt": "b"}


# ------------------------------------------------------------------------------------- terminal


def test_a_chat_on_a_terminal() -> None:
    """Prompt, answer, and what was said goes with what is said next; Ctrl-D ends."""
    with serving(text_as_answer("pong")) as server:
        with on_terminal("chat", "--url", url(server), "--system-prompt", "rules") as terminal:
            terminal.wait_for("> ")
            terminal.press("ping one\r")
            terminal.wait_for("pong\n> ")
            terminal.press("ping two\r")
            terminal.wait_for("pong\n> ")
            terminal.press(CTRL_D)

            assert terminal.wait() == 0
        first, second = prompts(server)

    assert "rules" in first
    assert "ping one" in first
    assert second.startswith(first)
    assert "pong" in second
    assert "ping two" in second


def test_ctrl_c_ends_an_answer_and_not_the_chat() -> None:
    """The server stops computing it, the next message is answered, and the program goes on."""
    options = {"max_model_len": 1_000_000, "step_s": 0.01}
    with serving(endless_answer, engine_options=options) as server:
        with on_terminal("chat", "--url", url(server)) as terminal:
            terminal.wait_for("> ")
            terminal.press("go\r")
            terminal.wait_for("abcdefgh")
            terminal.press(CTRL_C)
            terminal.wait_for("\n> ")
            server.wait_idle()
            server.engine.answer = text_as_answer("fine")
            terminal.press("stop?\r")
            terminal.wait_for("fine\n> ")
            terminal.press(CTRL_D)

            assert terminal.wait() == 0
        assert "abcdefgh" in prompts(server)[1]
        assert "Traceback" not in terminal.screen


def test_ctrl_c_at_the_prompt_drops_the_line() -> None:
    """As in a shell: nothing is sent, and the program goes on."""
    with serving(text_as_answer("yes")) as server:
        with on_terminal("complete", "--url", url(server)) as terminal:
            terminal.wait_for_prompt()
            terminal.press("half a line")
            terminal.wait_for("half a line")
            terminal.interrupt_line()
            terminal.press("whole\r")
            terminal.wait_for("yes\n> ")
            terminal.press(CTRL_D)

            assert terminal.wait() == 0
        assert prompts(server) == ["whole"]


def test_answers_do_not_steer_the_terminal() -> None:
    """What a model writes is not the user's: no escape sequence gets through."""
    with serving(text_as_answer("\x1b]0;title\x07a\x9b2Jb\tc")) as server:
        with on_terminal("complete", "--url", url(server), "-q", "x") as terminal:
            assert terminal.wait() == 0

    assert "]0;titlea2Jb" in terminal.screen.replace("\ufffd", "")
    assert not set("\x1b\x07\x9b") & set(terminal.screen)


# ---------------------------------------------------------------------------------------- pipes


def test_one_message_gives_one_answer() -> None:
    """-q writes the answer and nothing else, so that it can go into a file."""
    with serving(text_as_answer("pong")) as server:
        done = run("chat", "--url", url(server), "-q", "ping", "--model", "alias")

    assert (done.returncode, done.stdout, done.stderr) == (0, "pong\n", "")


def test_a_completion_goes_on_with_the_text() -> None:
    """The prompt reaches the model as it is, and the fields do."""
    with serving() as server:
        done = run(
            "complete", "--url", url(server), "-q", "The sea", "--max-tokens", "3",
            "--temperature", "0", "--stats",
        )  # fmt: skip
        (request,) = server.engine.received

    assert done.stdout == "The\n"
    assert "(3 tokens in" in done.stderr
    assert "TTFT: " in done.stderr
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 3


def test_lines_of_a_pipe_are_messages() -> None:
    """Without prompts between the answers."""
    with serving() as server:
        done = run("complete", "--url", url(server), keys="one\n\ntwo\n")

    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "")


def test_bytes_that_are_no_text_are_no_trouble() -> None:
    """Neither on the command line nor from a pipe."""
    with serving() as server:
        command = [sys.executable, "-m", "cluster", "complete", "--url", url(server)]
        quick = subprocess.run(
            [*command, "-q", b"a\xff"], capture_output=True, check=True, cwd=ROOT
        )
        piped = subprocess.run(command, input=b"b\xff", capture_output=True, check=True, cwd=ROOT)

    assert quick.stdout.startswith(b"a")
    assert piped.stdout.startswith(b"b")


def test_a_reader_that_leaves_is_no_trouble() -> None:
    """As `head` does."""
    options = {"max_model_len": 1_000_000, "step_s": 0.01}
    with serving(endless_answer, engine_options=options) as server:
        command = [sys.executable, "-m", "cluster", "complete", "--url", url(server), "-q", "x"]
        with subprocess.Popen(
            [*command, "--max-tokens", "100000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(3) == b"abc"
            process.stdout.close()
            assert process.stderr.read() == b""
        server.wait_idle()


def test_thoughts_are_marked() -> None:
    """As vLLM's command marks them."""
    deltas: list[Any] = [{"reasoning_content": "hm"}, {"content": "yes"}]
    events = [json.dumps({"choices": [{"delta": each}]}) for each in deltas]
    with canned_server(stream(*events)) as server:
        done = run("chat", "--url", f"http://127.0.0.1:{server.port}", "--model", "m", "-q", "x")

    assert done.stdout == "<think>\nhm\n</think>\nyes\n"


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_is_one_line(command: str) -> None:
    """Address, reason and what to do."""
    done = run(command, "--url", "http://127.0.0.1:1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no server answers at http://127.0.0.1:1 (Connection ref")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_message_without_its_option_is_one_line(command: str) -> None:
    done = run(command, "The sea is")

    assert done.returncode == 2
    assert "-q 'MESSAGE' sends one" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_refusal_is_one_line() -> None:
    """The server's words, on standard error, and exit code 1."""
    with serving() as server:
        done = run("chat", "--url", url(server), "-q", "x", "--model", "nobody")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: HTTP 404: ")
    assert done.stderr.count("\n") == 1


def test_a_server_that_is_loading_says_so() -> None:
    """Its words are better than ours."""
    with serving(waits_until_ready=False, engine_options={"is_ready": False}) as server:
        done = run("chat", "--url", url(server), "-q", "x")

    assert done.returncode == 2
    assert "HTTP 503: the model is loading" in done.stderr
