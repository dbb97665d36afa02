"""The job's token: its sources, the records that it signs, and the limits of a job without one."""

from __future__ import annotations

import os
import pickle
import socket

import anyio
import pytest
import torch
from concurrency import together
from processes import PATIENCE
from torch.distributed import HashStore

from aiocomms.bootstrap.records import framed, listed
from aiocomms.bootstrap.rendezvous import StoreRendezvous
from aiocomms.bootstrap.stores import connect_store
from aiocomms.errors import ArgumentError, AuthError, CommTimeoutError, ProtocolError
from aiocomms.lowlevel import auth
from aiocomms.lowlevel.auth import Seal, check_exposed, read_token

pytestmark = pytest.mark.deterministic

TOKEN = "correct horse battery staple"


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    for name in ("AIOCOMMS_TOKEN", "AIOCOMMS_TOKEN_FILE", "AIOCOMMS_ALLOW_UNAUTHENTICATED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    path.chmod(0o600)
    return path


# ------------------------------------------------------------------------------------------------------- the token


def test_token_is_read_from_environment_or_file(file):
    assert read_token({}) is None
    assert read_token({"AIOCOMMS_TOKEN": TOKEN}) == read_token({"AIOCOMMS_TOKEN_FILE": str(file)}) == TOKEN.encode()


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"AIOCOMMS_TOKEN": ""}, "AIOCOMMS_TOKEN gives a token of 0 bytes, wanted 16 to 4096"),
        ({"AIOCOMMS_TOKEN": "short"}, "of 5 bytes"),
        ({"AIOCOMMS_TOKEN": "x" * 5000}, "of 5000 bytes"),
        ({"AIOCOMMS_TOKEN": TOKEN, "AIOCOMMS_TOKEN_FILE": "/x"}, "are both set"),
        ({"AIOCOMMS_TOKEN_FILE": ""}, "cannot be opened"),
        ({"AIOCOMMS_TOKEN_FILE": "/nonesuch"}, "cannot be opened: No such file"),
        ({"AIOCOMMS_TOKEN_FILE": "/dev/null"}, "no regular file"),
        ({"AIOCOMMS_TOKEN_FILE": "/tmp"}, "no regular file"),
    ],
    ids=str,
)
def test_unreadable_token_is_an_error(environ, why):
    """An unreadable token does not count as no token."""
    with pytest.raises(ArgumentError, match=why) as caught:
        read_token(environ)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o700 | 0o001])
def test_token_file_open_to_others_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ArgumentError, match=rf"mode {mode:04o}; others may use it: chmod 600"):
        read_token({"AIOCOMMS_TOKEN_FILE": str(file)})


