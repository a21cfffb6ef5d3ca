"""Packed linear layers compute what torch's do, whatever the shape, and do without a compiler."""

import logging
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from engine.errors import ConfigError
from tests.helpers.built_kernels import ARITHMETICS, backend, cache_dir, use_arithmetic
from workers import native_build
from workers.linear import BLOCK, PackedEmbedding, choose, unpack

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    """Within the rounding of a bfloat16 result: half a unit in its last place, and a bit."""
    torch.testing.assert_close(ours.float(), exact, rtol=2**-8, atol=1e-4)


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of multiplying, whichever is the fastest here."""
    use_arithmetic(monkeypatch, request.param)


@pytest.mark.hypothesis
@pytest.mark.usefixtures("arithmetic")
def test_any_shape_gives_what_torch_gives() -> None:
    """Odd numbers of rows and outputs, with and without a bias, in both types of result."""

    @given(
        rows=st.integers(1, 40),
        outputs=st.integers(1, 100),
        inputs=st.one_of(st.integers(1, 60).map(lambda n: 2 * n), st.sampled_from([32, 64, 96])),
        has_bias=st.booleans(),
        dtype=st.sampled_from([BF16, torch.float32]),
    )
    def check(rows: int, outputs: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
        x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
        bias = random(outputs, seed=2) if has_bias else None
        exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
        packed = backend().pack(weight.clone(), bias, dtype)
        assert packed(x).dtype == dtype
        assert_close(packed(x), exact)

    check()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("num_rows", [1, 11, 13, 700])
def test_a_row_does_not_depend_on_its_neighbours(num_rows: int) -> None:
    """Alone or among hundreds of others, over several panels: the same bits."""
    packed = backend().pack(random(80, 640), None)
    x = random(num_rows, 640, seed=1)
    together = packed(x)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


def test_threads_change_nothing() -> None:
    """One thread or three, helpers that come late or not at all."""
    weight, x = random(512, 96), random(30, 96, seed=1)
    alone, shared = (backend(n).pack(weight.clone(), None) for n in (1, 3))
    expected = alone(x)
    for _ in range(300):
        assert torch.equal(shared(x), expected)


@pytest.mark.parametrize("num_outputs", [16, 48, 389])
def test_packing_keeps_every_weight(num_outputs: int) -> None:
    """Unpacked, it is what it was; whole blocks are packed where they are."""
    weight = random(num_outputs, 34)
    given_memory = weight.clone()
    packed = backend().pack(given_memory, None).packed
    assert torch.equal(unpack(packed)[:num_outputs], weight)
    assert (packed.data_ptr() == given_memory.data_ptr()) == (num_outputs % BLOCK == 0)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gate_and_up_in_one(activation: str) -> None:
    """activation(gate) · up, for small and for large values."""
    gate, up = random(96, 64), random(96, 64, seed=1)
    x = torch.cat([random(20, 64, seed=2), 20 * random(20, 64, seed=3)])
    known = silu if activation == "silu" else lambda y: gelu(y, approximate="tanh")
    exact = known(linear(x, gate).float()).to(BF16).float() * linear(x, up).float()
    ours = backend().pack_gated(gate, up, activation)(x)
    torch.testing.assert_close(ours.float(), exact, rtol=2**-6, atol=2e-3)


def test_an_embedding_reads_the_packed_head() -> None:
    """Each row, exactly, with its scale."""
    weight = random(389, 32)
    head = backend().pack(weight.clone(), None)
    ids = torch.arange(389).view(1, -1)
    assert torch.equal(PackedEmbedding(head, None)(ids)[0], weight)
    scale = torch.tensor(5.5, dtype=BF16)
    assert torch.equal(PackedEmbedding(head, scale)(ids)[0], weight * scale)


def test_only_bfloat16_on_cpu_is_packed() -> None:
    """Whoever asks for float32 gets torch's own bits."""
    assert choose(torch.float32, CPU, cache_dir(), 1) is None
    assert choose(torch.float16, CPU, cache_dir(), 1) is None
    assert choose(BF16, torch.device("cuda"), cache_dir(), 1) is None
    assert choose(BF16, CPU, None, 1) is None


def test_without_a_compiler_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says so and what it costs."""
    monkeypatch.setattr(native_build, "_processor", lambda: {"flags\t: fpu fma avx2"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        assert choose(BF16, CPU, str(tmp_path), 1) is None
    (record,) = caplog.records
    assert "no C++ compiler" in record.message
    assert "several times as long" in record.message


@pytest.mark.parametrize(
    ("dtype", "device", "why"),
    [
        (BF16, "cpu", "no kernels: there is no C++ compiler"),
        (torch.float32, "cpu", "is for bfloat16 on CPU; this is torch.float32 on cpu"),
        (BF16, "cuda", "is for bfloat16 on CPU; this is torch.bfloat16 on cuda"),
    ],
)
def test_native_layers_are_had_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str, why: str
) -> None:
    """Who asks for them wants no other: one line says why not."""
    monkeypatch.setattr(native_build, "_processor", lambda: {"flags\t: fpu fma avx2"})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError) as refusal:
        choose(dtype, torch.device(device), str(tmp_path), 1, "native")
    assert "--linear-backend native" in str(refusal.value)
    assert why in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_kernels_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For whoever suspects them. Nothing is built, and there is nothing to warn of."""
    assert choose(BF16, CPU, str(tmp_path), 1, "torch") is None
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_a_cache_that_cannot_be_written_leaves_the_work_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says so, and names the folder."""
    backend()  # skips where there is no compiler
    with caplog.at_level(logging.WARNING):
        assert choose(BF16, CPU, "/proc/raywire", 1) is None
    (record,) = caplog.records
    assert "/proc/raywire" in record.message


def test_a_processor_without_fast_vectors_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(native_build, "_processor", lambda: {"flags\t: fpu sse2 avx"})
    with caplog.at_level(logging.WARNING):
        assert native_build.load(tmp_path / "cache", 1) is None
    (record,) = caplog.records
    assert "no AVX2" in record.message


def test_a_build_that_fails_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler's first line is in the warning, and nothing is in the cache."""
    (tmp_path / "broken.cpp").write_text("#error not today\n")
    monkeypatch.setattr(native_build, "SOURCES", tmp_path)
    backend()  # skips where there is no compiler
    with caplog.at_level(logging.WARNING):
        assert native_build.load(tmp_path / "cache", 1) is None
    (record,) = caplog.records
    assert "not today" in record.message
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_build_is_told_before_and_after_and_only_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes some seconds of a start, once: whoever waits should know what for."""
    backend()
    (built,) = Path(cache_dir()).glob(f"kernels/{native_build._key()}/*.so")

    def compile_nothing(command: list[str], **_: object) -> None:
        shutil.copy(built, command[command.index("-o") + 1])

    monkeypatch.setattr(subprocess, "run", compile_nothing)
    with caplog.at_level(logging.INFO, "workers.native_build"):
        assert native_build.load(tmp_path, 1) is not None
        assert native_build.load(tmp_path, 1) is not None
    before, after = (record.message for record in caplog.records)
    assert before == "building kernels for this processor, once; takes seconds"
    assert after.startswith("kernels built compiler=")


def test_a_build_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start needs no compiler."""
    backend()
    monkeypatch.setattr(native_build, "_build", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert native_build.load(Path(cache_dir()), 1) is not None


def test_several_threads_may_call_at_once() -> None:
    """One of them has the helpers, the others work on their own."""
    packed = backend().pack(random(640, 256), None)
    x = random(300, 256, seed=1)
    expected = packed(x)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: packed(x), range(300)):
            assert torch.equal(found, expected)
