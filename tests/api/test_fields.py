"""Every request field of vLLM is served, or documented as absent: the walk over its list.

tests/data/vllm_fields.json  <->  the structs and tables of `api`  <->  docs/api.md, "Fields"
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from api.fields import IGNORED, UNSUPPORTED_IN_CHAT, UNSUPPORTED_IN_COMPLETIONS
from api.protocol import ChatBody, CompletionBody

ROOT = Path(__file__).resolve().parents[2]
State = Literal["served", "ignored", "refused"]
Route = Literal["chat", "completions"]

VLLM = json.loads((ROOT / "tests/data/vllm_fields.json").read_text(encoding="utf-8"))
SERVED: dict[Route, set[str]] = {
    "chat": set(ChatBody.__struct_fields__) - IGNORED,
    "completions": set(CompletionBody.__struct_fields__) - IGNORED,
}
REFUSED = {"chat": set(UNSUPPORTED_IN_CHAT), "completions": set(UNSUPPORTED_IN_COMPLETIONS)}

PROOFS: dict[str, str] = {
    "add_generation_prompt": "test_chat.py::test_generation_prompt_can_be_left_out",
    "add_special_tokens": "test_request_fields.py::test_special_tokens_are_added_where_asked_for",
    "allowed_token_ids": "test_completions.py::test_parameters_reach_the_engine",
    "bad_words": "test_request_fields.py::test_bad_words_travel_as_tokens_with_and_without_a_space",
    "best_of": "test_request_fields.py::test_best_of_shows_the_likeliest",
    "cache_salt": "test_completions.py::test_parameters_reach_the_engine",
    "chat_template": "test_request_fields.py::test_clients_template_is_used_where_it_is_trusted",
    "chat_template_kwargs": "test_request_fields.py::test_template_reads_its_variables",
    "continue_final_message": "test_chat.py::test_last_message_can_be_continued",
    "documents": "test_request_fields.py::test_template_quotes_documents",
    "echo": "test_request_fields.py::test_chat_repeats_the_assistants_last_message",
    "frequency_penalty": "test_completions.py::test_parameters_reach_the_engine",
    "guided_choice": "test_structured_fields.py"
    "::test_each_field_says_what_the_output_must_look_like",
    "guided_grammar": "test_structured_fields.py"
    "::test_each_field_says_what_the_output_must_look_like",
    "guided_json": "test_structured_fields.py::test_each_field_says_what_the_output_must_look_like",
    "guided_regex": "test_structured_fields.py"
    "::test_each_field_says_what_the_output_must_look_like",
    "guided_whitespace_pattern": "test_structured_fields.py"
    "::test_white_space_is_as_the_options_say",
    "ignore_eos": "test_completions.py::test_parameters_reach_the_engine",
    "include_reasoning": "test_chat_tools.py::test_thoughts_can_be_left_out",
    "include_stop_str_in_output": "test_completions.py::test_stop_string_is_kept_on_request",
    "length_penalty": "test_beams.py::test_search_equals_the_plain_definition",
    "logit_bias": "test_completions.py::test_parameters_reach_the_engine",
    "logprob_token_ids": "test_request_fields.py::test_log_probabilities_of_certain_tokens",
    "logprobs": "test_completions.py::test_logprobs_have_the_legacy_shape",
    "max_completion_tokens": "test_chat.py::test_newer_name_of_max_tokens",
    "max_tokens": "test_completions.py::test_default_is_16_tokens",
    "messages": "test_chat.py::test_messages_become_the_templates_text",
    "min_p": "test_completions.py::test_parameters_reach_the_engine",
    "min_tokens": "test_completions.py::test_parameters_reach_the_engine",
    "model": "test_chat.py::test_answer_names_the_model_as_asked_for",
    "n": "test_completions.py::test_batch_of_prompts_times_n",
    "parallel_tool_calls": "test_chat_tools.py::test_one_call_at_most_without_parallel_calls",
    "presence_penalty": "test_completions.py::test_parameters_reach_the_engine",
    "priority": "test_request_fields.py::test_priority_reaches_the_engine",
    "prompt": "test_request_fields.py::test_texts_and_token_ids_in_one_batch",
    "prompt_logprobs": "test_completions.py::test_prompt_logprobs_have_vllms_shape",
    "reasoning_effort": "test_request_fields.py::test_template_reads_its_variables",
    "repetition_detection": "test_request_fields.py::test_repetition_detection_has_vllms_defaults",
    "repetition_penalty": "test_completions.py::test_parameters_reach_the_engine",
    "request_id": "test_request_fields.py::test_answer_carries_the_clients_name_for_it",
    "response_format": "test_structured_http.py::test_answer_has_the_form_that_was_asked_for",
    "return_prompt_text": "test_request_fields.py::test_rendered_prompt_on_request",
    "return_token_ids": "test_completions.py::test_token_ids_on_request",
    "return_tokens_as_token_ids": "test_request_fields.py::test_tokens_as_ids_in_log_probabilities",
    "seed": "test_completions.py::test_continuations_draw_from_seeds_that_follow_each_other",
    "session_id": "test_request_fields.py::test_session_in_the_body_comes_before_the_header",
    "skip_special_tokens": "test_request_fields.py::test_special_tokens_show_on_request",
    "spaces_between_special_tokens": "test_detokenizer.py::test_special_tokens_show_when_asked_for",
    "split_special_tokens": "test_typed_tokens.py::test_a_chat_may_ask_for_tokens_as_typed",
    "stop": "test_completions.py::test_stop_string_ends_the_text_and_the_request",
    "stop_token_ids": "test_completions.py::test_stop_token_id_is_named",
    "stream": "test_completions.py::test_streamed_text_is_the_whole_text",
    "stream_interval": "test_request_fields.py::test_stream_comes_in_larger_pieces",
    "stream_options": "test_completions.py::test_usage_chunk_comes_only_when_asked_for",
    "structured_outputs": "test_structured_http.py::test_answer_has_the_form_that_was_asked_for",
    "temperature": "test_completions.py::test_parameters_reach_the_engine",
    "thinking_token_budget": "test_thinking_budget.py::test_budget_travels_as_the_models_marks",
    "tool_choice": "test_structured_http.py::test_call_is_made_where_it_must_be",
    "tools": "test_chat_tools.py::test_model_sees_the_tools_as_they_came",
    "top_k": "test_completions.py::test_parameters_reach_the_engine",
    "top_logprobs": "test_chat.py::test_logprobs_have_the_chat_shape",
    "top_p": "test_completions.py::test_parameters_reach_the_engine",
    "truncate_prompt_tokens": "test_request_fields.py::test_long_prompt_is_cut",
    "truncation_side": "test_request_fields.py::test_long_prompt_is_cut",
    "use_beam_search": "test_request_fields.py::test_beam_search_finds_the_likeliest_answers",
}
"""The test that shows what each served field does."""


class Row(NamedTuple):
    """One row of the table in docs/api.md."""

    routes: frozenset[str]
    state: str
    note: str


def rows() -> dict[str, Row]:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    section = re.search(r"^## Fields\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None, "docs/api.md has no section Fields"
    found = re.findall(r"^\| (`.*?) \| (.*?) \| (\w+) \| (.*?) \|$", section[1], re.M)
    table: dict[str, Row] = {}
    for names, routes, state, note in found:
        for name in re.findall(r"`(\w+)`", names):
            assert name not in table, f"{name} is in the table twice"
            table[name] = Row(frozenset(routes.split(", ")), state, note)
    return table


TABLE = rows()


def state_of(route: Route, name: str) -> State | None:
    """What the code makes of a field."""
    if name in IGNORED:
        return "ignored"
    if name in SERVED[route]:
        return "served"
    return "refused" if name in REFUSED[route] else None


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_every_field_of_vllm_is_served_or_documented(route: Route) -> None:
    """None is silently unknown, and the table says of each what the code does."""
    difference = {name: state_of(route, name) for name in VLLM[route]}
    print(*(f"{route}: {name} {s}" for name, s in difference.items() if s != "served"), sep="\n")  # noqa: T201

    assert [name for name, state in difference.items() if state is None] == []
    for name, state in difference.items():
        assert name in TABLE, f"{name} is not in docs/api.md, Fields"
        assert TABLE[name].state == state, f"docs/api.md, Fields: {name} is {state}"
        assert route in TABLE[name].routes, f"docs/api.md, Fields: {name} is a field of {route}"


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_table_has_all_that_the_code_has(route: Route) -> None:
    """Also what OpenAI and older vLLMs have: nothing is in one place only."""
    ours = SERVED[route] | REFUSED[route] | IGNORED
    documented = {name for name, row in TABLE.items() if route in row.routes}

    assert documented == ours
    assert {name: TABLE[name].state for name in ours} == {n: state_of(route, n) for n in ours}


def test_each_absence_has_its_reason() -> None:
    """In the table as in the error; a served field has a note too."""
    assert [name for name, row in TABLE.items() if len(row.note) < 4] == []
    for refusal in (*UNSUPPORTED_IN_CHAT.values(), *UNSUPPORTED_IN_COMPLETIONS.values()):
        assert len(refusal.reason) > 8


def test_each_served_field_has_a_test() -> None:
    """That exists under its name."""
    served = SERVED["chat"] | SERVED["completions"]
    assert set(PROOFS) == served
    assert [proof for proof in PROOFS.values() if not is_there(proof)] == []


def is_there(proof: str) -> bool:
    file, _, name = proof.partition("::")
    path = Path(__file__).with_name(file)
    return path.is_file() and f"def {name}(" in path.read_text(encoding="utf-8")


def types(fields: Iterable[dict[str, str]]) -> list[str]:
    return [field["type"] for field in fields]


def test_list_of_vllm_is_complete() -> None:
    """It was made from an installed package: a list that was cut off proves nothing."""
    assert VLLM["vllm"] == "0.32.0"
    assert (len(VLLM["chat"]), len(VLLM["completions"])) == (68, 55)
    assert all(types([*VLLM["chat"].values(), *VLLM["completions"].values()]))
