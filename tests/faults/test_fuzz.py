"""Case 68: every parser of foreign bytes returns a value or raises ProtocolError for any bytes, in bounded memory.

The native engine's parsers are in transports/ucx/tests/engine_hostile.hpp.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import forged
import msgspec
import pytest
import torch
from aiocomms_c10d import bringup as c10d_bringup
from aiocomms_c10d import wire as c10d_wire
from aiocomms_ucx import bringup as ucx_bringup
from aiocomms_ucx import meeting as ucx_meeting
from aiocomms_ucx import windows as ucx_windows
from aiocomms_ucx import wire as ucx_wire
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocomms.bootstrap import launchers, notes
from aiocomms.communicator import parcels
from aiocomms.communicator.items import Tensors
from aiocomms.endpoints import credentials, words
from aiocomms.errors import ArgumentError, ProtocolError, RegionError
from aiocomms.lowering import lane_abort
from aiocomms.lowlevel import Reason
from aiocomms.lowlevel.auth import Seal
from aiocomms.ops import codec

pytestmark = pytest.mark.deterministic

MEMORY = 4 * 2**20
"""The bytes of memory that parsing a few hundred bytes may take."""
TURNS = int(os.environ.get("AIOCOMMS_FUZZ", "20000"))
"""The measure of mutations: each sample gets a quarter of them, and each sample of objects a tenth."""


def _c10d_frame(data: bytes) -> object:
    buffer = bytearray(c10d_wire.capacity(3))
    buffer[: len(data)] = data[: len(buffer)]
    frame = c10d_wire.unpack(buffer, torch.frombuffer(buffer, dtype=torch.uint8))
    return c10d_wire.unpack_error(frame)


def _row(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[:2048].ljust(2048)), dtype=torch.uint8)


def _object(data: bytes) -> object:
    header = data[: parcels.HEADER_BYTES].ljust(parcels.HEADER_BYTES, b"\0")
    arrival = parcels.ArrivingObject(header, torch.device("cpu"))
    # The operating system has not given this memory yet: pages exist once something comes.
    assert arrival.body.nbytes <= codec.MAX_OBJECT_BYTES
    if arrival.inline:
        arrival.unpack()
    return None


def _ucx_hello(data: bytes) -> object:
    return repr(ucx_bringup._hello(1, data))


def _address(data: bytes) -> object:
    """Read an address, which is an argument of the program's own: a wrong one raises ArgumentError."""
    try:
        return credentials.read_address(data)
    except ArgumentError as error:
        raise ProtocolError(error.message) from None


def _descriptor(data: bytes) -> object:
    try:
        return credentials.check_descriptor(data, KEY)
    except RegionError as error:
        raise ProtocolError(error.message) from None


class Canary:
    sung = False

    def __reduce__(self) -> Any:
        return (_sing, ())


def _sing() -> None:
    Canary.sung = True


HELLO = ucx_bringup.EngineHello("little", "host", "name", 1, [0, 1], "\0path", b"n" * 32)
C10D_FRAME = c10d_wire.pack(c10d_wire.C10dHeader(c10d_wire.CALL, ident=3), b"all_reduce", (1, 2), torch.zeros(9).byte())
KEY = credentials.new_key()
ADDRESS = credentials.Address(b"e" * 16, "192.0.2.1", 9, {"p2p": "ucx"}, "cpu", math.inf)
DESCRIPTOR = credentials.Descriptor(b"e" * 16, 1, "torch.float32", 2**20, True, False, 2.0**40)
SIGNED, PLAIN = Seal(b"a token", "name", 1), Seal(None, "name", 1)

