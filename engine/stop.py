"""Whether a request has finished, and why. Called by the scheduler for each token it takes in.

Stop strings are not here: only `api/` has text, and it aborts what it has seen the end of.
"""

from array import array

from engine.request import Request
from engine.sampling_params import RepetitionDetection
from engine.wire import FinishReason


def finish_reason(request: Request) -> FinishReason | None:
    """Why `request` ends with its last token; None if it goes on.

    A stop token counts as output, so the shortest answer is one token. Until `min_tokens` are out
    the sampler cannot draw a stop token, and none ends the request here. The length limits hold
    whatever `min_tokens` says. A structured output that is whole ends the request in any case.
    """
    if request.matcher is not None and request.matcher.is_over:
        return FinishReason.STOP
    num_tokens = request.num_tokens
    if num_tokens >= request.min_num_tokens:
        if request.token_ids[-1] in request.stop_token_ids:
            return FinishReason.STOP
        detection = request.sampling_params.repetition_detection
        if detection is not None and is_repeating(
            request.token_ids, request.num_prompt_tokens, detection
        ):
            return FinishReason.REPETITION
    if num_tokens >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None


def stop_reason(request: Request) -> int | None:
    """The stop token id that ended a request with STOP; None for the model's own end token, and for
    a structured output that was whole with its last token."""
    params = request.sampling_params
    last: int = request.token_ids[-1]
    if request.matcher is not None and last not in request.stop_token_ids:
        return None
    if last in params.eos_token_ids and not params.ignore_eos:
        return None
    return last


def is_repeating(token_ids: "array[int]", start: int, detection: RepetitionDetection) -> bool:
    """Whether the tokens from `start` on end with one pattern, `min_count` times in a row."""
    count = detection.min_count
    longest = min(detection.max_pattern_size, (len(token_ids) - start) // count)
    last = token_ids[-1]
    # Most sizes are ruled out by the last token alone.
    return any(
        token_ids[-1 - size] == last and _ends_with_repeats(token_ids, size, count)
        for size in range(detection.min_pattern_size, longest + 1)
    )


def _ends_with_repeats(token_ids: "array[int]", size: int, count: int) -> bool:
    """Whether the last `size` tokens stand there `count` times in a row."""
    end = len(token_ids)
    pattern = token_ids[end - size :]
    # Backwards, to the first that differs: this runs for each token, over outputs of any length.
    return all(
        token_ids[start : start + size] == pattern
        for start in range(end - 2 * size, end - size * count - 1, -size)
    )
