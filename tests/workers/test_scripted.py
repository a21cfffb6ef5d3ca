"""The scripted model says what its script says, through the real batch, cache and sampler."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from tests.helpers.plan_driver import GREEDY, PlanDriver, Sequence
from tests.helpers.worker_settings import SPEC, loaded_worker, worker_config
from workers.worker import Worker

END = 257


def scripted_worker(folder: Path, **script: object) -> Worker:
    return loaded_worker(worker_config(scripted_folder(folder, **script)))


def scripted_folder(folder: Path, **script: object) -> Path:
    config = {"model_type": "scripted", "vocab_size": 260, "eos_token_id": END, "script": script}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(worker: Worker, sequences: list[Sequence], **how: Any) -> list[list[int]]:
    return PlanDriver(worker.execute_model).run(sequences, **how)


def test_a_token_list_is_said_and_ended(tmp_path: Path) -> None:
    """The list, then the end token for whoever goes on."""
    worker = scripted_worker(tmp_path, kind="tokens", token_ids=[5, 6, 7])
    assert run(worker, [Sequence("a", [1, 2], 5)]) == [[5, 6, 7, END, END]]


def test_a_cycle_has_no_end(tmp_path: Path) -> None:
    """The list again and again."""
    worker = scripted_worker(tmp_path, kind="cycle", token_ids=[5, 6])
    assert run(worker, [Sequence("a", [1, 2], 5)]) == [[5, 6, 5, 6, 5]]


def test_an_echo_repeats_each_prompt(tmp_path: Path) -> None:
    """Each request hears its own, whatever the chunks and the order of arrival."""
    worker = scripted_worker(tmp_path, kind="echo")
    prompts = [list(range(i, 2 * i + 3)) for i in range(20)]
    outputs = run(
        worker,
        [Sequence(f"r{i}", prompt, 25) for i, prompt in enumerate(prompts)],
        chunk=3,
        arrivals_per_step=2,
        budget=30,
    )
    assert outputs == [(prompt + [END] * 25)[:25] for prompt in prompts]


def test_an_echo_is_read_from_the_cache(tmp_path: Path) -> None:
    """A request with another's blocks hears the other's prompt: so a wrong block is heard."""
    worker = scripted_worker(tmp_path, kind="echo")
    driver = PlanDriver(worker.execute_model)
    first = Sequence("a", list(range(1, 13)), 30)
    driver.step([first])
    second = Sequence("b", [99] * 9, 4, num_computed=8, block_ids=first.block_ids[:2])
    for _ in range(4):
        driver.step([second])
    assert second.output == [1, 2, 3, 4]


def test_a_preempted_request_goes_on_with_its_script(tmp_path: Path) -> None:
    """Output tokens that come back as known tokens are not taken for the prompt."""
    worker = scripted_worker(tmp_path, kind="echo")
    prompt = list(range(30, 50))
    driver = PlanDriver(worker.execute_model)
    assert driver.run([Sequence("a", prompt, 20)], chunk=7, preempt_at={4, 9, 14}) == [prompt]


def test_the_sampler_is_the_real_one(tmp_path: Path) -> None:
    """Biases, penalties, allowed tokens and log probabilities do to the script what they do to a
    model."""
    worker = scripted_worker(tmp_path, kind="cycle", token_ids=[5])
    params = [
        GREEDY,
        SamplingParams(temperature=0.0, logit_bias={9: 50.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=(3,)),
        SamplingParams(temperature=0.0, repetition_penalty=100.0),
    ]
    wanted = [Sequence(f"r{i}", [1], 3, params=p) for i, p in enumerate(params)]
    assert run(worker, wanted)[:3] == [[5] * 3, [9] * 3, [3] * 3]
    assert len(set(wanted[3].output)) == 3

    asked = Sequence("p", [1], 1, params=SamplingParams(temperature=0.0, logprobs=2))
    run(worker, [asked])
    assert asked.logprobs[0].token_ids[0, :2].tolist() == [5, 5]
    assert -0.01 < asked.logprobs[0].logprobs[0, 0] < 0


def test_delays_are_kept(tmp_path: Path) -> None:
    """A step takes its time, and more for more tokens."""
    worker = scripted_worker(
        tmp_path, kind="cycle", token_ids=[5], step_delay_s=0.02, token_delay_s=0.01
    )
    began = time.monotonic()
    run(worker, [Sequence("a", [1] * 8, 2)])
    assert time.monotonic() - began >= 0.02 + 8 * 0.01 + 0.02 + 0.01


def test_it_fails_when_told(tmp_path: Path) -> None:
    """At that step of the rank that replies, and not before."""
    worker = scripted_worker(tmp_path, kind="cycle", token_ids=[5], raise_at_step=3)
    sequence = Sequence("a", [1], 9)
    with pytest.raises(RuntimeError, match="the script says to fail at step 3"):
        run(worker, [sequence])
    assert sequence.output == [5, 5]


def test_only_the_rank_that_is_told_fails(tmp_path: Path) -> None:
    """Another rank goes on; without a reply, since it is not the one that replies."""
    script = {"kind": "cycle", "token_ids": [5], "raise_at_step": 1}
    config = worker_config(scripted_folder(tmp_path, **script, raise_on_rank=1), tp=2, pp=2)
    plan = PlanDriver(lambda _: None).plan([Sequence("a", [1], 9)])
    for rank in (0, 1, 2, 3):
        worker = Worker(config, rank, rendezvous="")
        worker.load()
        worker.initialize_kv_cache(SPEC)
        if rank == 1:
            with pytest.raises(RuntimeError, match="fail at step 1"):
                worker.execute_model(plan)
        else:
            assert (worker.execute_model(plan) is not None) == (rank == 2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"kind": "sing"}, "sing"),
        ({"kind": "tokens"}, "needs token_ids"),
        ({"kind": "cycle", "token_ids": [5, 260]}, "has 260; vocab_size is 260"),
        ({"kind": "echo", "step_delay": 1}, "step_delay"),
        ({"kind": "echo", "step_delay_s": "long"}, "step_delay_s"),
        ({"kind": "echo", "step_delay_s": -1.0}, "step_delay_s must be from 0"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(
    tmp_path: Path, script: dict[str, object], message: str
) -> None:
    """Unknown kinds and fields, wrong types and token ids are named."""
    worker = Worker(worker_config(scripted_folder(tmp_path, **script)), 0, "")
    with pytest.raises(ConfigError, match=message):
        worker.load()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("vocab_size", 0, "vocab_size must be from 1"),
        ("vocab_size", 10**12, "vocab_size must be from 1"),
        ("max_position_embeddings", 0, "max_position_embeddings must be from 1"),
        ("eos_token_id", 9999, "eos_token_id has 9999"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    tmp_path: Path, name: str, value: int, message: str
) -> None:
    """At start, not at the step that would meet it."""
    folder = scripted_folder(tmp_path, kind="echo")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ConfigError, match=message):
        Worker(worker_config(folder), 0, "").load()


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """As for other models, though this one would not use it."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    folder = scripted_folder(tmp_path, kind="echo")

    with pytest.raises(ConfigError, match="finds no CUDA device"):
        Worker(worker_config(folder, device="cuda"), 0, "").load()
