"""Linear layers of 8-bit integers: sums of quantized numbers are exact, rows do not depend on each
other, and a model is half as large and hardly worse."""

import math
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import gelu, silu

import api
from cluster.model_source import resolve
from engine.config import Quantization
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from engine.step import KVCacheSpec
from tests.helpers.built_kernels import backend, cache_dir, use_arithmetic
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import tiny_model
from tests.helpers.worker_settings import loaded_worker, worker_config
from workers import quantization
from workers.linear import PackedEmbedding, PackedLinear, choose
from workers.worker import Worker

BF16 = torch.bfloat16
SPAN = 64
WEIGHT_MAX, INPUT_MAX = 63, 127


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture(params=("float", "bf16-matrix"))
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bytes are multiplied with goes with what bfloat16 is."""
    use_arithmetic(monkeypatch, request.param)


def spans_of(x: Tensor) -> Tensor:
    """`[rows, spans, SPAN]` float64, filled up with zeros."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % SPAN))
    return padded.view(len(x), -1, SPAN)


def step_of(spans: Tensor, most: int) -> Tensor:
    """What one more or less is worth, in each span."""
    return spans.abs().amax(-1, keepdim=True) / most


def pack(weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = BF16) -> PackedLinear:
    layer = backend().pack(weight.clone(), bias, dtype)
    layer.quantize()
    return layer


def product(x: Tensor, layer: PackedLinear) -> Tensor:
    out = torch.empty(len(x), layer.out_features)
    layer._kernels.linear(x, layer.packed, None, out)
    return out.double()


def weight_of(layer: PackedLinear) -> Tensor:
    """The numbers that its integers stand for."""
    return product(torch.eye(layer.in_features, dtype=BF16), layer).T


def inputs_of(x: Tensor) -> Tensor:
    """The numbers that the integers of these rows stand for."""
    one = pack(torch.eye(x.shape[1], dtype=BF16))
    return product(x, one) / weight_of(one).diagonal()


def test_weights_become_the_nearest_of_127_numbers() -> None:
    """In every span of 64 inputs: no further away than half a step, which is at most 1% larger than
    the largest weight's 63rd."""
    for num_outputs, num_inputs in ((16, 4), (40, 64), (33, 130), (16, 640)):
        weight = random(num_outputs, num_inputs) * torch.linspace(0.01, 30, num_inputs).to(BF16)
        off = spans_of(weight_of(pack(weight)) - weight.double()).abs()
        step = step_of(spans_of(weight), WEIGHT_MAX) * 1.01
        assert (off <= 0.5 * step + 1e-6).all()


def test_inputs_become_the_nearest_of_255_numbers() -> None:
    """In every span of 64: no further away than half a 127th of the largest."""
    for num_inputs in (4, 62, 130, 640):
        x = random(7, num_inputs) * torch.linspace(0.01, 30, num_inputs).to(BF16)
        off = spans_of(inputs_of(x) - x.double()).abs()
        assert (off <= 0.5 * step_of(spans_of(x), INPUT_MAX) * 1.0001 + 1e-6).all()


@pytest.mark.hypothesis
@pytest.mark.usefixtures("arithmetic")
def test_any_shape_gives_the_sum_of_these_numbers() -> None:
    """Odd numbers of rows and outputs, spans that are not full, with and without a bias, in both
    types of result."""

    @given(
        rows=st.integers(1, 30),
        outputs=st.integers(1, 70),
        inputs=st.one_of(st.integers(1, 110).map(lambda n: 2 * n), st.sampled_from([64, 128, 192])),
        has_bias=st.booleans(),
        dtype=st.sampled_from([BF16, torch.float32]),
    )
    @settings(max_examples=60)
    def check(rows: int, outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
        x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
        bias = random(outputs, seed=2) if has_bias else None
        layer = pack(weight, bias, dtype)
        exact = inputs_of(x) @ weight_of(layer).T + (0.0 if bias is None else bias.double())
        found = layer(x)
        assert (found.dtype, found.shape) == (dtype, (rows, outputs))
        rounding = 2**-8 if dtype == BF16 else 1e-6
        torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-4)

    check()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_largest_sums_are_exact(signs: tuple[int, int]) -> None:
    """All inputs and all weights at the end of their range: where 16 bits would overflow, and where
    most is added to make inputs positive."""
    x = torch.full((20, 2048), 127.0 * signs[0], dtype=BF16)
    weight = torch.full((32, 2048), 63.0 * signs[1], dtype=BF16)
    found = pack(weight, dtype=torch.float32)(x)
    assert torch.equal(found, torch.full((20, 32), signs[0] * signs[1] * 127.0 * 63.0 * 2048))


