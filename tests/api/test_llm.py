"""The offline class on real engine processes and wires, with a scripted and with a tiny model."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from api import LLM, SamplingParams, StructuredOutputsParams
from engine.errors import ConfigError, EngineDeadError, InvalidRequestError, UnavailableError
from tests.helpers.scripted_models import make_scripted_model, make_slow_model
from tests.helpers.tiny_models import clear_prompts, greedy_tokens, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One that answers a prompt with the prompt."""
    folder = make_scripted_model(tmp_path_factory.mktemp("models") / "echo", kind="echo")
    with pytest.MonkeyPatch.context() as patch:
        # Other tests' threads may run here, and Python 3.12 warns of forks beside them.
        patch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
        with LLM(str(folder), max_model_len=200) as llm:
            yield llm


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def engine_cores() -> set[psutil.Process]:
    return {p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline())}


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Long and short ones, as texts, token ids and objects, each with its own continuation."""
    prompts: list[Any] = [
        "a long prompt that takes many steps",
        "b",
        list(b"token ids"),
        {"prompt": "object", "cache_salt": "mine"},
        {"prompt_token_ids": list(b"ids in it")},
    ]

    results = llm.generate(prompts, GREEDY, use_tqdm=False)

    assert [result.outputs[0].text for result in results] == [
        "a long prompt that takes many steps",
        "b",
        "token ids",
        "object",
        "ids in it",
    ]
    assert [result.prompt for result in results] == [prompts[0], "b", None, "object", None]
    assert all(result.finished for result in results)


def test_a_result_has_what_vllms_users_look_for(llm: LLM) -> None:
    """Prompt, its tokens, and for each continuation text, tokens, probabilities and reasons."""
    params = SamplingParams(temperature=0, max_tokens=2, n=2, logprobs=1, prompt_logprobs=0)

    (result,) = llm.generate("hey", params, use_tqdm=False)

    assert result.prompt_token_ids == list(b"hey")
    assert [output.index for output in result.outputs] == [0, 1]
    output = result.outputs[1]
    assert (output.text, output.token_ids, output.finish_reason) == ("he", list(b"he"), "length")
    assert output.finished()
    assert output.logprobs is not None
    assert output.logprobs[0][ord("h")].rank == 1
    assert output.logprobs[0][ord("h")].decoded_token == "h"
    assert output.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for position, token in zip(output.logprobs, b"he", strict=True))
    )
    assert result.prompt_logprobs is not None
    assert [p and list(p) for p in result.prompt_logprobs] == [None, [ord("e")], [ord("y")]]
    assert output.timeline is not None
    assert output.timeline.prefill_s > 0


def test_a_stop_string_ends_the_text_and_the_engines_work(llm: LLM) -> None:
    """The engine does not know stop strings: the request is aborted there, its blocks are free."""
    params = SamplingParams(temperature=0, max_tokens=100, stop=("END",))

    (result,) = llm.generate("text END more " * 5, params, use_tqdm=False)

    output = result.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("text ", "stop", "END")
    assert output.token_ids == list(b"text END")
    wait_until(llm.reset_prefix_cache)


def test_what_the_workers_do_can_be_recorded(tmp_path: Path) -> None:
    """A trace for each rank, in a folder that need not be there; and the counters of each."""
    model = make_scripted_model(tmp_path / "echo", kind="echo")
    with LLM(str(model), tensor_parallel_size=2) as llm:
        with pytest.raises(InvalidRequestError, match="needs start_profile"):
            llm.stop_profile()
        llm.start_profile(tmp_path / "new" / "traces")
        llm.generate("text", GREEDY, use_tqdm=False)
        llm.stop_profile()
        counted = llm.statistics()

    traces = sorted((tmp_path / "new" / "traces").iterdir())
    assert [trace.name for trace in traces] == ["rank0.trace.json", "rank1.trace.json"]
    assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)
    assert counted.scheduler.num_generation_tokens == len("text") + 1
    assert [worker.rank for worker in counted.workers] == [0, 1]


def test_parameters_left_out_are_what_the_models_makers_recommend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From generation_config.json, with what the program says before it; as in vLLM."""
    monkeypatch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
    folder = make_scripted_model(tmp_path / "echo", kind="echo")
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"temperature": 0.6, "top_k": 20, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(config))

    with LLM(str(folder), max_model_len=200, override_generation_config={"top_k": 5}) as llm:
        defaults = llm.get_default_sampling_params()
        (result,) = llm.generate("long enough", use_tqdm=False)

    assert defaults == SamplingParams(temperature=0.6, top_k=5, max_tokens=3)
    assert len(result.outputs[0].token_ids) == 3


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    """One for each, or it is an error."""
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]

    results = llm.generate(["abcd", "efgh"], params, use_tqdm=False)

    assert [result.outputs[0].text for result in results] == ["a", "efg"]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["abcd"], params)


