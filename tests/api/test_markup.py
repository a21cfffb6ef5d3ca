"""What is known of a model's answers once it is loaded."""

import re
from typing import Any

import pytest
from tokenizers import AddedToken

from api import detokenizer
from api.chat_template import ChatTemplate
from api.config import ApiConfig
from api.markup import Markup
from api.reasoning import FAMILIES as THOUGHTS
from api.tokenizer import Tokenizer
from api.tools import select
from tests.helpers.tiny_tokenizers import byte_level

TEMPLATE = "[TOOL_CALLS]{{ messages }}<think></think>"


def make_tokenizer() -> Tokenizer:
    """Of the markers, the one of calls is a special token, those of thoughts are added ones."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def choose(template: str = TEMPLATE, **config: Any) -> Markup:
    settings = ApiConfig(served_model_names=("m",), **config)
    return Markup.choose(settings, make_tokenizer(), ChatTemplate({"default": template}))


def test_flags_count_more_than_the_template() -> None:
    """Calls are read as the template shows them, thoughts only where a flag says so."""
    assert choose().calls is select.MISTRAL
    assert choose().thoughts is None
    assert choose(tool_call_parser="hermes").calls is select.HERMES
    assert choose(tool_call_parser=None).calls is None
    assert choose("{{ messages }}").calls is None
    assert choose(reasoning_parser="auto").thoughts is THOUGHTS["qwen3"]
    assert choose("{{ messages }}", reasoning_parser="auto").thoughts is None


@pytest.mark.parametrize(
    ("template", "config", "said"),
    [
        ("{{ messages }}", {"tool_call_parser": "hermes"}, "hermes: .* shows no tools"),
        ("{{ messages }}", {"tool_call_parser": "pythonic"}, "pythonic: .* shows no tools"),
        (TEMPLATE + "{{ tools }}", {"tool_call_parser": "hermes"}, "<tool_call>.* like mistral"),
        ("{{ tools }}", {"tool_call_parser": "deepseek_v3"}, " or .*text: its model card"),
        ("", {"reasoning_parser": "mistral"}, r"\[THINK\] and \[/THINK\] are .* is content"),
        ("", {"reasoning_parser": "gemma4"}, "<channel\\|> are no token .* is content"),
    ],
)
def test_parsers_that_do_not_fit_the_model_are_told_of(
    template: str, config: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is loaded, each in one line that says what will happen."""
    choose(template, **config)

    [warning] = warnings(caplog)
    assert re.search(said, warning)


def test_thoughts_that_never_end_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Of a model that begins its answers inside one."""
    tokenizer = Tokenizer(byte_level(), {})
    config = ApiConfig(served_model_names=("m",), reasoning_parser="deepseek_r1")

    Markup.choose(config, tokenizer, ChatTemplate({"default": TEMPLATE}))

    assert "unless it spells out </think>, its thoughts do not end" in warnings(caplog)[0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tool_call_parser": "mistral", "reasoning_parser": "qwen3"},
        {"reasoning_parser": "auto"},
    ],
)
def test_parsers_that_fit_are_not_worth_a_word(
    config: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor are those that were found in the template."""
    choose(TEMPLATE + "{{ tools }}", **config)

    assert warnings(caplog) == []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_markers_that_are_special_tokens_show_in_the_text() -> None:
    """They alone: other special tokens are skipped as ever."""
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("<s>a[TOOL_CALLS]b</s>", add_special_tokens=False)
    markup = choose(reasoning_parser="auto")

    assert markup.call_token_ids == {tokenizer.token_id("[TOOL_CALLS]")}
    assert markup.thought_token_ids == frozenset()
    for kept, text in ((frozenset[int](), "ab"), (markup.call_token_ids, "a[TOOL_CALLS]b")):
        assert detokenizer.start(tokenizer, kept_token_ids=kept).push(token_ids) == text