def test_symlink_to_a_token_file_is_refused(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(ArgumentError, match="it is a symbolic link"):
        read_token({"AIOCOMMS_TOKEN_FILE": str(link)})


def test_fifo_as_token_file_is_refused_without_blocking(tmp_path):
    """The open does not wait for a writer of the pipe."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ArgumentError, match="no regular file"):
        read_token({"AIOCOMMS_TOKEN_FILE": str(tmp_path / "pipe")})


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_token_file_of_another_user_is_refused(file):
    os.chown(file, 65534, -1)
    with pytest.raises(ArgumentError, match="belongs to user 65534, wanted 0"):
        read_token({"AIOCOMMS_TOKEN_FILE": str(file)})


def test_oversized_token_file_is_refused_without_reading_all(file):
    file.write_bytes(b"x" * 10**7)
    with pytest.raises(ArgumentError, match="of 4098 bytes, wanted 16 to 4096"):
        read_token({"AIOCOMMS_TOKEN_FILE": str(file)})


# -------------------------------------------------------------------------------------------------------- the seal


def seal(token=TOKEN, name="world", generation=1):
    return Seal(None if token is None else token.encode(), name, generation)


def test_signature_binds_token_name_generation_key_and_rank():
    record = seal().sign("key", 3, b"value")
    assert seal().verify("key", 3, record) == b"value"
    for other, key, rank in (
        (seal("another token, as long"), "key", 3),
        (seal(name="other"), "key", 3),
        (seal(generation=2), "key", 3),
        (seal().child("key"), "key", 3),
        (seal(), "another", 3),
        (seal(), "key", 2),
    ):
        with pytest.raises(AuthError, match=f"rank {rank}'s record '{key}'.* not signed") as caught:
            other.verify(key, rank, record)
        assert caught.value.peer == rank


def test_changed_or_truncated_record_fails_verification():
    record = seal().sign("key", 0, b"value")
    for at in range(len(record)):
        for bit in (1, 128):
            changed = bytearray(record)
            changed[at] ^= bit
            with pytest.raises(AuthError):
                seal().verify("key", 0, bytes(changed))
    for cut in range(len(record)):
        with pytest.raises(AuthError):
            seal().verify("key", 0, record[:cut])


def test_record_signed_by_only_one_side_raises_auth_error():
    with pytest.raises(AuthError, match="rank 1's record 'key' in the store is not signed: that rank has no token"):
        seal().verify("key", 1, seal(None).sign("key", 1, b"value"))
    with pytest.raises(AuthError, match="rank 1 has a token, and this rank has none"):
        seal(None).verify("key", 1, seal().sign("key", 1, b"value"))
    assert seal(None).verify("key", 1, seal(None).sign("key", 1, b"value")) == b"value"
    with pytest.raises(ProtocolError, match="makes no sense"):
        seal(None).verify("key", 1, b"")


@pytest.mark.fault(36)
def test_oversized_record_is_refused():
    for token in (TOKEN, None):
        longest = b"x" * auth.MAX_RECORD
        assert seal(token).verify("k", 0, seal(token).sign("k", 0, longest)) == longest
        with pytest.raises(ArgumentError, match="wanted at most 65536"):
            seal(token).sign("k", 0, longest + b"x")
        with pytest.raises(ProtocolError, match="has 8388608 bytes"):
            seal(token).verify("k", 0, b"\x01" * 2**23)


def test_signature_separates_adjacent_fields():
    assert auth.mac(b"k", "ab", "c") != auth.mac(b"k", "a", "bc")
    assert auth.mac(b"k", "a", "") != auth.mac(b"k", "a")
    assert seal().secret("a") != seal().secret("b")
    assert seal().secret("a") != seal(generation=2).secret("a")


def test_seal_hides_its_key_in_repr_and_pickle():
    one = seal()
    assert repr(one) == str(one) == "<Seal: signed>"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(one)


# -------------------------------------------------------------------------------------------------- the rendezvous


def meeting(store, rank, token=TOKEN, size=2):
    place = {"name": "world", "device": torch.device("cpu"), "timeout": PATIENCE, "seal": seal(token)}
    return StoreRendezvous(store, rank, size, **place)


def test_ranks_with_the_same_token_exchange_values(run):
    async def main():
        store = HashStore()
        both = [meeting(store, rank) for rank in range(2)]
        values = await together(*(lambda it=it: it.exchange("k", b"v%d" % it.rank) for it in both))
        assert values == [[b"v0", b"v1"]] * 2
        children = [it.child("c", "child", it.rank, 2) for it in both]
        assert len({it.secret("p") for it in children}) == 1
        assert children[0].secret("p") != both[0].secret("p")
        assert await together(*(lambda it=it: it.exchange("k", b"w") for it in children)) == [[b"w", b"w"]] * 2
        assert TOKEN.encode() not in store.get("k")

    run(main)


@pytest.mark.parametrize("record", [b"forged", b"\xff", b"02" * 40])
def test_forged_decision_raises_protocol_error(record):
    store = HashStore()
    store.set("k", record)
    for ask in (lambda it: it.decided("k"), lambda it: it.decide("k", b"mine")):
        with pytest.raises(ProtocolError, match="'k' in the store"):
            ask(meeting(store, 0))


@pytest.mark.fault(36)
@pytest.mark.parametrize("record", [b"", b"forged", b"\x01forged", b"\x02" + b"x" * 40, b"\0" * 2**20], ids=len)
def test_a_forged_record_names_its_rank(record):
    async def main():
        store = HashStore()
        store.append("k", framed(1, record))
        store.add("k/count", 1)
        with pytest.raises(ProtocolError, match="rank 1") as caught:
            await meeting(store, 0).exchange("k", b"mine")
        assert caught.value.peer == 1

    anyio.run(main)


def test_record_of_an_earlier_generation_is_refused(monkeypatch):
    """Its keys differ, but a process that can write to the store can copy it to a later key."""
    monkeypatch.setenv("AIOCOMMS_TOKEN", TOKEN)

    def place(rank):
        where = {"name": "world", "device": torch.device("cpu"), "timeout": PATIENCE}
        return StoreRendezvous(None, rank, 2, seal=Seal(TOKEN.encode(), "world"), **where)

    async def main():
        root = HashStore()
        first, second = [place(0), place(1)], [place(0), place(1)]
        for both in (first, second):
            await together(*(lambda it=it: it.arrive(root) for it in both))
        await together(*(lambda it=it: it.exchange("k", b"v") for it in first))
        (earlier,) = listed(first[1].store.get("k"), 2, "k")[1]
        second[1].store.append("k", framed(1, earlier))
        second[1].store.add("k/count", 1)
        with pytest.raises(AuthError, match="rank 1's record 'k'") as caught:
            await second[0].exchange("k", b"v")
        assert caught.value.peer == 1

    anyio.run(main)


def test_wrong_token_raises_auth_error_on_both_ranks(monkeypatch):
    async def main():
        store = HashStore()

        async def each(it):
            with pytest.raises((AuthError, CommTimeoutError)) as caught:
                await it.exchange("k", b"v")
            return type(caught.value)

        both = [meeting(store, 0), meeting(store, 1, "another token, as long")]
        assert await together(*(lambda it=it: each(it) for it in both)) == [AuthError, AuthError]

    anyio.run(main)


# ------------------------------------------------------------------------------------------------- without a token


def address():
    """Return an address of this host that others may reach; skip the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return probe.getsockname()[0]


def test_exposure_to_other_hosts_needs_a_token(monkeypatch):
    with pytest.raises(ArgumentError, match=r"x, and this job has no token.*AIOCOMMS_TOKEN.*AIOCOMMS_ALLOW_UNAUTHENTI"):
        check_exposed("x")
    for name, value in (("AIOCOMMS_ALLOW_UNAUTHENTICATED", "1"), ("AIOCOMMS_TOKEN", TOKEN)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            check_exposed("x")
    monkeypatch.setenv("AIOCOMMS_ALLOW_UNAUTHENTICATED", "0")
    with pytest.raises(ArgumentError):
        check_exposed("x")
    monkeypatch.setenv("AIOCOMMS_TOKEN_FILE", "/nonesuch")
    with pytest.raises(ArgumentError, match="cannot be opened"):
        check_exposed("x")


@pytest.mark.real
def test_store_is_served_to_other_hosts_only_with_a_token(monkeypatch):
    where = address()
    with socket.create_server((where, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ArgumentError, match=rf"would be open to other hosts at {where}, and this job has no token"):
        connect_store(where, port, 0, 2, agent_store=False, timeout=5)
    with socket.create_server((where, port)):
        pass  # No listener is left there.
    monkeypatch.setenv("AIOCOMMS_TOKEN", TOKEN)
    store = connect_store(where, port, 0, 2, agent_store=False, timeout=5)
    assert store.host == where
