"""Chat templates: transformers' conventions, and what a template or a message must not do."""

import time
from typing import Any

import pytest

from api import template_sandbox
from api.chat_template import ChatTemplate
from api.tokenizer import Tokenizer
from engine.errors import ConfigError, InvalidRequestError, UnsupportedFieldError
from tests.helpers.tiny_tokenizers import byte_level, save, with_begin

CHATML = """\
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("The system message comes first, or not at all.") }}
    {%- endif %}
    {{- '<|turn|>' + message['role'] + '\\n' + message['content'] | trim + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

WITH_BEGIN = "{{ bos_token }}" + CHATML

PARTS = """\
{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}"""

TOOLS = """\
{% set ns = namespace(count=0) %}
{% for tool in tools or [] %}{% set ns.count = ns.count + 1 %}{{ tool | tojson(indent=2) }}
{% if loop.last %}{{ ns.count }} of {{ loop.length }} tools{% endif %}
{% endfor %}
{% for m in messages if m.role != 'skip' %}
  {% if m.role == 'stop' %}{% break %}{% endif %}
  {% if 'tool_calls' in m %}calls{% endif %}
  {% generation %}{{ m.content }}{% endgeneration %}{{ "<é&>" | tojson }}{{ extra or 'none' }}
{% endfor %}{{ strftime_now("%Y") | length }}{{ dict(a=1) | tojson }}"""

USER = {"role": "user", "content": " Hi & welcome <b> "}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "The sum is ", "tool_calls": None},
]
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"type": "object"}}}


def make(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"})


def transformers_render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast  # slow to import: only to compare

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>")
    text: str = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, **options
    )
    return text


@pytest.mark.parametrize("source", [CHATML, WITH_BEGIN, PARTS, TOOLS])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": [TOOL, TOOL]},
    ],
)
def test_rendering_equals_transformers(source: str, options: dict[str, Any]) -> None:
    """Blocks trimmed, JSON not escaped, its own tags and functions, the last message left open."""
    chat = [*CHAT, {"role": "assistant", "content": "It goes on\n"}]

    variables = {"extra": "yes"} if "tools" in options else {}
    ours = make(source).render(chat, **options, variables=variables)

    assert ours == transformers_render(source, chat, **options, **variables)


def test_parts_go_to_templates_that_read_them() -> None:
    """Others get the texts of all parts as one."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]

    assert make(PARTS).render(chat) == "<s>[user]one;two;"
    assert "\none\ntwo</s>" in make(CHATML).render(chat)


def test_the_begin_token_comes_once(tmp_path: Any) -> None:
    """The template writes it; encoding adds no second one."""
    tokenizer = Tokenizer.load(save(with_begin(byte_level()), tmp_path, chat_template=WITH_BEGIN))
    text = ChatTemplate.load(tokenizer).render([USER])

    token_ids = tokenizer.encode(text, add_special_tokens=False)

    assert token_ids.count(tokenizer.token_id("<s>") or 0) == 1
    assert token_ids[0] == tokenizer.token_id("<s>")


def test_a_template_refuses_in_its_own_words() -> None:
    """As a 400 with the template's message, not as a failure of ours."""
    with pytest.raises(InvalidRequestError, match=r"^The system message comes first, or not at al"):
        make(CHATML).render([USER, CHAT[0]])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ nobody.knows }}", "nobody"),
    ],
)
def test_a_template_that_breaks_is_a_clear_error(source: str, message: str) -> None:
    """Its fault or the messages': the client reads what went wrong."""
    with pytest.raises(InvalidRequestError, match=message):
        make(source).render([USER])


@pytest.mark.row("S-12")
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__globals__.x }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ ''|attr('__class__')|attr('__mro__')|list }}{{ ().__class__.__bases__ }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_the_interpreter(source: str) -> None:
    """Attribute walking, and changing its input, end in an error (S-12)."""
    with pytest.raises(InvalidRequestError):
        make(source).render([USER])


@pytest.mark.row("S-29")
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{% for o in messages %}"
        "{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_rendering_is_cut(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops in loops, over numbers or the client's own messages, end at the deadline (S-29)."""
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 0.1)
    template = make(source)
    began = time.monotonic()

    with pytest.raises(InvalidRequestError, match="took over"):
        template.render([USER] * 3000)

    assert time.monotonic() - began < 5.0


