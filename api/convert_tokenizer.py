"""ENTRY, short-lived process: print a tokenizer.json for a model folder that has none.

Folders with vocab.json and merges.txt, or with tokenizer.model, are read by transformers. That
costs seconds and 200 MB even with torch hidden, which a serving process need not keep; and a user's
own process, which may want transformers with torch, must not be left with one that has learnt to do
without. So `tokenizer` runs this module in a process of its own, on a leash (`engine/leash.py`).

Standard output ends with one line, the JSON list [tokenizer.json, tokenizer_config.json].
"""

import json
import sys

from engine import leash


def main(folder: str) -> None:
    leash.hold_on("Tokenizer")
    # Hidden before transformers is imported, or that imports torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer  # not at the top: see the line above

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SystemExit(
            f"{type(tokenizer).__name__} has no form that the tokenizers library reads"
        )
    config = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    config["chat_template"] = tokenizer.chat_template
    sys.stdout.write("\n" + json.dumps([backend.to_str(), config]))


if __name__ == "__main__":
    main(sys.argv[1])
