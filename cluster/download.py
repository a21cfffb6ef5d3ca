"""ENTRY, short-lived process: a model of the Hugging Face hub to a local folder.

    python -m cluster.download OWNER/NAME

Started by `model_source` where no folder has that name. A process of its own, because a download
runs in threads that cannot be stopped: a server that is told to end would wait for the whole model.
So it is held on a leash (`engine/leash.py`). What it has loaded so far stays, and the next start
goes on from there.

Standard output ends with the folder, or, with exit code 2, says in one line why there is none.
"""

import logging
import sys
from typing import cast

from engine import leash
from engine.errors import EXIT_CONFIG, ConfigError

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""What is downloaded: weights and data. Never pickles, never code."""


def main(model: str) -> int:
    leash.hold_on("Download")
    root = logging.getLogger()
    if root.level == logging.INFO:  # where the hub's HTTP library, whichever it is, logs requests
        root.setLevel(logging.WARNING)
    try:
        folder = download(model)
    except ConfigError as error:
        sys.stdout.write(f"\n{error}\n")
        return EXIT_CONFIG
    sys.stdout.write(f"\n{folder}\n")
    return 0


def download(model: str) -> str:
    """Return the folder of a model in the hub's local cache, which is brought up to date.

    Raises:
        ConfigError: it cannot be downloaded. One line that says what to do.
    """
    # Not at the top: the leash goes first, and this takes half a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        # Files of the top folder only: deeper ones are other formats of the same weights.
        return snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise ConfigError(
            f"model {model} is gated: accept its terms on its page, then log in with"
            " `hf auth login` or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model {model} is neither a local folder nor on the Hugging Face hub; a private one"
            " needs `hf auth login` or HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            why = f"the hub does not answer ({_first_line(error.__cause__ or error)})"
        raise ConfigError(
            f"model {model} is no local folder and not in the hub's local cache, and {why};"
            " download it elsewhere and name its folder, or try `raywire serve demo`"
        ) from error
    # The bases are the transport's errors, of whichever library this version of the hub uses.
    except cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__) as error:
        raise ConfigError(f"cannot download model {model}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