@pytest.mark.row("S-29")
def test_endless_output_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that doubles what it is given does not fill the memory (S-29)."""
    monkeypatch.setattr(template_sandbox, "MAX_RENDERED_CHARS", 10_000)

    with pytest.raises(InvalidRequestError, match="wrote over"):
        make("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}").render([USER])


@pytest.mark.row("S-28")
def test_template_variables_lie_under_the_servers_own_names() -> None:
    """`chat_template_kwargs` cannot pretend to be the begin token (S-28)."""
    with pytest.raises(InvalidRequestError, match="bos_token"):
        make(CHATML).render([USER], variables={"bos_token": "x"})


def test_a_chat_is_continued_or_answered_not_both() -> None:
    """Both flags at once are a 400 (E07)."""
    with pytest.raises(InvalidRequestError, match="not both"):
        make(CHATML).render(CHAT, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], InvalidRequestError),
        (["hi"], InvalidRequestError),
        ([{"content": "hi"}], InvalidRequestError),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidRequestError),
        ([{"role": "user", "content": ["hi"]}], InvalidRequestError),
        ([{"role": "user", "content": object()}], InvalidRequestError),
        ([{"role": "user", "content": [{"type": "image_url"}]}], UnsupportedFieldError),
    ],
)
def test_messages_that_are_none_are_refused(
    messages: list[Any], error: type[InvalidRequestError]
) -> None:
    """With the place of the wrong one."""
    with pytest.raises(error) as refused:
        make(PARTS).render(messages)

    assert (refused.value.param or "").startswith("messages")


def test_deep_nesting_is_refused() -> None:
    """Rather than running out of stack."""
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]

    with pytest.raises(InvalidRequestError, match="levels deep"):
        make(CHATML).render([{"role": "user", "content": "x", "extra": deep}])


def test_a_model_without_a_template_says_so() -> None:
    """When a chat comes, not before: completions need none."""
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}).render([USER])


def test_a_broken_template_is_named_at_start() -> None:
    """With its line."""
    with pytest.raises(ConfigError, match="line 2"):
        make("fine\n{% for %}")


HERMES = """\
{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>
{%- endfor %}{% endfor %}"""

DEEPSEEK = """\
{% for m in messages %}[{{ m.role }}]{% if m['content'] is none %}{% for call in m['tool_calls'] %}
{{- '<' + call['function']['name'] + ' ' + call['function']['arguments'] + '>' }}{% endfor %}
{%- else %}{{ m['content'] }}{% endif %}{% endfor %}"""

PRINTS_ALL = """\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson }}{% endfor %}{% endfor %}"""


def calling(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    """A conversation with a call."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
    ]


def test_earlier_calls_have_the_form_that_the_template_reads() -> None:
    """Arguments as an object or as the text that clients send; no content as null or as empty."""
    for content in (None, ""):
        chat = calling('{"a": "é"}', content=content)
        assert make(HERMES).render(chat) == '[user]hi[assistant]<f {"a": "é"}>[tool]3'
        assert make(DEEPSEEK).render(chat) == '[user]hi[assistant]<f {"a": "é"}>[tool]3'
        assert (
            make(PRINTS_ALL).render(chat)
            == '[user]hi[assistant]{"name": "f", "arguments": {"a": "é"}}[tool]3'
        )


def test_objects_and_missing_arguments_are_taken_too() -> None:
    """As some clients send them."""
    for arguments, shown in (({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}")):
        for source in (HERMES, DEEPSEEK):
            assert f"<f {shown}>" in make(source).render(calling(arguments))


def test_broken_arguments_of_an_earlier_call_end_no_conversation() -> None:
    """The model wrote them, and the client can only send them back. Where the template wants an
    object there is none in them."""
    for arguments in ('{"a": ', "[1]", "3"):
        assert (
            make(DEEPSEEK).render(calling(arguments))
            == f"[user]hi[assistant]<f {arguments}>[tool]3"
        )
        assert make(HERMES).render(calling(arguments)) == "[user]hi[assistant]<f {}>[tool]3"


def test_content_beside_calls_and_empty_lists_of_calls_stay_what_they_are() -> None:
    """A list without calls is none: templates test whether it is there."""
    assert "[assistant]Well<f" in make(HERMES).render(calling("{}", content="Well"))
    assert "calls" not in make(TOOLS).render([{**CHAT[0], "tool_calls": []}])


def test_results_of_tools_are_texts() -> None:
    """Templates that read parts read them in users' messages, hardly ever in tools'."""
    part = {"type": "text", "text": "3"}
    text = make(PARTS).render([USER, {"role": "tool", "content": [part, part]}])

    assert text.endswith("[tool]3\n3")


def test_source_is_that_of_the_template_for_tools() -> None:
    """It tells which family the model belongs to."""
    assert ChatTemplate({"default": "a", "tool_use": "b"}).source == "b"
    assert make("a").source == "a"
    assert ChatTemplate({}).source is None


def test_template_that_renders_nothing_says_so() -> None:
    """Messages there are."""
    with pytest.raises(InvalidRequestError, match="rendered nothing") as caught:
        ChatTemplate({"default": "{% if false %}x{% endif %}"}).render(
            [{"role": "user", "content": "hello"}]
        )
    assert caught.value.param == "messages"
