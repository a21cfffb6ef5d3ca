"""The bytes of wire 1, frozen. A change here breaks servers whose ranks start from two versions:
new fields go last, with defaults, and the old bytes must still decode."""

import msgspec
import numpy as np
import pytest

from engine import wire
from engine.codec import Decoder, Encoder, pack_tokens
from engine.errors import WireError
from engine.sampling_params import RepetitionDetection, SamplingParams, ThinkingBudget
from engine.structured_output import StructuredOutput
from engine.wire import (
    CoordinatorType,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineLoad,
    EngineReady,
    EventKind,
    Fence,
    Fingerprint,
    FinishReason,
    FirstRequest,
    Heartbeat,
    LoadReport,
    Logprobs,
    LoRARequest,
    Message,
    MultiModalFeature,
    OutputDetails,
    OutputType,
    Phase,
    PoolingParams,
    PrefillStats,
    RequestType,
    SchedulerStats,
    StartWave,
    UtilityCall,
    UtilityOutput,
)
from tests.helpers.messages import same


def u32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype="<u4")


LOGPROBS = Logprobs(u32(7, 9).reshape(1, 2), np.asarray([[-0.5, -1.5]], dtype="<f4"), u32(1))
STATS = SchedulerStats(1, 2, 0.25, 3, 4, 5, 6, 7, 8, 9, [2, 0, 1], 10)
OUTPUT = EngineCoreOutput(
    "r",
    pack_tokens([7]),
    FinishReason.STOP,
    2,
    OutputDetails(
        LOGPROBS,
        None,
        None,
        [EngineCoreEvent(EventKind.QUEUED, 1.5), EngineCoreEvent(EventKind.SCHEDULED, 2.5)],
        PrefillStats(3, 2),
        "cause",
    ),
)

