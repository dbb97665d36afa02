"""Tensors and objects as bytes: round trips, limits, and bytes from strangers."""

from __future__ import annotations

import pickle
import random
import tracemalloc
import warnings

import forged
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocomms.cuda import crossing
from aiocomms.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiocomms.ops import codec
from aiocomms.ops.checks import DTYPES

pytestmark = pytest.mark.deterministic

DEVICE = torch.device("cpu")
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.binary(max_size=8)
leaves = scalars | st.sampled_from(sorted(DTYPES, key=str)) | st.just(torch.device("cpu")) | st.just(torch.Size([2, 0]))
objects = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def same(a, b):
    """Return whether two objects are equal, and of the same types at each level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@given(objects)
@settings(max_examples=300)
def test_codec_round_trip_preserves_objects(obj):
    assert same(codec.decode(codec.encode(obj)), obj)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4), (1,) * codec.MAX_DIMS], ids=str)
def test_codec_round_trip_preserves_tensors_bit_for_bit(dtype, shape):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (torch.Size(shape).numel() * dtype.itemsize,))
    tensor = raw.to(torch.uint8).view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    back = codec.decode(codec.encode({"t": [tensor, (tensor,)]}))
    for got in (back["t"][0], back["t"][1][0]):
        assert got.dtype == dtype
        assert got.shape == tensor.shape
        assert got.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_codec_decodes_views_as_contiguous_tensors():
    tensor = torch.arange(12.0).view(3, 4).T
    assert codec.decode(codec.encode(tensor)).equal(tensor)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert codec.decode(codec.encode(conjugate)).equal(conjugate.resolve_conj())
    weight = torch.nn.Parameter(torch.ones(2))
    back = codec.decode(codec.encode(weight))
    assert back.equal(weight)
    assert not back.requires_grad


class Canary:
    ran = False

    def __reduce__(self):
        return (_sing, ())


def _sing():
    Canary.ran = True


def nested():
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    "obj",
    [
        {1, 2},
        object(),
        Canary(),
        range(3),
        1j,
        bytearray(b"x"),
        {"deep": [(object(),)]},
        {(1, 2): 3},
        torch.empty(3, device="meta"),
        torch.eye(2).to_sparse(),
        nested(),
        torch.ones(2).as_subclass(type("Shown", (torch.Tensor,), {})),
        type("Int", (int,), {})(3),
        type("Dict", (dict,), {})(),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_encode_of_an_unsupported_type_names_it(obj):
    with pytest.raises(ArgumentTypeError, match="obj holds"):
        codec.encode(obj)


@pytest.mark.parametrize("left", [0, 8])
def test_encode_of_a_tensor_without_memory_is_refused(left):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(left)
    with pytest.raises(ArgumentError, match="no memory"):
        codec.encode([tensor])


@pytest.mark.fault(67, transport="local")
def test_encode_beyond_a_limit_is_refused():
    deep: list[object] = []
    for _ in range(codec.MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ArgumentError, match="nested"):
        codec.encode(deep)
    with pytest.raises(ArgumentError, match="64 bits"):
        codec.encode([2**70])
    for text in ("\ud800", {"\ud800": 1}):
        with pytest.raises(ArgumentError, match="no Unicode text"):
            codec.encode(text)
    with pytest.raises(ArgumentError, match="at most"):
        codec.encode(b"\0" * (codec.MAX_OBJECT_BYTES + 1))
    with pytest.raises(ArgumentError, match="dimensions"):
        codec.encode(torch.zeros((1,) * (codec.MAX_DIMS + 1)))


def test_decode_loads_a_pickle_only_when_asked():
    assert codec.decode(codec.encode({1, 2}, pickle=True), pickle=True) == {1, 2}
    with pytest.raises(ProtocolError):
        codec.decode(pickle.dumps(Canary()))
    assert not Canary.ran


BIG = torch.arange(20_000_000, dtype=torch.float32)
"""A tensor of 80 MB, above the size limit of an object."""


@pytest.mark.fault(129)
@pytest.mark.parametrize(
    "value",
    [
        {"x": BIG[5:6]},
        [BIG.view(-1, 1000)[i] for i in range(20)],
        torch.nn.Parameter(BIG[:2]),
        torch.nn.Buffer(BIG[:2]),
        BIG[:6].view(2, 3).t(),
        BIG[:4].detach().requires_grad_(),
        BIG[:6:2],
        torch.view_as_complex(BIG[:4].view(2, 2)).conj(),
        BIG[7],
        BIG[:0],
        BIG[:1].expand(3),
        torch.nn.ParameterList([BIG[:2]]).state_dict(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickled_view_carries_only_its_own_elements(value):
    data = codec.encode(value, pickle=True)
    assert len(data) < 100_000
    found = codec.decode(data, pickle=True)
    torch.testing.assert_close(found, value)
    for there, here in zip(tensors_of(found), tensors_of(value), strict=True):
        assert type(there) is type(here)
        assert there.requires_grad == here.requires_grad
        assert there.untyped_storage().nbytes() <= max(here.nbytes, 4)
        assert vars(there) == vars(here)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors_of(item)]


@pytest.mark.fault(129)
@pytest.mark.parametrize(
    "value", [BIG, [BIG[1:]], torch.nn.Parameter(BIG), BIG.untyped_storage(), [BIG[: 2**22 + i] for i in range(5)]]
)
def test_oversized_value_is_refused_before_it_is_pickled(value, monkeypatch):
    """A value above the size limit is refused before more than the limit is pickled."""
    saved, save = [], torch.save

    def counted(obj, *args, **kwargs):
        saved.append(getattr(obj, "_untyped_storage", obj).nbytes())
        save(obj, *args, **kwargs)

    monkeypatch.setattr(torch, "save", counted)
    with pytest.raises(ArgumentError, match="obj takes more than 67108864 bytes pickled"):
        codec.encode(value, pickle=True)
    assert sum(saved) <= codec.MAX_OBJECT_BYTES


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_decode_of_any_bytes_returns_or_raises_protocol_error(data):
    try:
        codec.decode(data)
    except ProtocolError:
        pass


@pytest.mark.fault(68, transport="local")
def test_decode_of_mutated_bytes_returns_or_raises_protocol_error():
    rng = random.Random(7)
    sample = codec.encode(
        {
            "tensor": torch.arange(4),
            "tuple": (1, (2.5, None)),
            "size": torch.Size([3, 4]),
            "list": ["a", b"b", torch.int8],
        }
    )
    for _ in range(20_000):
        data = bytearray(sample)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            codec.decode(bytes(data[: rng.choice((len(data), rng.randrange(len(data))))]))
        except ProtocolError:
            pass


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xff" * codec.TENSOR_BYTES,
        forged.tensor(0, 15),
        forged.tensor(200, 1, 1),
        forged.tensor(0, 1, -1),
        forged.tensor(0, 2, 2**40, 2**40),
        forged.tensor(0, 1, 2**62),
        forged.tensor(0, 0, 5),
    ],
    ids=["empty", "ones", "dims", "dtype", "negative", "overflow", "huge", "beyond"],
)
def test_malformed_tensor_description_is_refused(description):
    with pytest.raises(ProtocolError):
        codec.parse_tensor(description)


@pytest.mark.fault(65)
def test_length_from_the_wire_allocates_no_memory():
    bomb = msgspec.msgpack.encode(msgspec.msgpack.Ext(2, forged.tensor(0, 1, 2**40)))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="asks for"):
        codec.decode(bomb)
    with pytest.raises(ProtocolError):
        codec.decode(b"\xdd\xff\xff\xff\xff")  # a list of 4 billion items
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.fault(99)
def test_encode_copies_a_large_tensor_at_most_twice():
    """The tensor is copied once behind its description and once into the message, which is sent without a copy."""
    tensor = torch.ones(2**22)
    tracemalloc.start()
    data = codec.encode({"tensor": tensor})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.6 * tensor.nbytes  # The buffer of a message grows by half of its size.
    sent = crossing.to_tensor(data, torch.device("cpu"))
    assert sent.data_ptr() == torch.frombuffer(data, dtype=torch.uint8).data_ptr()


@pytest.mark.fault(67, transport="local")
def test_decode_of_deeply_nested_bytes_is_refused():
    nested = b"\xc0"
    for _ in range(codec.MAX_DEPTH + 50):
        nested = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\x91" + nested))
    with pytest.raises(ProtocolError):
        codec.decode(nested)
    with pytest.raises(ProtocolError):
        codec.decode(b"\x91" * 100_000 + b"\xc0")
