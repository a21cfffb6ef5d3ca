"""How the sequences of a request become the choices that it asks for. Used by the routes."""

from collections.abc import Callable
from functools import partial

from api.beam_search import BeamSearch
from api.best_of import BestOf
from api.generate import Generation
from api.limits import MAX_BEAMS_TOGETHER
from api.protocol import GenerationBody
from api.sampling import SamplingParams
from api.stream_interval import SpacedGeneration
from engine.errors import InvalidRequestError


def check_beams(body: GenerationBody, num_prompts: int) -> None:
    """Bound the beams of one request.

    Raises:
        InvalidRequestError: there would be too many.
    """
    if body.use_beam_search and num_prompts * body.num_choices > MAX_BEAMS_TOGETHER:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={body.num_choices} are"
            f" {num_prompts * body.num_choices} beams; {MAX_BEAMS_TOGETHER} are the most in one"
            " request",
            "n",
        )


def generation_for(body: GenerationBody, params: SamplingParams) -> Callable[[], Generation]:
    """Makes the generation of a request whose `params` are those."""
    if body.use_beam_search:
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return partial(BeamSearch, params, penalty)
    if body.num_sequences > body.num_choices:
        return partial(BestOf, body.num_choices)
    if body.stream and body.stream_interval is not None and body.stream_interval > 1:
        return partial(SpacedGeneration, body.stream_interval)
    return Generation