EXAMPLES: list[tuple[Message | SamplingParams | RepetitionDetection | ThinkingBudget, str]] = [
    (
        MultiModalFeature("image", "h", 1, 2, u32(5)),
        "95a5696d616765a168010293a33c75349101c40405000000",
    ),
    (LoRARequest("l", 1, "p"), "93a16c01a170"),
    (PoolingParams("embed", 64, False), "93a5656d62656440c2"),
    (RepetitionDetection(8, 2, 3), "93080203"),
    (ThinkingBudget(3, (5, 6), 7, True), "940392050607c3"),
    (
        SamplingParams(),
        "dc0016cb3ff0000000000000cb3ff000000000000000cb0000000000000000c0cb3ff00000000000"
        "00cb0000000000000000cb0000000000000000c0c0009090c2c0c0c0c0c09090c0",
    ),
    (
        SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=5,
            min_p=0.125,
            seed=6,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={3: 1.0},
            max_tokens=7,
            min_tokens=1,
            stop_token_ids=(4,),
            eos_token_ids=(2,),
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=0,
            repetition_detection=RepetitionDetection(8, 2, 3),
            allowed_token_ids=(1, 2),
            structured_output=StructuredOutput("regex", "a+"),
            bad_words_token_ids=((5, 6), (7,)),
            logprob_token_ids=(9,),
            thinking_budget=ThinkingBudget(3, (5, 6), 7, True),
        ),
        "dc0016cb3fe0000000000000cb3fe800000000000005cb3fc000000000000006cb3ff80000000000"
        "00cb3fe0000000000000cbbfe00000000000008103cb3ff0000000000000070191049102c3010093"
        "08020392010292a57265676578a2612b9292050691079109940392050607c3",
    ),
    (
        EngineCoreRequest("r", u32(1, 2), None, SamplingParams(), None, 1.5, None, None, None),
        "9fa17293a33c75349102c4080100000002000000c0dc0016cb3ff0000000000000cb3ff000000000"
        "000000cb0000000000000000c0cb3ff0000000000000cb0000000000000000cb0000000000000000"
        "c0c0009090c2c0c0c0c0c09090c0c0cb3ff8000000000000c0c0c0c0000000c0c0",
    ),
    (
        EngineCoreRequest(
            "r",
            u32(1, 2),
            [MultiModalFeature("image", "h", 1, 2)],
            SamplingParams(),
            PoolingParams("embed"),
            1.5,
            LoRARequest("l", 1, "p"),
            "salt",
            3,
            np.ones((1, 2), dtype="<f2"),
            4,
            5,
            -6,
            {"traceparent": "t"},
            u32(8),
        ),
        "9fa17293a33c75349102c40801000000020000009195a5696d616765a1680102c0dc0016cb3ff000"
        "0000000000cb3ff000000000000000cb0000000000000000c0cb3ff0000000000000cb0000000000"
        "000000cb0000000000000000c0c0009090c2c0c0c0c0c09090c093a5656d626564c0c3cb3ff8000000000000"
        "93a16c01a170a473616c740393a33c6632920102c404003c003c0405fa81ab747261636570617265"
        "6e74a17493a33c75349101c40408000000",
    ),
    (StartWave(2, 1), "920201"),
    (Fence(3), "9103"),
    (
        UtilityCall(0, 9, "profile", msgspec.Raw(msgspec.msgpack.encode((True, "d")))),
        "940009a770726f66696c6592c3a164",
    ),
    (
        Fingerprint(1, "c", {"msgspec": "0.23.0"}, "m", "t"),
        "9501a16381a76d736773706563a6302e32332e30a16da174",
    ),
    (
        EngineReady(
            0,
            1,
            4096,
            64,
            16,
            1024,
            "float32",
            1000,
            256,
            Fingerprint(1, "c", {}, "m", "t"),
            2.5,
            1.5,
            0.5,
            False,
            0.25,
            0.75,
        ),
        "dc00100001cd10004010cd0400a7666c6f61743332cd03e8cd01009501a16380a16da174"
        "cb4004000000000000cb3ff8000000000000cb3fe0000000000000c2"
        "cb3fd0000000000000cb3fe8000000000000",
    ),
    (
        LOGPROBS,
        "9393a33c7534920102c408070000000900000093a33c6634920102c408000000bf0000c0bf93a33c"
        "75349101c40401000000",
    ),
    (EngineCoreEvent(EventKind.PREEMPTED, 1.5), "9203cb3ff8000000000000"),
    (PrefillStats(3, 2), "920302"),
    (
        OutputDetails(error="cause", error_code="c", error_param="p"),
        "98c0c0c0c0c0a56361757365a163a170",
    ),
    (EngineCoreOutput("r", pack_tokens([7])), "95a172c40407000000c0c0c0"),
    (
        OUTPUT,
        "95a172c404070000000002989393a33c7534920102c408070000000900000093a33c6634920102c4"
        "08000000bf0000c0bf93a33c75349101c40401000000c0c0929201cb3ff80000000000009202cb40"
        "04000000000000920302a56361757365c0c0",
    ),
    (STATS, "9c0102cb3fd000000000000003040506070809930200010a"),
    (UtilityOutput(9, None, msgspec.Raw(b"\xc3")), "9309c0c3"),
    (UtilityOutput(9, "no"), "9309a26e6fc0"),
    (
        EngineCoreOutputs(0, 1, [OUTPUT], STATS, 2.5, UtilityOutput(9), ["r"], 1, 2),
        "9900019195a172c404070000000002989393a33c7534920102c408070000000900000093a33c6634"
        "920102c408000000bf0000c0bf93a33c75349101c40401000000c0c0929201cb3ff8000000000000"
        "9202cb4004000000000000920302a56361757365c0c09c0102cb3fd0000000000000030405060708"
        "09930200010acb40040000000000009309c0c091a1720102",
    ),
    (EngineCoreOutputs(0, 1), "99000190c0cb0000000000000000c0c0c0c0"),
    (Heartbeat(0, 1, 2, 3, Phase.EXECUTE), "950001020303"),
    (
        EngineDead("ENGINE_CORE_DEAD", 0, 1, "cause"),
        "95b0454e47494e455f434f52455f444541440001a56361757365c3",
    ),
    (EngineLoad(2, 1, 3, 4, 0.5, [5, 2]), "9602010304cb3fe0000000000000920502"),
    (
        LoadReport([EngineLoad(0, 1, 0, 0, 0.0)], 7, True),
        "93919600010000cb00000000000000009007c3",
    ),
    (LoadReport([]), "939000c2"),
    (FirstRequest(1, 7), "920107"),
]

