"""The tokenizer, next to transformers' own."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from api.tokenizer import Tokenizer
from engine.errors import ConfigError, InvalidRequestError
from tests.helpers.tiny_tokenizers import BY_KIND, byte_level, save, sentencepiece, with_begin

TEXTS = [
    "The quick brown fox",
    "  two spaces, a tab\tand\n\na line",
    "Größe naïve 漢字 🙂👩‍👩‍👧 e\u0301",
    "typed </s> and <|turn|> and <s>",
    " ",
    "\x00\x7f",
]


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # slow to import: only for tests that compare

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("kind", BY_KIND)
@pytest.mark.parametrize("adds_special_tokens", [True, False])
def test_encoding_equals_transformers(kind: str, adds_special_tokens: bool, tmp_path: Path) -> None:
    """Every kind of tokenizer, with and without the begin token; typed special tokens included."""
    folder = save(with_begin(BY_KIND[kind]()), tmp_path)
    ours, theirs = Tokenizer.load(folder), auto_tokenizer(folder)

    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=adds_special_tokens)
        assert ours.encode(text, adds_special_tokens) == expected
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "bos_token": {"content": "<|turn|>", "__type": "AddedToken"}},
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<pad>", "<new>"]},
        {"added_tokens_decoder": {"401": {"content": "<new>", "special": False}}},
    ],
)
def test_tokenizer_config_is_followed_as_transformers_does(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens that only the config knows are added; begin and end are the tokenizer.json's own."""
    folder = save(with_begin(byte_level()), tmp_path, **config)
    ours, theirs = Tokenizer.load(folder), auto_tokenizer(folder)

    for text in [*TEXTS, "<pad><new>"]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_tokens == {k: str(v) for k, v in theirs.special_tokens_map.items()}


@pytest.mark.parametrize("kind", BY_KIND)
def test_decoding_gives_the_text_back(kind: str, tmp_path: Path) -> None:
    """As transformers does, with special tokens and without."""
    folder = save(with_begin(BY_KIND[kind]()), tmp_path)
    ours, theirs = Tokenizer.load(folder), auto_tokenizer(folder)

    for text in TEXTS:
        for skips in (True, False):
            token_ids = ours.encode(text)
            expected = theirs.decode(
                token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert ours.decode(token_ids, skip_special_tokens=skips) == expected


def test_end_tokens_come_from_tokenizer_and_model(tmp_path: Path) -> None:
    """The tokenizer's own first, then what generation_config.json adds, each once."""
    folder = save(byte_level(), tmp_path)
    own = Tokenizer.load(folder).token_id("</s>")
    assert own is not None
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.load(folder).eos_token_ids == (own, 9)

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own, 3]}))
    assert Tokenizer.load(folder).eos_token_ids == (own, 7, 3)

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert Tokenizer.load(folder).eos_token_ids == (own, 5)


def test_chat_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    """In the config, as text or as a list, or in files of their own, which go first."""
    folder = save(byte_level(), tmp_path, chat_template="inside")
    assert Tokenizer.load(folder).chat_template == "inside"

    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    save(byte_level(), tmp_path, chat_template=named)
    assert Tokenizer.load(folder).chat_templates == {"default": "a", "tool_use": "b"}

    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).chat_template == "file"


def test_a_token_shows_its_bytes(tmp_path: Path) -> None:
    """For log probabilities: also where it is a part of a character, or a space."""
    for make in (byte_level, sentencepiece):
        tokenizer = Tokenizer.load(save(make(), tmp_path))
        token_ids = tokenizer.encode("the 漢", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, token_ids)).strip() == "the 漢".encode()
        assert tokenizer.token_text(token_ids[-1]) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""


def test_half_a_surrogate_pair_is_the_callers_fault(tmp_path: Path) -> None:
    """JSON can hold one; no text can."""
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path))

    with pytest.raises(InvalidRequestError, match="Unicode"):
        tokenizer.encode("a\ud83d")


def set_chat_template(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").write_text("[1]"),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": 3}'),
        lambda folder: (folder / "generation_config.json").write_text("{,"),
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [[1]]}'),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "chat_template.jinja").write_bytes("é".encode("latin-1")),
        lambda folder: set_chat_template(folder, [{"nam": "default", "template": ""}]),
        lambda folder: set_chat_template(folder, ["{{ messages }}"]),
        lambda folder: set_chat_template(folder, {"default": 1}),
        lambda folder: set_chat_template(folder, 1),
    ],
)
def test_an_unusable_folder_is_one_clear_error(
    spoil: Callable[[Path], object], tmp_path: Path
) -> None:
    """It names the folder or the file."""
    folder = save(byte_level(), tmp_path)
    spoil(folder)

    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(folder)


def test_a_folder_with_nothing_to_read_is_a_config_error(tmp_path: Path) -> None:
    """What could be converted has been, before (`cluster.tokenizer_source`)."""
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, nor files to make one of"):
        Tokenizer.load(tmp_path)


def test_loading_brings_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """The serving process stays small."""
    save(byte_level(), tmp_path)
    script = (
        "import sys; from pathlib import Path; from api.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(tmp_path)!r}));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_encoding_leaves_other_threads_running(tmp_path: Path) -> None:
    """A long prompt in a thread does not hold the interpreter lock: an event loop goes on."""
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path))
    longest_gap_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, "the lazy dog, and the fox. " * 100_000)
        began = last = time.perf_counter()
        while not encoding.done():
            time.sleep(0)  # gives the lock away, as a select call does
            now = time.perf_counter()
            longest_gap_s, last = max(longest_gap_s, now - last), now

    assert len(encoding.result()) > 100_000
    assert longest_gap_s < (last - began) / 3


def test_time_per_token_is_flat_in_special_tokens(tmp_path: Path) -> None:
    """Twice as many take about twice as long: nothing is quadratic in the prompt."""
    tokenizer = Tokenizer.load(save(byte_level(), tmp_path))

    def seconds(count: int) -> float:
        began = time.process_time()
        tokenizer.encode("<|turn|>" * count)
        return time.process_time() - began

    seconds(1000)
    assert min(seconds(40_000) for _ in range(3)) < 3.5 * min(seconds(20_000) for _ in range(3))
