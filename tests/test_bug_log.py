"""Which tests prove what users of other servers have missed.

The project was begun with a log of real bug reports about such servers, each with a small request
and the right answer. An entry stands for its kind; here each has the tests that hold it. So that no
promise is lost when tests are renamed or dropped, this module looks that they are there.
"""

import ast
from functools import lru_cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PROVED: dict[str, tuple[str, ...]] = {
    # Streams, stop strings, text.
    "A02": (
        "api/test_completions.py::test_stop_string_that_never_comes_changes_nothing",
        "api/test_chat.py::test_stop_string_that_never_comes_leaves_no_chunk_empty",
        "api/test_output_processor.py::test_an_unused_stop_string_changes_nothing",
        "api/test_stop_strings.py::test_nothing_is_held_without_need",
    ),
    "A04": (
        "api/test_completions.py::test_stop_string_is_kept_on_request",
        "api/test_completions.py::test_stop_string_ends_the_text_and_the_request",
        "api/test_completions.py::test_stop_token_id_is_named",
    ),
    "A06": (
        "integration/test_whole_requests.py::test_no_end_token_comes_before_min_tokens",
        "workers/test_logit_edits.py::test_every_end_token_is_masked_until_min_tokens_are_out",
        "api/test_tokenizer.py::test_end_tokens_come_from_tokenizer_and_model",
    ),
    "A07": (
        "integration/test_whole_requests.py::test_ignored_ends_end_no_chat",
        "engine/test_stop.py::test_ignore_eos_leaves_the_clients_stop_tokens",
    ),
    "A09": (
        "api/test_stream_ends.py::test_half_a_character_is_shown_once_it_cannot_become_whole",
        "api/test_detokenizer.py::test_a_character_that_is_never_finished_is_one_mark",
    ),
    "A10": (
        "api/test_chat.py::test_emoji_and_cjk_stream_as_whole_characters",
        "api/test_detokenizer.py::test_lone_surrogates_never_leave",
    ),
    "A13": ("api/test_stream_ends.py::test_two_hundred_streams_end_once_each",),
    "A15": ("api/test_chat.py::test_single_choice_has_index_zero_in_all_chunks",),
    "A17": (
        "api/test_chat.py::test_every_chunk_has_a_finish_reason_and_one_says_why",
        "api/test_completions.py::test_streamed_text_is_the_whole_text",
    ),
    # Usage.
    "B02": (
        "api/test_completions.py::test_usage_chunk_comes_only_when_asked_for",
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
    ),
    "B03": ("api/test_completions.py::test_running_usage_with_n_sums_and_only_grows",),
    "B04": (
        "integration/test_whole_requests.py::test_usage_tells_what_was_cached",
        "api/test_completions.py::test_cached_tokens_are_always_there",
    ),
    # Sampling.
    "C02": (
        "integration/test_whole_requests.py::test_seeds_decide_what_is_drawn",
        "integration/test_right_tokens.py::test_seeded_tokens_do_not_depend_on_the_batch",
    ),
    "C06": (
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
        "integration/test_neighbours.py::test_bad_requests_leave_a_neighbour_alone",
    ),
    "C08": ("api/test_bad_input.py::test_bad_request_is_refused_by_name",),
    "C10": (
        "integration/test_whole_requests.py::test_narrow_sampling_is_greedy",
        "workers/test_sampler.py::test_a_tiny_temperature_is_greedy",
    ),
    "C12": ("integration/test_whole_requests.py::test_narrow_sampling_is_greedy",),
    # Log probabilities, echo.
    "D03": (
        "integration/test_whole_requests.py::test_streamed_logprobs_of_an_echo_are_the_plain_ones",
        "api/test_completions.py::test_streamed_logprobs_joined_are_the_plain_ones",
    ),
    "D04": (
        "integration/test_whole_requests.py::test_tokens_that_cannot_be_drawn_have_finite_logprobs",
        "api/test_output_processor.py::test_log_probabilities_have_names_and_no_infinity",
    ),
    "D05": (
        "integration/test_whole_requests.py"
        "::test_logprobs_of_a_prompt_do_not_depend_on_how_tokens_are_drawn",
    ),
    "D06": (
        "api/test_chat.py::test_logprobs_have_the_chat_shape",
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
    ),
    # Prompts and limits.
    "E01": (
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
        "api/test_input_processor.py::test_an_empty_text_is_refused",
    ),
    "E03": (
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
        "api/test_chat.py::test_newer_name_of_max_tokens",
        "api/test_input_processor.py::test_max_tokens_must_fit_behind_the_prompt",
    ),
    "E05": ("api/test_chat_template.py::test_the_begin_token_comes_once",),
    "E07": (
        "api/test_chat.py::test_last_message_can_be_continued",
        "api/test_chat_template.py::test_a_chat_is_continued_or_answered_not_both",
    ),
    "E09": (
        "api/test_chat_template.py::test_a_template_refuses_in_its_own_words",
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
    ),
    "E11": (
        "api/test_completions.py::test_batch_of_prompts_times_n",
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
    ),
    # Tools.
    "F01": (
        "api/test_structured_fields.py::test_broken_schema_is_refused_where_it_is_broken",
        "api/test_structured_http.py::test_broken_wish_is_a_400_by_name",
    ),
    "F04": (
        "api/test_structured_fields.py::test_bad_wish_is_refused_by_name",
        "api/test_structured_http.py::test_broken_wish_is_a_400_by_name",
    ),
    "F07": (
        "engine/test_grammar_core.py::test_a_finished_language_ends_a_request_that_ignores_ends",
    ),
    "F08": (
        "api/test_chat_tools.py::test_stream_joined_is_the_whole_answer",
        "api/test_tool_parsers.py::test_every_cut_gives_the_same_events",
    ),
    "F11": (
        "api/test_chat_tools.py::test_stream_has_openai_shape",
        "api/test_tool_parsers.py::test_pieces_give_what_the_whole_text_gives",
    ),
    "F13": (
        "api/test_chat_messages.py"
        "::test_all_in_one_piece_is_as_many_deltas_as_there_are_things_to_say",
    ),
    # HTTP.
    "G01": (
        "api/test_error_shapes.py::test_all_others_have_openais",
        "api/test_bad_input.py::test_bad_request_is_refused_by_name",
        "api/test_bad_input.py::test_invalid_content_length_body_over_the_limit_is_refused_unread",
        "api/test_connection.py::test_one_connection_too_many_gets_a_503",
    ),
    "G04": (
        "api/test_edge.py::test_head_is_get_without_a_body",
        "api/test_bad_input.py::test_wrong_method_is_a_405_with_allow",
        "api/test_cors.py::test_without_the_flag_nothing_is_allowed",
    ),
    "G05": (
        "api/test_edge.py::test_request_id_is_repeated",
        "api/test_edge.py::test_request_id_is_repeated_on_streams",
        "api/test_edge.py::test_dangerous_request_id_is_replaced",
    ),
    "G08": (
        "api/test_edge.py::test_until_ready_only_live_answers",
        "api/test_process.py::test_port_answers_while_the_start_is_under_way",
    ),
    "G09": ("api/test_edge.py::test_probes_and_metrics_are_not_logged",),
    # Deaths, aborts.
    "H03": (
        "integration/test_ray_server.py::test_a_killed_worker_ends_the_server_with_one_first_cause",
        "integration/test_life_and_death.py::test_a_death_ends_all_and_tells_clients",
    ),
    "H04": (
        "api/test_stream_ends.py::test_health_is_that_of_the_path_of_requests",
        "integration/test_data_parallel.py::test_a_hung_api_server_ends_all",
    ),
    "H06": (
        "api/test_stream_ends.py::test_a_death_under_many_requests_is_one_line",
        "integration/test_life_and_death.py::test_a_death_ends_all_and_tells_clients",
    ),
    "H07": (
        "integration/test_life_and_death.py::test_death_of_the_api_server",
        "integration/test_life_and_death.py::test_death_while_loading",
        "workers/test_executor.py::test_killed_engine_core_leaves_nothing",
    ),
    "H10": ("integration/test_stopping.py::test_ctrl_c_leaves_nothing",),
    "H11": (
        "integration/test_stopping.py::test_a_client_that_leaves_stops_its_request",
        "engine/test_core_loop.py::test_aborts_are_drained_right_after_the_forward_pass",
    ),
    "H13": (
        "api/test_stream_ends.py::test_leaving_at_the_last_moment_harms_nothing",
        "engine/test_core.py::test_an_abort_that_races_the_last_step_is_harmless",
    ),
    # Several ranks, Ray, wires.
    "I01": (
        "integration/test_uneven_load.py::test_requests_of_very_different_length_all_end",
        "integration/test_data_parallel.py::test_an_idle_server_is_asleep",
    ),
    "I03": (
        "integration/test_uneven_load.py::test_equal_requests_are_spread_evenly",
        "integration/test_uneven_load.py::test_long_prompts_leave_no_rank_idle_while_others_queue",
        "api/test_load_balancer.py::test_burst_is_spread_evenly",
    ),
    "I06": (
        "integration/test_life_and_death.py::test_a_start_that_takes_too_long_names_who_is_missing",
    ),
    "I10": (
        "cluster/test_placement.py::test_what_is_placed_fits_and_what_is_refused_cannot",
        "integration/test_hosts.py::test_too_large_a_server_is_refused_with_what_there_is",
    ),
    "I11": ("cluster/test_config.py::test_mistakes_show_before_anything_starts",),
    "I13": (
        "engine/test_bound.py::test_a_port_of_the_kernels_choice_on_one_address",
        "cluster/test_addresses.py::test_wires_to_other_nodes_are_ports_with_a_key_for_each_server",
    ),
    "I15": (
        "workers/test_ring.py::test_full_ring_is_reported_with_rank_and_call",
        "workers/test_executor.py::test_step_without_a_reply_in_time_has_failed",
    ),
    "I16": (
        "api/test_metrics.py::test_counters_survive_a_new_incarnation_of_a_core",
        "api/test_metrics.py::test_gauges_of_dead_cores_are_zero",
    ),
}