def test_large_neighbours_do_not_drown_a_span() -> None:
    """An input a thousand times the others, and a weight likewise, cost nothing elsewhere."""
    x, weight = random(4, 256), random(16, 256, seed=1)
    x[:, 7], weight[:, 200] = 1000.0, 1000.0
    layer = pack(weight, dtype=torch.float32)
    kept = slice(64, 192)
    alone = pack(weight[:, kept].contiguous(), dtype=torch.float32)
    assert torch.equal(weight_of(layer)[:, kept], weight_of(alone))
    inputs = torch.zeros_like(x)
    inputs[:, kept] = x[:, kept]
    torch.testing.assert_close(layer(inputs), alone(x[:, kept].contiguous()))


def test_nothing_and_no_number_stay_what_they_are() -> None:
    """Rows of zeros, and what is not finite in one row only."""
    layer = pack(random(16, 64), dtype=torch.float32)
    x = torch.zeros(3, 64, dtype=BF16)
    x[1, 5] = math.nan
    found = layer(x)
    assert torch.equal(found[::2], torch.zeros(2, 16))
    assert found[1].isnan().all()
    assert torch.equal(pack(torch.zeros(16, 64, dtype=BF16))(random(2, 64)).float(), found[::2])


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("num_rows", [1, 5, 7, 13, 700])
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int) -> None:
    """Alone or among hundreds of others, over several panels, and where few rows are not multiplied
    as many are: the same bits."""
    layer = pack(random(80, 640), dtype=torch.float32)
    x = random(num_rows, 640, seed=1)
    together = layer(x)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gate_and_up_in_one(activation: str) -> None:
    """activation(gate) · up, of what the two give alone."""
    gate, up = random(96, 64), random(96, 64, seed=1)
    both = backend().pack_gated(gate, up, activation)
    both.quantize()
    x = torch.cat([random(20, 64, seed=2), 20 * random(20, 64, seed=3)])
    known = silu if activation == "silu" else lambda y: gelu(y, approximate="tanh")
    exact = known(pack(gate)(x).float()).to(BF16).float() * pack(up)(x).float()
    torch.testing.assert_close(both(x).float(), exact, rtol=2**-7, atol=1e-3)


def test_an_embedding_reads_the_packed_head() -> None:
    """Each row as the head multiplies by it, rounded, with its scale."""
    head = pack(random(389, 96))
    ids = torch.arange(389).view(1, -1)
    rows = weight_of(head).to(BF16)
    torch.testing.assert_close(PackedEmbedding(head, None)(ids)[0], rows, rtol=2**-7, atol=0)
    scale = torch.tensor(5.5, dtype=BF16)
    assert torch.equal(
        PackedEmbedding(head, scale)(ids)[0], PackedEmbedding(head, None)(ids)[0] * scale
    )


def test_a_weight_takes_little_more_than_a_byte() -> None:
    """And the memory that it had as bfloat16 is given back while it is packed."""
    layer = backend().pack(random(4096, 640), None)
    before = layer.packed
    layer.quantize()
    assert layer.packed.nbytes <= 1.07 * 4096 * 640
    assert int((before != 0).sum()) <= 0.1 * before.numel()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("architecture", ["gemma3", "llama", "gpt2"])
def test_every_packed_layer_of_a_model_is_quantized(architecture: str, models: Path) -> None:
    """Tied heads too; the report says so, and counts its bytes."""
    backend()
    folder = tiny_model(architecture, models)
    reports = []
    for wanted in (None, "int8"):
        worker = Worker(
            worker_config(
                folder, dtype="bfloat16", kernel_cache_dir=cache_dir(), quantization=wanted
            ),
            rank=0,
            rendezvous="",
        )
        reports.append(worker.load())
    head = worker._model._head  # type: ignore[attr-defined]
    layers = [m for m in head.modules() if isinstance(m, PackedLinear)]
    assert layers
    assert all(layer.packed.dtype == torch.int8 for layer in layers)
    plain, int8 = reports
    assert "linear=native-int8 " in int8.description
    assert "linear=native " in plain.description
    assert int8.weight_bytes < plain.weight_bytes