@pytest.mark.parametrize(
    "bad", ["", [], [999], [-1], [1.5], 5, None, b"bytes", {}, "x" * 200, {"prompt_token_ids": []}]
)
def test_a_wrong_prompt_is_named_and_nothing_is_sent(llm: LLM, bad: Any) -> None:
    """Not even the good ones before it."""
    with pytest.raises(InvalidRequestError if bad != "x" * 200 else Exception) as refused:
        llm.generate(["good", bad], GREEDY, use_tqdm=False)

    assert "prompts[1]" in str(refused.value)
    assert llm._client.num_in_flight == 0


def test_output_ends_at_the_models_length(llm: LLM) -> None:
    """`max_tokens` beyond it means up to it, and the reason says so."""
    params = SamplingParams(temperature=0, max_tokens=1000)

    (result,) = llm.generate("z" * 150, params, use_tqdm=False)

    output = result.outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (50, "length")


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    """One conversation or several; the last message may be continued."""
    user = {"role": "user", "content": "Hi there"}
    said = {"role": "assistant", "content": "The sum is"}

    one = llm.chat([user], GREEDY, use_tqdm=False)
    two = llm.chat([[user], [user, said]], GREEDY, use_tqdm=False)
    (open_ended,) = llm.chat(
        [user, said],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
        use_tqdm=False,
    )

    (typed,) = llm.chat([{"role": "user", "content": "a</s>b"}], GREEDY, use_tqdm=False)

    assert "Hi there" in (one[0].prompt or "")
    assert "a</s>b" in (typed.prompt or "")
    assert two[0].prompt == one[0].prompt
    assert (open_ended.prompt or "").endswith("The sum is")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        llm.chat([user], chat_template_kwargs={"add_generation_prompt": False})
    with pytest.raises(InvalidRequestError, match="must not set self"):
        llm.chat([user], chat_template_kwargs={"self": 1})


def test_the_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, unless switched off; and it leaves no thread behind."""
    threads = threading.enumerate()
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""

    llm.generate(["a", "b"], GREEDY)

    assert "2/2" in capsys.readouterr().err
    assert threading.enumerate() == threads


def test_greedy_output_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a real model, next to transformers in one process."""
    monkeypatch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
    folder = tiny_model("llama", tmp_path_factory.getbasetemp())
    prompts = clear_prompts(folder, count=6, num_tokens=8)
    expected = [greedy_tokens(folder, prompt, num_tokens=8) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    with LLM(str(folder), kv_cache_memory_bytes=4 << 20) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)

    assert [result.outputs[0].token_ids for result in results] == expected


def test_an_interrupt_aborts_and_leaves_the_engine_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: the cell ends, the next one works. A dead engine is said to be dead,
    and a closed one closed."""
    monkeypatch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
    before = engine_cores()
    llm = LLM(str(make_slow_model(tmp_path / "slow")))
    (core,) = engine_cores() - before
    endless = SamplingParams(max_tokens=20_000, temperature=0)

    def interrupt() -> None:
        wait_until(lambda: llm._client.num_in_flight == 50)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 50, endless, use_tqdm=False)
    wait_until(lambda: llm._client.num_in_flight == 0)
    (result,) = llm.generate("x", SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    assert result.outputs[0].text == "abc"

    def kill() -> None:
        wait_until(lambda: llm._client.num_in_flight == 1)
        core.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate("x", endless, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("x", use_tqdm=False)

    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("x")
    assert engine_cores() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 3}, "block-size"),
    ],
)
def test_an_engine_that_cannot_work_is_a_config_error(
    options: dict[str, Any], message: str
) -> None:
    """Before any process is started."""
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "scripted", **options})


def test_what_only_the_workers_find_is_a_config_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message comes up from them as it is, without the way it took."""
    monkeypatch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
    folder = make_scripted_model(tmp_path / "wrong", kind="nonsense")

    with pytest.raises(ConfigError, match="script"):
        LLM(str(folder))


def test_outputs_have_the_form_that_was_asked_for(llm: LLM) -> None:
    """However little the model is inclined to."""
    form = StructuredOutputsParams(json={"type": "object", "required": ["a"]})
    chosen = StructuredOutputsParams(choice=["red", "green"])

    first, second = llm.generate(
        ["x", "y"],
        [
            SamplingParams(temperature=100, max_tokens=190, n=2, structured_outputs=form),
            SamplingParams(temperature=0, structured_outputs=chosen),
        ],
        use_tqdm=False,
    )

    for output in first.outputs:
        assert output.finish_reason == "length" or "a" in json.loads(output.text)
    assert second.outputs[0].text in ("red", "green")


def test_form_that_cannot_be_compiled_is_the_callers_fault(llm: LLM) -> None:
    """Found by the engine, and raised; the next call works."""
    wrong = StructuredOutputsParams(regex="a(?=b)")

    with pytest.raises(InvalidRequestError, match="look-around"):
        llm.generate(["x", "y"], SamplingParams(structured_outputs=wrong), use_tqdm=False)

    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text == "x"
