"""What output must look like: one formal description, as it crosses the wire.

The API server makes it of whatever the client has sent (`response_format`, `structured_outputs`,
tools that must be called); the engine core compiles it and lets only such tokens be sampled.
"""

from typing import Literal

import msgspec

from engine.errors import InvalidRequestError
from engine.limits import MAX_SPEC_BYTES

PARAM = "structured_outputs"
"""The field that errors name. An API server knows better what its client has written."""

Kind = Literal["json_schema", "regex", "choice", "lark"]


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A language that the output has to be a text of, whole.

    Raises:
        InvalidRequestError: the description is empty or too long.
    """

    kind: Kind
    """`json_schema`: JSON that is valid under a schema; `regex`: Rust's syntax, anchored at both
    ends; `choice`: one of some texts; `lark`: a grammar in llguidance's dialect of Lark, in which
    all the others can be embedded."""

    spec: str
    """The schema, as JSON; the expression; a JSON array of texts; the grammar."""

    def __post_init__(self) -> None:
        if not self.spec.strip():
            raise InvalidRequestError(f"{self.kind}: the description is empty", PARAM)
        if len(self.spec.encode()) > MAX_SPEC_BYTES:
            raise InvalidRequestError(
                f"{self.kind}: the description is over {MAX_SPEC_BYTES} bytes long", PARAM
            )
