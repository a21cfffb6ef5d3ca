"""What a soak run consists of: servers of several kinds, one after the other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api.chaos import KINDS, Kind
from tests.helpers.scripted_models import make_scripted_model
from tests.soak.cases import Case, make_cases

Mode = Literal["replace", "exit"]

STEP_DELAY_S = 0.02
WORDS = [
    *("ring", "block", "wave", "rank", "step", "token", "cache"),
    *("queue", "fork", "frame", "epoch", "bundle", "chunk", "shard"),
]

STEP_TIMEOUT_S = {"scripted": 10.0, "demo": 30.0}
"""So soon a worker that hangs is noticed; unless told, it is minutes."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of server under one kind of load."""

    name: str
    model: Literal["scripted", "demo"]
    mode: Mode
    """`--on-engine-death`. Where that is `exit`, the run starts the server again, as a supervisor
    would."""
    share: float
    """Of the minutes of the whole run."""
    num_clients: int
    tolerance: float
    """Of log probabilities: float32 depends on the shape of the batch in its last digits."""

    @property
    def flags(self) -> tuple[str, ...]:
        common = ("--served-model-name", "m", "-dp", "2", "--api-server-count", "2")
        death = () if self.mode == "exit" else ("--on-engine-death", "replace")
        tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        model = ("--dtype", "float32", "--max-model-len", "4096") if self.model == "demo" else ()
        return (*common, *death, *tools, *model)

    @property
    def env(self) -> dict[str, str]:
        return {"RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": f"{STEP_TIMEOUT_S[self.model]:g}"}

    @property
    def limit_s(self) -> float:
        """No request takes so long, however busy the machine."""
        return 300.0 if self.model == "demo" else 120.0

    @property
    def noticed_s(self) -> float:
        """Whatever hangs has been noticed by then: by its silence, or by the age of its step."""
        return max(10.0, STEP_TIMEOUT_S[self.model]) + 10.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return KINDS

    def make_model(self, folder: Path) -> str:
        """What to serve, made below a folder where it has to be made."""
        if self.model == "demo":
            return "demo"
        return str(make_scripted_model(folder, kind="echo", step_delay_s=STEP_DELAY_S))

    def make_cases(self, seed: int) -> list[Case]:
        if self.model == "demo":
            return make_cases(seed, WORDS, length=24, long_length=250)
        return make_cases(seed, WORDS, length=160, long_length=1500)


PARTS = (
    Part("scripted, replace", "scripted", "replace", share=0.5, num_clients=12, tolerance=1e-4),
    Part("demo in float32, replace", "demo", "replace", share=0.3, num_clients=3, tolerance=2e-2),
    Part("scripted, exit", "scripted", "exit", share=0.2, num_clients=12, tolerance=1e-4),
)
