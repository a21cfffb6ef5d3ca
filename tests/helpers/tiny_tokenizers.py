"""Small real tokenizers, one of each kind that decodes differently, trained in milliseconds."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A token is a piece of text; a text is a row of tokens. Tokens, tokens, tokens!",
    "Größe, naïve café, Ærøskøbing, žluťoučký kůň.",
    "def main():\n    return {'answer': 42}\n\n\n# the end",
] * 4

SPECIALS = ["<s>", "</s>", "<unk>", "<|turn|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*, adds_space: bool = False) -> Tokenizer:
    """As in GPT-2, Llama 3, Qwen; with `adds_space` as in RoBERTa."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("é!", normalized=False)])
    return tokenizer


def sentencepiece(*, cuts_space: bool = True) -> Tokenizer:
    """As in Llama 2 and Mistral; without `cuts_space` as in Gemma."""
    first = normalizers.Prepend("▁")
    mark = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([first, mark]) if cuts_space else mark
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if cuts_space else steps
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIALS, *BYTE_TOKENS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer marks all of them special; byte tokens are not.
    fixed = Tokenizer.from_str(_without_added_bytes(tokenizer.to_str()))
    return with_begin(fixed)


def sentencepiece_metaspace() -> Tokenizer:
    """As in newer files of Llama 2 and Mistral, which put the space before the first piece only."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram(scheme: str = "always") -> Tokenizer:
    """As in T5 and other Unigram models, by where a space is put before a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_end() -> Tokenizer:
    """As in CLIP: the last piece of a word has a mark, which is a space unless the text ends."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As in BERT: how a token reads depends on the one before."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BY_KIND: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_spaced": lambda: byte_level(adds_space=True),
    "sentencepiece": sentencepiece,
    "sentencepiece_uncut": lambda: sentencepiece(cuts_space=False),
    "sentencepiece_metaspace": sentencepiece_metaspace,
    "unigram": unigram,
    "unigram_first": lambda: unigram("first"),
    "unigram_never": lambda: unigram("never"),
    "word_end": word_end,
    "word_piece": word_piece,
}


def with_begin(tokenizer: Tokenizer) -> Tokenizer:
    """Make encoding put `<s>` first."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """Write a folder that holds the tokenizer and its tokenizer_config.json."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _without_added_bytes(text: str) -> str:
    import json

    content = json.loads(text)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in SPECIALS]
    return json.dumps(content)
