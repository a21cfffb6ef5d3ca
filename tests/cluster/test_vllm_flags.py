"""vLLM's users come with its flags: each is one of ours, or is answered with what to do instead."""

import json
from pathlib import Path

import click
import pytest

from cluster import vllm_flags
from cluster.cli import cli

VLLM = json.loads((Path(__file__).parents[1] / "data" / "vllm_flags.json").read_text())
PARAMS = cli.commands["serve"].params
OURS = {name for param in PARAMS for name in (*param.opts, *param.secondary_opts)}


def answer(*args: str) -> str:
    """What the command says to these arguments."""
    with pytest.raises(click.UsageError) as caught:
        cli.commands["serve"].make_context("serve", list(args))
    return caught.value.format_message()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "a/b"), "MODEL is the argument: raywire serve a/b"),
        (("--port", "0", "--model=a/b"), "MODEL is the argument: raywire serve a/b"),
        (("--model",), "MODEL is the argument: raywire serve MODEL"),
        (("m", "--gpu-memory-utilization", "0.9"), "--kv-cache-memory-bytes says what"),
        (("m", "--gpu_memory_utilization=0.9"), "--kv-cache-memory-bytes says what"),
        (("m", "--max_model_len", "8K"), "--max_model_len is written --max-model-len"),
        (("m", "--no-enable-log-requests"), "--no-enable-log-requests is not needed"),
        (("m", "--structured-outputs-config.backend", "x"), "--structured-outputs-config.backend"),
        (("m", "--guided-decoding-backend", "x"), "one back end, llguidance"),
        (("m", "--ssl-ciphers=k"), "TLS 1.2 and newer"),
        (("m", "-dpl", "2"), "-dpl is written --data-parallel-size-local"),
        (("m", "-q", "int8"), "-q is written --quantization"),
        (("m", "-O3"), "-O does not exist: nothing is compiled"),
        (("m", "-cc.mode=3"), "-cc does not exist: models run as they are written"),
    ],
)
def test_flags_of_others_are_answered_with_what_to_do(args: tuple[str, ...], words: str) -> None:
    """As they are written, with or without their values."""
    assert words in answer(*args)


def test_every_flag_of_vllm_is_ours_or_has_an_answer() -> None:
    """By all of its names."""
    flags = [name for names in VLLM["flags"] for name in names.split()]
    assert (VLLM["vllm"], len(VLLM["flags"])) == ("0.32.0", 316)  # made from an installed package
    lost = [
        flag for flag in flags if flag not in OURS and not vllm_flags.advice(flag, [flag], OURS)
    ]
    assert lost == []


def test_what_to_do_instead_is_only_said_of_flags_that_are_missing() -> None:
    """Once there is such a flag, its advice goes."""
    assert OURS & {*vllm_flags.KNOWN, *vllm_flags._SAME, "--model"} == set()
    one = [flag for flags in vllm_flags._ALIKE.values() for flag in flags.split()]
    assert (
        len(vllm_flags.KNOWN)
        == len(vllm_flags._ADVICE) + len(set(one))
        == len(vllm_flags._ADVICE) + len(one)
    )


def test_a_mistyped_flag_is_guessed_and_a_strange_one_is_not() -> None:
    """A guess that resembles nothing sends people the wrong way."""
    assert answer("m", "--max-modl-len", "8K").count("--") == 2
    assert "--max-model-len" in answer("m", "--max-modl-len", "8K")
    for strange in ("--token-cache", "--kernel-mode", "--frob"):
        assert answer("m", strange, "1") == f"No such option '{strange}'."