def test_whoever_cannot_have_it_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other types and devices, no kernels, a model without such layers."""
    with pytest.raises(ConfigError, match=r"^--quantization int8 is for bfloat16 on CPU; this is"):
        choose(torch.float32, torch.device("cpu"), cache_dir(), 1, quantization="int8")
    with pytest.raises(ConfigError, match=r"^--quantization int8 is for bfloat16 on CPU; this is"):
        choose(BF16, torch.device("cuda"), cache_dir(), 1, quantization="int8")
    with pytest.raises(ConfigError, match=r"^--quantization int8 is done by raywire's kernels"):
        choose(BF16, torch.device("cpu"), cache_dir(), 1, "torch", "int8")
    with pytest.raises(ConfigError, match=r"^--quantization int8: the model has no linear layer"):
        quantization.quantize(torch.nn.Sequential())
    monkeypatch.setattr("workers.native_build._processor", lambda: {"flags\t: fpu sse2"})
    with pytest.raises(ConfigError, match=r"^--quantization int8: no kernels: this processor"):
        choose(BF16, torch.device("cpu"), str(tmp_path), 1, quantization="int8")


NUM_WINDOWS, WINDOW = 6, 160


def text_windows(folder: Path) -> list[list[int]]:
    """Stretches of the manual that comes with Python, from all over it."""
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    topics = pydoc_data.topics.topics
    ids = encode("\n".join(topics.values()), add_special_tokens=False).ids
    starts = range(0, len(ids) - WINDOW, len(ids) // NUM_WINDOWS)
    return [[2, *ids[start : start + WINDOW - 1]] for start in starts][:NUM_WINDOWS]


def logprobs_of(folder: Path, prompts: list[list[int]], wanted: Quantization | None) -> Tensor:
    """Of the prompts' own tokens, by one worker."""
    config = worker_config(
        folder, dtype="bfloat16", kernel_cache_dir=cache_dir(), quantization=wanted
    )
    spec = KVCacheSpec(
        num_blocks=64,
        block_size=16,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=256,
    )
    driver = PlanDriver(
        loaded_worker(config, spec).execute_model, block_size=16, num_blocks=64, max_seqs=1
    )
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    sequences = [Sequence(str(i), ids, 1, params) for i, ids in enumerate(prompts)]
    driver.run(sequences)
    found = [part.logprobs[:, 0] for sequence in sequences for part in sequence.prompt_logprobs]
    return torch.from_numpy(np.concatenate(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_is_hardly_worse() -> None:
    """Gemma 3 270M on English text: at most 2% more perplexity than as bfloat16."""
    backend()
    folder = resolve("demo", cache_dir=Path(cache_dir()))
    windows = text_windows(folder)
    int8, plain = (logprobs_of(folder, windows, wanted) for wanted in ("int8", None))
    assert len(plain) == NUM_WINDOWS * (WINDOW - 1)
    assert float((plain - int8).mean()) <= math.log(1.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_are_as_close_as_one(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with half of the heads and features, quantized by itself: log probabilities as close to
    those of bfloat16 as one rank's."""
    backend()
    monkeypatch.setenv("RAYWIRE_CACHE_DIR", cache_dir())
    folder = tiny_model("llama", models)
    prompt = list(range(3, 40))
    params = api.SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=1, ignore_eos=True)
    with api.LLM(str(folder), dtype="bfloat16", tensor_parallel_size=2, quantization="int8") as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    found = [next(iter(best.values())).logprob for best in output.prompt_logprobs or [] if best]
    two = torch.tensor(found)

    one, plain = (logprobs_of(folder, [prompt], wanted) for wanted in ("int8", None))

    assert not torch.equal(one, plain)
    assert (two - plain).abs().mean() <= 1.5 * (one - plain).abs().mean()
