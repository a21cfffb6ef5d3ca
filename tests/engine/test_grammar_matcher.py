"""What may come next, token by token, and when an output is whole."""

from pathlib import Path

import pytest

from engine.errors import InvalidRequestError
from engine.grammar.compiler import Compiler
from tests.helpers.grammars import (
    END,
    make_compiler,
    matcher_of,
    possible,
    request_of,
    schema,
    spec,
    started,
)

STOP = 258


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


def test_only_what_the_language_has_may_come_next(compiler: Compiler) -> None:
    """One byte after the other; nothing of it is taken for granted by the library."""
    matcher = matcher_of(compiler, spec("choice", '["yes", "no", "yet"]'))
    assert possible(matcher) == sorted(b"yn")
    assert matcher.accept(ord("y"))
    assert possible(matcher) == [ord("e")]
    assert matcher.accept(ord("e"))
    assert possible(matcher) == sorted(b"st")
    assert not matcher.is_over
    assert matcher.accept(ord("t"))
    assert matcher.is_over


def test_an_end_may_be_sampled_where_the_language_ends(compiler: Compiler) -> None:
    """The model's end and the client's, unless ends are to be ignored."""
    output = spec("regex", "a+")
    matcher = matcher_of(compiler, output, stop_token_ids=(STOP,))
    assert possible(matcher) == [ord("a")]
    assert matcher.accept(ord("a"))
    assert possible(matcher) == [ord("a"), END, STOP]
    assert matcher.accept(END)
    assert matcher.is_over

    ignoring = matcher_of(compiler, output, ignore_eos=True)
    assert ignoring.accept(ord("a"))
    assert possible(ignoring) == [ord("a")]


def test_a_stop_token_may_be_text_as_well(compiler: Compiler) -> None:
    """Inside the text it is followed like any other."""
    matcher = matcher_of(compiler, spec("choice", '["a;b"]'), stop_token_ids=(ord(";"),))
    for token in b"a;b":
        assert not matcher.is_over
        assert matcher.accept(token)
    assert matcher.is_over


def test_what_does_not_fit_is_refused_for_good(compiler: Compiler) -> None:
    """With a fault that names no more than the token."""
    matcher = matcher_of(compiler, spec("choice", '["ab"]'))
    assert not matcher.accept(ord("b"))
    assert matcher.fault == "token 98 does not fit the structured output"
    assert not matcher.accept(ord("a"))


def test_special_tokens_are_no_text(compiler: Compiler) -> None:
    """An end in the middle of a string would be the end of the stream."""
    matcher = matcher_of(compiler, schema({"type": "string"}))
    assert matcher.accept(ord('"'))
    assert set(possible(matcher)) <= set(range(256))
    assert not matcher.accept(END)


def test_tokens_that_the_model_does_not_have_are_never_possible(tmp_path: Path) -> None:
    """A model may have fewer tokens than its tokenizer, or more."""
    few = matcher_of(make_compiler(tmp_path, 100), spec("regex", "[a-z]"), eos_token_ids=())
    assert possible(few, 100) == [97, 98, 99]
    many = matcher_of(make_compiler(tmp_path, 3000), spec("regex", "[^a]*"))
    assert max(possible(many, 3000)) == END


def test_output_that_is_there_already_is_followed_first(compiler: Compiler) -> None:
    """Generation goes on where another engine has left off; what does not fit is a 400."""
    output = spec("choice", '["abc", "abd"]')
    request = started(compiler, request_of(output, output=list(b"ab")))
    assert request.matcher is not None
    assert possible(request.matcher) == sorted(b"cd")
    for text, why in ((b"b", "does not fit"), (b"abc", "is whole already")):
        with pytest.raises(InvalidRequestError, match=why) as caught:
            started(compiler, request_of(output, output=list(text)))
        assert caught.value.param == "output_token_ids"


def test_white_space_has_an_end(compiler: Compiler) -> None:
    """Small models, once they have begun with it, do not stop by themselves."""
    matcher = matcher_of(compiler, schema({"type": "array", "items": {"type": "null"}}))
    assert matcher.accept(ord("["))
    count = 0
    while ord(" ") in possible(matcher):
        assert matcher.accept(ord(" "))
        count += 1
    assert count == 40
    assert possible(matcher) == sorted(b"]n")
