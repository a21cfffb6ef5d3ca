"""Stop strings in text that comes in pieces."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from api.stop_strings import StopMatcher

# Few letters, so that stop strings overlap, contain each other and nearly match all the time.
_STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
_PIECES = st.lists(st.text("ab\n", max_size=6), max_size=12)


def naive_end(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """What should be left of a whole text, and which stop string ended it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end - len(match)], match
    return None


def naive_hold(text: str, stops: tuple[str, ...]) -> int:
    """How much of a text's end may still become a stop string."""
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(len(text) + 1) if text[-length:] in prefixes), default=0)


@settings(max_examples=250)
@given(_STOPS, _PIECES)
def test_pieces_give_what_the_whole_text_gives(stops: tuple[str, ...], pieces: list[str]) -> None:
    """Same text, same stop string, wherever the pieces are cut."""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        if matcher.matched is None:
            sent += matcher.push(piece)
    sent += matcher.finish()

    assert (sent, matcher.matched) == (naive_end("".join(pieces), stops) or ("".join(pieces), None))


@settings(max_examples=250)
@given(_STOPS, _PIECES)
def test_nothing_is_held_without_need(stops: tuple[str, ...], pieces: list[str]) -> None:
    """After each piece exactly the longest possible beginning of a stop string is missing."""
    matcher = StopMatcher(stops)
    sent, came = "", ""
    for piece in pieces:
        sent += matcher.push(piece)
        came += piece
        if matcher.matched is not None:
            break
        assert sent == came[: len(came) - naive_hold(came, stops)]


def test_a_stop_string_may_be_kept() -> None:
    """`include_stop_str_in_output`: the text ends with it, and not later."""
    matcher = StopMatcher(("X1", "X2"), include_match=True)

    assert matcher.push("one X") + matcher.push("2 two") == "one X2"
    assert matcher.matched == "X2"


def test_characters_of_regular_expressions_are_plain_here() -> None:
    """Any character may begin a stop string."""
    for stop in ("]", "^", "-", "\\", "[a", "\u2028", "🙂"):
        assert StopMatcher((stop,)).push(f"text{stop}more") == "text"


def test_an_ignored_match_does_not_count_but_its_end_may_begin_one() -> None:
    """While stop strings do not count yet (`min_tokens`), one that ends later does."""
    matcher = StopMatcher(("aba",))

    assert matcher.push("xaba", may_match=False) == "xab"
    assert matcher.push("ba") == ""
    assert matcher.matched == "aba"


def test_time_is_linear_in_the_text() -> None:
    """A text that is nothing but beginnings of the stop string, in one piece or in many."""
    stop = ("a" * 1000 + "b",)
    seconds = []
    for length in (50_000, 100_000):
        matcher = StopMatcher(stop)
        began = time.process_time()
        for _ in range(length // 10):
            matcher.push("a" * 10)
        seconds.append(time.process_time() - began)

    assert seconds[1] < 5 * seconds[0]