# Private parsers are called directly: the bytes of a connection are checked before a private parser gets them.
PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "objects": (codec.decode, codec.encode({"a": [1, (2.5, torch.arange(3))], b"b": torch.Size([1]), 3: torch.int8})),
    "object headers": (_object, parcels.Parcel([1, "x"], torch.device("cpu"), pickle=False).header.numpy().tobytes()),
    "tensors' descriptions": (codec.parse_tensor, codec.describe_tensor(torch.zeros(2, 3))),
    "ends of lanes": (
        lambda data: lane_abort._CODEC.decode_padded(data, 1),
        bytes(lane_abort._tell(lane_abort._GivenUp(2**61, "a", "why", 1, [(1, 2**62)]), torch.device("cpu")).tolist()),
    ),
    "signed records": (lambda data: SIGNED.verify("k", 1, data), SIGNED.sign("k", 1, b"value")),
    "plain records": (lambda data: PLAIN.verify("k", 1, data), PLAIN.sign("k", 1, b"value")),
    "frames of c10d": (_c10d_frame, bytes(C10D_FRAME.tolist())),
    "hellos of c10d": (
        lambda data: c10d_bringup.listen_on([data, data], None),
        c10d_bringup.hello(adopt=True, left=9.0),
    ),
    "frames of ucx": (ucx_wire.unpack, ucx_wire.pack(ucx_wire.Abort(0, Reason("PeerDiedError", "why", 1), -1))),
    "notes": (
        lambda data: notes.read(data, 3),
        notes.NOTES.encode(
            notes.Answer(1, "is in barrier", [notes.Waiting(2, 1.5)], notes.Late(0, 3.5, "recv(src=0)", 0.5))
        ),
    ),
    "addresses of endpoints": (_address, ADDRESS.pack()),
    "descriptors of regions": (_descriptor, DESCRIPTOR.pack(KEY)),
    "words of endpoints": (
        lambda data: words.read(data, 1),
        msgspec.msgpack.encode(words.Closing(0, 2**40, "its owner has revoked the region")),
    ),
    "notes of ucx": (ucx_wire.unpack, ucx_wire.pack(ucx_wire.Note(0, b"a note"))),
    "hellos of ucx": (_ucx_hello, ucx_wire.dialect().head + msgspec.msgpack.encode(HELLO)),
    "places of ucx": (
        lambda data: ucx_bringup.PLACES.decode(data, 1),
        msgspec.msgpack.encode(ucx_bringup.EnginePlace(b"address", ("192.0.2.1", 9))),
    ),
    "members of ucx": (
        lambda data: ucx_meeting.MEMBERS.decode(data, 1),
        msgspec.msgpack.encode(ucx_meeting.MemberRecord(0, 5, True)),
    ),
    "parts of windows of ucx": (
        lambda data: ucx_windows._part(1, _row(data)),
        bytes(ucx_windows._record(ucx_windows.WindowPart(3, 0, (4, 5), 4, 2**47, b"key"), 2048).tolist())[:64],
    ),
}


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what hellos of c10d that name several hosts need: an interface, and permission to use no token."""
    monkeypatch.setenv("AIOCOMMS_ALLOW_UNAUTHENTICATED", "1")
    monkeypatch.setenv("AIOCOMMS_IFACE", "lo")


@pytest.mark.parametrize("what", PARSERS)
def test_well_formed_sample_is_parsed(what: str) -> None:
    """Each parser accepts its sample: otherwise the other tests of this file would find nothing."""
    parse, sample = PARSERS[what]
    parse(sample)


def mutations(sample: bytes, turns: int) -> Iterator[bytes]:
    """Yield a sample with bytes changed, cut out, doubled, or replaced by dangerous numbers."""
    rng = random.Random(sample)
    dangerous = [
        b"\xff" * 8,
        b"\x7f" + b"\xff" * 7,
        b"\0" * 8,
        b"\x80" + bytes(7),
        b"\xdd\xff\xff\xff\xff",
        b"\xc9\xff",
    ]
    for _ in range(turns):
        data = bytearray(sample)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(5)
            if kind == 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif kind == 1:
                data[at : at + 1] = bytes([(data[at] if at < len(data) else 0) ^ (1 << rng.randrange(8))])
            elif kind == 2:
                del data[at : at + rng.randint(1, 8)]
            elif kind == 3:
                data[at:at] = data[at : at + rng.randint(1, 16)]
            else:
                some = rng.choice(dangerous)
                data[at : at + len(some)] = some
        yield bytes(data)


@pytest.mark.fault(65, 68)
@pytest.mark.parametrize("what", PARSERS)
def test_mutated_sample_is_parsed_or_raises_protocol_error(what: str) -> None:
    parse, sample = PARSERS[what]
    refused = 0
    tracemalloc.start()
    for data in mutations(sample, TURNS // 10 if what.startswith("objects") else TURNS // 4):
        try:
            parse(data)
        except ProtocolError:
            refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 10
    assert peak < MEMORY


@pytest.mark.fault(68)
@pytest.mark.parametrize("what", PARSERS)
def test_any_bytes_are_parsed_or_raise_protocol_error(what: str) -> None:
    parse, _ = PARSERS[what]

    @given(st.binary(max_size=400))
    @settings(max_examples=200)
    def each(data: bytes) -> None:
        try:
            parse(data)
        except ProtocolError:
            pass

    each()


@pytest.mark.parametrize("what", PARSERS)
def test_embedded_pickle_is_never_loaded(what: str) -> None:
    """No parser loads a pickle, alone or at any place of its sample."""
    parse, sample = PARSERS[what]
    canary = pickle.dumps(Canary())
    for at in range(len(sample)):
        for data in (canary, sample[:at] + canary + sample[at:], sample[:at] + canary):
            try:
                parse(data)
            except ProtocolError:
                pass
    assert not Canary.sung
    pickle.loads(canary)
    assert Canary.sung, "the canary is dead"
    Canary.sung = False


# ------------------------------------------------------------------------------------------- what a launcher has set

NAMES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID",
    "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
values = st.integers(-2, 5).map(str) | st.sampled_from(
    ["host[1-99999999999999]", "a[", "b]", "n[1-3,5],m", "[", "1" * 5000, "²", "0x1"]
) | st.text(st.characters(exclude_characters="\0"), max_size=20)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=8))
@settings(max_examples=500)
def test_any_environment_gives_a_launch_none_or_one_error(environ: dict[str, str]) -> None:
    try:
        launch = launchers.read_environment(environ)
    except ArgumentError:
        return
    assert launch is None or 0 <= launch.rank < launch.size


def test_huge_hostlist_range_allocates_no_memory() -> None:
    tracemalloc.start()
    launchers.read_environment({
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "node[0-99999999999999]",
    })  # fmt: skip
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


# ------------------------------------------------------------------------------------------------------- streams


def test_stream_header_allocates_no_more_than_arrives() -> None:
    """An announced tensor takes memory only when its bytes have come."""
    import psutil

    before = psutil.Process().memory_info().rss
    for elements in (2**30, 2**61, 2**40, 3):
        header = bytes(8) + forged.tensor(forged.code_of(torch.uint8), 1, elements)
        try:
            (got,) = next(Tensors().arriving(header, torch.device("cpu")))
            assert got.numel() == elements
        except ProtocolError:
            assert elements > 2**30
    with pytest.raises(ProtocolError, match="kind 7"):
        next(Tensors().arriving(b"\7" + header[1:], torch.device("cpu")))
    assert psutil.Process().memory_info().rss - before < 2**24