LATER: dict[str, str] = {
    "I09": "issue 7, KubeRay: nodes with several network cards",
}
"""Entries that other work will prove; a test of theirs belongs above."""

ENTRIES = {
    *("A02", "A04", "A06", "A07", "A09", "A10", "A13", "A15", "A17"),
    *("B02", "B03", "B04"),
    *("C02", "C06", "C08", "C10", "C12"),
    *("D03", "D04", "D05", "D06"),
    *("E01", "E03", "E05", "E07", "E09", "E11"),
    *("F01", "F04", "F07", "F08", "F11", "F13"),
    *("G01", "G04", "G05", "G08", "G09"),
    *("H03", "H04", "H06", "H07", "H10", "H11", "H13"),
    *("I01", "I03", "I06", "I09", "I10", "I11", "I13", "I15", "I16"),
}


@lru_cache
def names_in(file: Path) -> frozenset[str]:
    """The test functions of a module."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return frozenset(node.name for node in body if isinstance(node, kinds))


@pytest.mark.parametrize("entry", sorted(PROVED))
def test_the_tests_of_an_entry_exist(entry: str) -> None:
    """Under the names that they have here."""
    for test in PROVED[entry]:
        path, _, name = test.partition("::")
        assert name in names_in(TESTS / path), f"{entry}: no {name} in {path}"


def test_each_entry_is_proved_or_has_a_reason() -> None:
    """All 54, and each once."""
    assert len(ENTRIES) == 54
    assert PROVED.keys() | LATER.keys() == ENTRIES
    assert not PROVED.keys() & LATER.keys()
