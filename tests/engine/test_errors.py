"""The tree of errors: drawn as it is, and fit to be carried between processes."""

import pickle
import re

import pytest

from engine import errors
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    ExecutorError,
    InvalidRequestError,
    NotFoundError,
    RaywireError,
    RequestError,
    UnavailableError,
    UnsupportedFieldError,
)

EXAMPLES: list[RaywireError] = [
    InvalidRequestError("top_p must be above 0", "top_p"),
    UnsupportedFieldError("mm_features is not supported", "mm_features"),
    ContextLengthError("too long", "prompt", (12, 9)),
    NotFoundError("no model", "model"),
    ConfigError("no config.json in folder"),
    UnavailableError("loading", 5),
    ExecutorError("worker 1 died"),
    EngineDeadError(2, "worker 1 died"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_errors_survive_being_carried_between_processes(error: RaywireError) -> None:
    """multiprocessing rebuilds an error from its arguments; text and fields must survive."""
    carried = pickle.loads(pickle.dumps(error))

    assert type(carried) is type(error)
    assert str(carried) == str(error)
    assert vars(carried) == vars(error)


def test_the_drawing_shows_the_tree() -> None:
    """Every class is in the picture at the top of the file, and nothing else."""
    drawn = set(re.findall(r"\b[A-Z]\w+Error\b", errors.__doc__ or ""))
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, RaywireError)
    }

    assert drawn == defined


def test_the_callers_faults_have_a_status_and_a_code() -> None:
    """What an API server answers is decided by the class."""
    answers = {
        type(e).__name__: (e.status, e.code) for e in EXAMPLES if isinstance(e, RequestError)
    }

    assert answers == {
        "InvalidRequestError": (400, "invalid_value"),
        "UnsupportedFieldError": (400, "unsupported_parameter"),
        "ContextLengthError": (400, "context_length_exceeded"),
        "NotFoundError": (404, "model_not_found"),
    }


def test_a_dead_engine_says_which_and_why() -> None:
    """The first cause is part of what clients' operators read."""
    assert str(EngineDeadError(2, "worker 1 died")) == "engine core DP2 is dead: worker 1 died"
