"""Which family a chat template belongs to: by the lines in which real ones show calls."""

import pytest

from api import reasoning
from api.tools import select
from tests.helpers.server import ROOT

TEMPLATES = {
    # Qwen 2.5, Qwen 3 and Hermes
    "hermes": r"""<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}"""
    r"""\n</tool_call>""",
    # Qwen3-Coder
    "qwen3_coder": r"""<tool_call>\n<function=example_function_name>\n<parameter=example_1>"""
    r"""{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }} arguments""",
    # Llama 3.1, 3.2 and 3.3
    "llama3_json": """Respond in the format {"name": function name, "parameters": dictionary of """
    """argument name and its value}. Do not use variables.""",
    # Mistral
    "mistral": """{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}""",
    # FunctionGemma
    "functiongemma": """{{ '<start_function_call>call:' + function['name'] + '{' }}""",
    # Gemma 4
    "gemma4": """{{- '<|tool_call>call:' + function['name'] + '{' -}}""",
    # ToolACE, and Llama 3.2 with vLLM's pythonic template
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    # LFM2
    "lfm2": "{{- '<|tool_call_start|>[' -}}",
    # DeepSeek V3.1
    "deepseek_v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + "
    "'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}",
    # DeepSeek V3 and R1
    "deepseek_v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + "
    "'<｜tool▁sep｜>' + tool['function']['name']}}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_tells_the_family(name: str) -> None:
    """By the markers that it writes."""
    found = select.choose("auto", "{{ bos_token }}" + TEMPLATES[name])

    assert found == (name, select.FAMILIES[name])


def test_template_tells_which_of_two_notations_a_family_writes() -> None:
    """The one in which the model reads its own earlier calls."""
    new = "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"

    assert select.choose("auto", new) == ("mistral", select.NEW_MISTRAL)
    assert select.choose("mistral", TEMPLATES["mistral"]) == ("mistral", select.MISTRAL)
    assert select.choose("pythonic", "<|python_start|>") == ("pythonic", select.LLAMA_4_PYTHONIC)


def test_template_that_shows_no_calls_has_no_family() -> None:
    """And neither has one whose markers mean something that we do not read (GLM 4.5)."""
    glm = "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key> arguments"
    for template in (None, "", "<{{ message.role }}>{{ message.content }}", glm):
        assert select.choose("auto", template) is None


def test_every_name_is_documented() -> None:
    """With its sign; so nobody has to read the code to choose a flag."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")

    for name in (*select.FAMILIES, *reasoning.FAMILIES):
        assert f"`{name}`" in text, name


def test_flag_overrules_the_template() -> None:
    """A name is taken as it is."""
    name, family = select.choose("pythonic", TEMPLATES["hermes"]) or ("", None)

    assert (name, family) == ("pythonic", select.PYTHONIC)


def test_ids_of_calls_are_unique_and_have_the_form_that_templates_insist_on() -> None:
    """Mistral's refuses any other in the next request."""
    for family in (select.HERMES, select.MISTRAL):
        ids = {family.new_call_id() for _ in range(1000)}
        assert len(ids) == 1000
        if family is select.MISTRAL:
            assert all(len(each) == 9 and each.isalnum() for each in ids)
        else:
            assert all(each.startswith("call_") for each in ids)