TYPE_BYTES = {
    RequestType.ADD: "00",
    RequestType.ABORT: "01",
    RequestType.START_DP_WAVE: "02",
    RequestType.UTILITY: "03",
    RequestType.EXECUTOR_FAILED: "04",
    RequestType.WAKEUP: "05",
    RequestType.FENCE: "06",
    OutputType.OUTPUTS: "00",
    OutputType.HEARTBEAT: "01",
    OutputType.DEAD: "02",
    CoordinatorType.FIRST_REQUEST: "03",
    CoordinatorType.LOADS: "04",
}


@pytest.mark.parametrize(("message", "golden"), EXAMPLES, ids=lambda v: type(v).__name__)
def test_bytes_of_each_message_are_frozen(message: object, golden: str) -> None:
    """Each message encodes to exactly these bytes, and they decode to the message."""
    (body,) = Encoder().encode(message)

    assert bytes(body).hex() == golden
    assert same(Decoder(type(message)).decode([bytes.fromhex(golden)]), message)


def test_every_message_of_the_wire_has_golden_bytes() -> None:
    """A message that is added to the wire must be frozen here as well."""
    frozen = {type(message) for message, _ in EXAMPLES}
    of_the_wire = {
        value
        for value in vars(wire).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }

    assert of_the_wire - frozen == set()


def test_type_bytes_and_enumerations_are_frozen() -> None:
    """Type bytes and the integers of the enumerations are protocol."""
    kinds = (*RequestType, *OutputType, *CoordinatorType)
    assert {kind: kind.value.hex() for kind in kinds} == TYPE_BYTES
    assert [reason.word for reason in FinishReason] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]
    assert [int(reason) for reason in FinishReason] == [0, 1, 2, 3, 4]
    assert [int(kind) for kind in EventKind] == [1, 2, 3]
    assert {phase.name: int(phase) for phase in Phase} == {
        "LOADING": 0,
        "IDLE": 1,
        "SCHEDULE": 2,
        "EXECUTE": 3,
        "UPDATE": 4,
        "UTILITY": 5,
    }


def test_a_large_array_travels_in_a_frame_of_its_own() -> None:
    """Body and array frame of a request with 1024 tokens: the first that is not inline."""
    tokens = u32(*range(1024))
    request = EngineCoreRequest("r", tokens, None, None, None, 0.5, None, None, None)

    body, frame = Encoder().encode(request)

    assert bytes(body).hex().startswith("9fa17293a33c753491cd040001c0")  # [1024], frame 1
    assert bytes(frame) == b"".join(i.to_bytes(4, "little") for i in range(1024))


def test_identity_is_rank_and_epoch_in_little_endian() -> None:
    """Six bytes: u16 rank, u32 epoch."""
    assert wire.pack_identity(0x0102, 0x03040506) == bytes.fromhex("020106050403")
    assert wire.unpack_identity(bytes.fromhex("020106050403")) == (0x0102, 0x03040506)
    with pytest.raises(WireError, match="6 bytes"):
        wire.unpack_identity(b"\0" * 5)


@pytest.mark.parametrize(
    ("kind", "required"),
    [
        (EngineCoreRequest, 9),
        (EngineCoreOutput, 2),
        (EngineCoreOutputs, 2),
        (SchedulerStats, 3),
        (EngineLoad, 5),
        (LoadReport, 1),
        (SamplingParams, 0),
    ],
)
def test_shorter_array_of_an_older_peer_decodes_to_the_defaults(
    kind: type[Message], required: int
) -> None:
    """Only the fields without defaults must come; an older peer sends no others."""
    full = next(m for m, _ in EXAMPLES if type(m) is kind)
    values = msgspec.msgpack.decode(Encoder().encode(full)[0])[:required]

    old: Message = Decoder(kind).decode([msgspec.msgpack.encode(values)])

    defaults = [f.default for f in msgspec.structs.fields(kind)][required:]
    for name, default in zip(kind.__struct_fields__[required:], defaults, strict=True):
        if default is not msgspec.NODEFAULT:
            assert same(getattr(old, name), default)
    with pytest.raises(WireError):
        Decoder(kind).decode([msgspec.msgpack.encode(values[:-1] or 0)])


def test_longer_array_of_a_newer_peer_decodes() -> None:
    """Fields that this version does not know are skipped."""
    body = msgspec.msgpack.encode([0, 1, 2, 3, Phase.IDLE, "new", [1, {"a": 2}]])

    assert Decoder(Heartbeat).decode([body]) == Heartbeat(0, 1, 2, 3, Phase.IDLE)
