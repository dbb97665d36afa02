# ruff: noqa: ASYNC240 - the ranks of these tests may wait for a file
"""Hostile peers: the cases 22 and 64 to 70 of the catalogue, between real processes.

The tests of each listener and each parser alone are in test_auth.py, test_ucx_auth.py, test_fuzz.py and, for the
native engine, transports/ucx/tests/engine_hostile.hpp.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forged
import psutil
import pytest
import torch
from aiocomms_c10d import wire as c10d_wire
from aiocomms_ucx import bringup as ucx_bringup
from aiocomms_ucx import windows as ucx_windows
from hosts import Enter, address, hosts
from inside import transport_of
from processes import HANGS, LARGE, Rank, Run, empty, exchange, free_port, held, in_turn, let_go, listening, numbers
from simulated import NET
from torch.distributed import PrefixStore

import aiocomms
from aiocomms import ops
from aiocomms.bootstrap.generations import Arrival
from aiocomms.bootstrap.records import framed
from aiocomms.communicator.communicator import Communicator
from aiocomms.errors import ArgumentError, AuthError, CommAbortedError, CommError, CommTimeoutError, ProtocolError
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import Seal
from aiocomms.lowlevel.threads import run_in_thread
from aiocomms.ops import codec
from aiocomms.testing import local_world

pytestmark = pytest.mark.real

TOKEN = "a token of these tests, of some length"
NOBODY = 65534

on_c10d = pytest.mark.parametrize("transport", ["c10d"])
AND_SIMULATED = pytest.mark.parametrize("transport", [NET, "c10d", "ucx"])
on_ucx = pytest.mark.parametrize("transport", ["ucx"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture(params=["c10d", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def names() -> Iterator[list[str]]:
    """Yield the names of two hosts."""
    with hosts(2) as made:
        yield made


# ------------------------------------------------------------------------- 22 and 64: strangers at every listener

HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2
PIECES = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    HELLO,
    b"\xff" * 64,
    bytes(64),
    b"\x80\x04\x95" + bytes(50),
    b"aioC" + b"\xff" * 60,
]


def strangers(where: list[tuple[str, int]], stop: threading.Event, each: int) -> int:
    """Connect to each address so often, with garbage, nothing, or half a message; some connections stay open."""
    rng = random.Random(1)
    met = 0
    with contextlib.ExitStack() as stack:
        for number in range(each):
            for host in where:
                if stop.is_set():
                    return met
                try:
                    it = socket.create_connection(host, timeout=5 if met else 0.5)
                except TimeoutError:
                    where = [other for other in where if other != host]  # This listener accepts nothing.
                    continue
                except OSError:
                    continue
                met += 1
                with contextlib.suppress(OSError):
                    it.sendall(PIECES[number % len(PIECES)] if number % 9 else rng.randbytes(100))
                if number % 20 == 0:
                    stack.enter_context(it)
                else:
                    it.close()
    return met


def own_listeners() -> list[tuple[str, int]]:
    """Return the TCP addresses over IPv4 at which this process listens."""
    found = []
    for text in listening()[0]:
        host, _, port = text.partition(":")
        assert len(host) == 8, f"it listens at {text}"
        found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


async def stand(place: Rank, port: int, host: str, each: int) -> int:
    """Form a communicator by a launcher's variables, and run ops while strangers connect with every listener."""
    os.environ |= {
        "RANK": f"{place.rank}",
        "WORLD_SIZE": f"{place.size}",
        "MASTER_ADDR": host,
        "MASTER_PORT": f"{port}",
    }
    async with aiocomms.new_comm(place.transport) as comm:
        await exchange(comm, LARGE)
        where = own_listeners()
        assert not listening()[1], "a unix socket still listens"
        assert not any(at in ("0.0.0.0", "::") for at, _ in where), where
        before, resident = held(), psutil.Process().memory_info().rss
        stop, met = threading.Event(), [0]
        knocking = threading.Thread(target=lambda: met.append(strangers(where, stop, each)))
        knocking.start()
        try:
            while any(await comm.all_gather_object(knocking.is_alive())):
                await comm.all_reduce(torch.ones(LARGE))
        finally:
            stop.set()
            knocking.join()
        await exchange(comm, LARGE)
        grown = psutil.Process().memory_info().rss - resident
        assert grown < 32 * 2**20, f"{grown} bytes more"
        await let_go(before)
        return met[-1]


@pytest.mark.fault(22, 64)
def test_foreign_connections_to_every_listener_are_harmless(ranks: Run, transport: str) -> None:
    """An open communicator on one host has no listener of the store's or ucx's, and gloo's accepts nothing."""
    assert ranks(2, stand, free_port(), "127.0.0.1", 300) == [0, 0]


@pytest.mark.fault(22)
def test_foreign_connections_to_listeners_between_hosts_are_harmless(
    ranks: Run, transport: str, names: list[str]
) -> None:
    """Only UCX's listeners accept connections, several on each rank; the store's is closed by then."""
    met = ranks(2, stand, 29533, address(0), 200, before=Enter(names, "01"))
    assert [it >= 200 for it in met] == [transport == "ucx"] * 2, met


async def come_late(place: Rank) -> None:
    """Fill the queue of rank 0's listener with silent connections and garbage before rank 1 introduces itself."""
    if place.rank == 1:
        introduce = ucx_bringup._introduction  # A rank calls this last before it speaks to the others.

        def wait() -> ucx_bringup.EngineHello:
            place.told("full 0")
            return introduce()

        ucx_bringup._introduction = wait
        async with place.open() as comm:
            await exchange(comm, LARGE)
        return
    forming = asyncio.create_task(opened(place))
    while not (paths := [path for path in listening()[1] if path.startswith("@aiocomms-")]):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    with contextlib.ExitStack() as stack:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                it = stack.enter_context(socket.socket(socket.AF_UNIX))
                it.setblocking(False)
                it.connect("\0" + paths[0][1:])
                it.send(PIECES[count % len(PIECES)])
                count += 1
        assert count > 100, count
        place.tell("full 0")
        comm = await forming
        await exchange(comm, LARGE)
    await comm.aclose()


async def opened(place: Rank) -> Any:
    return await place.open()


@pytest.mark.fault(22, 64)
@on_ucx  # gloo's listener is known to nobody before it is full of ranks
def test_foreign_connections_before_the_ranks_are_harmless(ranks: Run, transport: str) -> None:
    ranks(2, come_late, before=in_job)


# --------------------------------------------------------------------------------------------------- 64: the token


def in_job(rank: int) -> None:
    os.environ["AIOCOMMS_TOKEN"] = TOKEN


def with_another_token(rank: int) -> None:
    os.environ["AIOCOMMS_TOKEN"] = TOKEN if rank == 0 else "a token of another job altogether"


def with_none(rank: int) -> None:
    if rank == 0:
        os.environ["AIOCOMMS_TOKEN"] = TOKEN


async def work(place: Rank) -> str:
    async with place.open() as comm:
        await exchange(comm, LARGE)
        child = await comm.split([1, 0])
        assert child is not None
        await exchange(child, 3)
        await child.aclose()
        # This is all that is kept; the file is gone when all ranks have released the store.
        kept = repr(comm) + repr(comm.__dict__) + repr(comm._rendezvous.__dict__)
        return kept + (place.folder / "store").read_bytes().decode(errors="replace")


def test_job_with_a_token_works_and_shows_it_nowhere(ranks: Run, transport: str) -> None:
    for said in ranks(2, work, before=in_job):
        assert TOKEN not in said


async def refused(place: Rank) -> tuple[str, int | None]:
    before = held()
    with pytest.raises(AuthError) as caught:
        await place.open()
    await let_go(before)
    return caught.value.message, caught.value.peer


@pytest.mark.fault(64)
@pytest.mark.parametrize("before", [with_another_token, with_none])
def test_rank_of_another_job_is_refused_by_both(ranks: Run, transport: str, before: Callable[[int], None]) -> None:
    """Each rank's error names the rank whose record it refuses, and no thread or descriptor is left."""
    for rank, (message, peer) in enumerate(ranks(2, refused, before=before)):
        assert peer == 1 - rank, message
        assert f"rank {peer}" in message, message


async def impersonated(place: Rank) -> str:
    """Arrive as rank 1, and let a stranger write a record into the store in its name, as if copied from another job."""
    store = place.store()
    if place.rank == 0:
        with pytest.raises(ProtocolError) as caught:
            await place.open()
        return str(caught.value.peer)
    key = place.transport
    here = PrefixStore("aiocomms/world", store)
    arrival = Arrival(here, 1, 2, Seal(TOKEN.encode(), "world"))
    meeting = await run_in_thread(lambda: arrival.meet(clock.event()))
    record = b"\x02" + bytes(32) + b"\x96whatever"
    here.append(f"{meeting}/{key}", framed(1, record))
    here.add(f"{meeting}/{key}/count", 1)
    return ""


async def forged_arrival(place: Rank, what: str) -> str:
    """Arrive in rank 1's place as a stranger without the token."""
    if place.rank == 0:
        with pytest.raises(AuthError if what == "an arrival" else CommTimeoutError) as caught:
            await place.open(timeout=HANGS if what == "an arrival" else 3)
        return caught.value.message
    here, given_up = PrefixStore("aiocomms/world", place.store()), clock.event()
    if what == "an arrival":
        arrival = Arrival(here, 1, 2, Seal(None, "world"))
        with pytest.raises(AuthError):
            await run_in_thread(lambda: arrival.meet(given_up))
    else:
        here.set("came/1", {"a counter": "1", "a name": "0" * 16, "a long name": "x" * 2**20}[what])
    return ""


@AND_SIMULATED
@pytest.mark.fault(94)
@pytest.mark.parametrize("what", ["a counter", "a name", "a long name", "an arrival"])
def test_forged_arrival_is_refused_or_ignored(ranks: Run, transport: str, what: str) -> None:
    """An unsigned arrival that answers this rank is an error at once; a name that anybody may write is ignored."""
    wanted = r"rank 1's record 'here/2/\w+' in the store is not signed" if what == "an arrival" else "had not joined: 1"
    assert re.search(wanted, ranks(2, forged_arrival, what, before=in_job)[0])


@AND_SIMULATED
@pytest.mark.fault(36)
def test_forged_store_entry_raises_protocol_error_with_its_rank(ranks: Run, transport: str) -> None:
    assert ranks(2, impersonated, before=in_job)[0] == "1"


async def tampered(place: Rank) -> str:
    """Let rank 1 join with the right hello, while a stranger overwrites what gloo reads of it."""
    from aiocomms_c10d import auth

    if place.rank == 1:
        write = auth.SignedStore.set
        auth.SignedStore.set = lambda self, key, value: write(  # type: ignore[method-assign]
            self if "1" not in key else auth.SignedStore(self._store, b"another key"), key, value
        )
    with pytest.raises(CommError) as caught:
        await place.open()
    return f"{type(caught.value).__name__}: {caught.value.message}"


@pytest.mark.fault(36)
@on_c10d  # UCX reads nothing there: its addresses come in signed records
def test_tampered_gloo_address_is_refused(ranks: Run, transport: str) -> None:
    assert "not signed with this job's token" in ranks(2, tampered, before=in_job)[0]


# ------------------------------------------------------------------------------------- 65: headers that make no sense


def c10d_bombs() -> list[bytes]:
    def frame(**more: Any) -> bytes:
        header = c10d_wire.C10dHeader(**{"kind": c10d_wire.EAGER, **more})
        fields = (b"aioC", c10d_wire.VERSION, *header[:4], header.text, header.sizes, header.ident, header.nbytes)
        return c10d_wire._HEADER.pack(*fields)  # `pack` writes no lengths that are wrong

    return [
        frame(nbytes=2**63 - 1),
        frame(nbytes=-1),
        frame(nbytes=c10d_wire.INLINE + 10**6),
        frame(kind=255),
        frame(dtype=255),
        frame(text=65535),
        frame(sizes=65535),
        frame(kind=c10d_wire.CALL, ident=2**62),
        frame(kind=c10d_wire.CALL, ident=-1),
        frame(kind=c10d_wire.CTS, ident=99),
        frame(kind=c10d_wire.DATA, ident=99),
        frame(kind=c10d_wire.DONE, ident=99),
        b"GET / HTTP/1.1\r\n\r\n".ljust(32, b"\0"),
    ]


async def bombed(place: Rank) -> None:
    """Open a communicator for each bomb, which rank 1 sends; another communicator goes on."""
    async with place.open("healthy") as healthy:
        bombs = c10d_bombs()
        for number, bomb in enumerate([bombs[-1], *bombs]):  # The first turn loads what stays in memory.
            comm = await place.open(f"bombed {number}")
            reasons: list[CommError] = []
            comm.register_abort_hook(reasons.append)
            await comm.barrier()
            resident = psutil.Process().memory_info().rss
            if place.rank == 1:
                # The connection sends what it is given, unlike the transport.
                (connection,) = transport_of(comm)._connections.values()
                connection.send(torch.frombuffer(bytearray(bomb), dtype=torch.uint8))
            with pytest.raises((ProtocolError, CommAbortedError)) as caught:
                await comm.recv(empty(3), 1 - place.rank)
            await comm.aclose()
            assert place.rank == 1 or isinstance(reasons[0], ProtocolError), (number, repr(caught.value))
            assert number == 0 or psutil.Process().memory_info().rss - resident < 8 * 2**20
            await exchange(healthy, 3)


UCX_BOMBS = [
    b"",
    b"\x01",
    b"\x01\xc1",
    b"\x01\xdd\xff\xff\xff\xff",
    b"\x01" + b"\x91" * 5000,
    b"\x80\x04\x95" + bytes(40),
    b"GET / HTTP/1.1\r\n\r\n",
    b"B",
    b"E" + b"\xff" * 5,
    b"\x01" + bytes(2**16),
]


async def bombed_frames(place: Rank) -> None:
    async with place.open("healthy") as healthy:
        for number, bomb in enumerate(UCX_BOMBS):
            comm = await place.open(f"bombed {number}")
            reasons: list[CommError] = []
            comm.register_abort_hook(reasons.append)
            await comm.barrier()
            if place.rank == 1:
                transport_of(comm).engine.send_frame(0, bomb)
            with pytest.raises((ProtocolError, CommAbortedError)) as caught:
                await comm.recv(empty(3), 1 - place.rank)
            await comm.aclose()
            assert place.rank == 1 or isinstance(reasons[0], ProtocolError), (number, repr(caught.value))
            await exchange(healthy, 3)


# ------------------------------------------------------------------------- 66 and 67: pickles, and objects too large


class Canary:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (_sing, (self.path,))


def _sing(path: str) -> str:
    Path(path).touch()
    return "sung"


async def sing(place: Rank) -> None:
    """Send a pickle by every channel that takes bytes of another rank."""
    song = str(place.folder / "sung")
    canary = pickle.dumps(Canary(song))
    other = 1 - place.rank
    async with place.open() as comm:

        async def ends(receive: Any, send: Any = None) -> None:
            """Check that the receiver gets an error, and that the communicator goes on."""
            if place.rank == 1:
                await send()
            else:
                with pytest.raises(ProtocolError):
                    await receive()
            await exchange(comm, 3)

        await ends(lambda: comm.recv_object(1), lambda: comm.send_object(Canary(song), 0, pickle=True))
        # The forged headers have no flag of a pickle, that flag, or an unknown one.
        for flags, inline in ((0, canary), (0, b""), (1, canary), (2, canary)):
            header = forged.object_header(flags, 5, inline, len(canary))

            async def send(header: bytes = header, inline: bytes = inline) -> None:
                await forged.send(comm, header, 0, 0, ops.OBJECT)
                if not inline:
                    await forged.send(comm, canary, 0, 5, ops.OBJECT_DATA)

            await ends(lambda: comm.recv_object(1), send)
        mine = Canary(song) if place.rank == 1 else "no pickle"
        asks = place.rank == 1
        for call in (
            lambda: comm.broadcast_object(mine, 1, pickle=asks),
            lambda: comm.all_gather_object(mine, pickle=asks),
            lambda: comm.gather_object(mine, 0, pickle=asks),
            lambda: comm.scatter_object([mine, mine] if asks else None, 1, pickle=asks),
        ):
            if place.rank == 1:
                with contextlib.suppress(ProtocolError):  # The other rank's object may be refused.
                    # This rank has asked for its own copy, which may be unpickled: the file is removed below.
                    await call()
                Path(song).unlink(missing_ok=True)
                place.tell("asked")
            else:
                with pytest.raises(ProtocolError, match="pickled"):
                    await call()
            await comm.barrier()
        stream = comm.open_stream(other)
        opened_stream = await stream
        if place.rank == 1:
            header = canary.ljust(forged.STREAM_HEADER_BYTES, b"\0")[: forged.STREAM_HEADER_BYTES]
            tag = opened_stream._out_tag  # The tag is private.
            await forged.send(comm, header, 0, tag, ops.STREAM_DATA)
        else:
            with pytest.raises(ProtocolError):
                await opened_stream.receive()
        await exchange(comm, 3)
    assert not Path(song).exists()


@AND_SIMULATED
@pytest.mark.fault(66)
def test_unrequested_pickle_is_never_loaded_on_any_channel(ranks: Run, transport: str, tmp_path: Path) -> None:
    """Object messages, object collectives and streams load none. test_fuzz.py tests records and frames."""
    ranks(2, sing)
    assert not list(tmp_path.rglob("sung"))


@pytest.mark.deterministic
@pytest.mark.fault(66, transport="local")
def test_unrequested_pickle_is_never_loaded_on_local(tmp_path: Path) -> None:
    song = tmp_path / "sung"

    async def main() -> None:
        async with local_world(2) as (one, two):
            sent = one.send_object(Canary(str(song)), 1, pickle=True)
            with pytest.raises(ProtocolError, match="pickled by its sender"):
                await two.recv_object(0)
            await sent

    asyncio.run(main())
    assert not song.exists()


OBJECT_BOMBS = [
    b"\x91" * 10**5 + b"\xc0",
    b"\xdd\x00\x98\x96\x80" + b"\xc0" * 10**7,
    b"\xdc\xff\xff" * 10**5,
]


def refuse_too_much(comm: Communicator) -> None:
    """Check that objects beyond each limit are refused where they are made."""
    deep: Any = []
    for _ in range(10**5):
        deep = [deep]
    many = [None] * 10**7
    for value, why in ((deep, "nested"), (many, "values"), (b"\0" * (codec.MAX_OBJECT_BYTES + 1), "at most")):
        with pytest.raises(ArgumentError, match=why):
            comm.send_object(value, 1 - comm.rank)
    while deep:  # Freeing all levels at once recurses too deep.
        deep = deep[0]


async def throw(comm: Communicator, bomb: bytes) -> None:
    """Send a bomb as a rank without limits does."""
    await forged.send(comm, forged.object_header(0, 5, b"", len(bomb)), 0, 0, ops.OBJECT)
    await forged.send(comm, bomb, 0, 5, ops.OBJECT_DATA)


async def catch(comm: Communicator) -> None:
    resident = psutil.Process().memory_info().rss
    with pytest.raises(ProtocolError):
        await comm.recv_object(1)
    assert psutil.Process().memory_info().rss - resident < 64 * 2**20


async def too_much(place: Rank) -> None:
    """Check that objects beyond each limit are refused where they are made, and where they arrive."""
    async with place.open() as comm:
        refuse_too_much(comm)
        for bomb in OBJECT_BOMBS:
            await (throw(comm, bomb) if place.rank == 1 else catch(comm))
        await exchange(comm, 3)


@pytest.mark.deterministic
@pytest.mark.fault(67, transport="local")
def test_objects_beyond_each_limit_are_refused_on_local() -> None:
    async def main() -> None:
        async with local_world(2) as (one, two):
            refuse_too_much(one)
            for bomb in OBJECT_BOMBS:
                await asyncio.gather(throw(two, bomb), catch(one))
            await asyncio.gather(exchange(one, 3), exchange(two, 3))

    asyncio.run(main())


@pytest.mark.search
@pytest.mark.fault(67)
def test_objects_beyond_each_limit_are_refused(ranks: Run, transport: str) -> None:
    ranks(2, too_much)


# ------------------------------------------------------------------------------------------------ 69: another user


def as_nobody(call: Callable[[], object]) -> str:
    """Return the outcome of a call in a process of another user: the error's name, or "done"."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "?"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            call()
            outcome = "done"
        except OSError as error:
            outcome = errno.errorcode[error.errno or 0]
        finally:
            os.write(there, outcome.encode())
            os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    said = os.read(here, 100).decode()
    os.close(here)
    return said


async def guarded(place: Rank) -> list[tuple[str, str]]:
    """Return all that this process shares by name or descriptor, and the outcome when another user opens it."""
    async with place.open() as comm:
        window = await comm.new_window(torch.ones(LARGE))
        await exchange(comm, LARGE)
        await comm.barrier()
        tried = []
        me = os.getpid()
        for link in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if any(word in target for word in ("memfd", "/dev/shm", "shm_open", "torch_", "ucx")):
                    there = f"/proc/{me}/fd/{link.name}"
                    tried.append((target, as_nobody(lambda there=there: os.open(there, os.O_RDONLY))))
        rows = [row.split(maxsplit=5) for row in Path("/proc/self/maps").read_text().splitlines()]
        mapped = {row[5] for row in rows if len(row) == 6}  # Other processes have names there, too.
        for file in Path("/dev/shm").iterdir():
            if str(file) in mapped:
                tried.append((str(file), as_nobody(lambda file=file: os.open(file, os.O_RDONLY))))
                assert file.stat().st_mode & 0o077 == 0, file
        tried.append(("memory", as_nobody(lambda: os.open(f"/proc/{me}/mem", os.O_RDONLY))))
        await comm.barrier()
        await window.aclose()
        return tried


@pytest.mark.fault(69)
@needs_root
def test_other_user_cannot_open_shared_memory_or_sockets(ranks: Run, transport: str) -> None:
    for tried in ranks(2, guarded):
        assert len(tried) > 1 or transport == "c10d"
        assert {outcome for _, outcome in tried} == {"EACCES"}, tried
        assert any("memfd" in what or "torch" in what or "ucx" in what for what, _ in tried) == (transport == "ucx"), (
            tried
        )


@pytest.mark.fault(69)
@needs_root
def test_other_user_cannot_read_the_token_file(tmp_path: Path) -> None:
    """The folder is opened by a descriptor: each pytest that begins on this machine closes those above it to others."""
    tmp_path.chmod(0o755)
    for name, mode in (("token", 0o600), ("for all", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert as_nobody(lambda: os.open("for all", os.O_RDONLY, dir_fd=folder)) == "done"
        assert as_nobody(lambda: os.open("token", os.O_RDONLY, dir_fd=folder)) == "EACCES"
    finally:
        os.close(folder)


@pytest.mark.deterministic
def test_ucx_shares_nothing_with_the_group() -> None:
    """UCX's sysv segments would be readable by the group. They exist only for a moment, so this checks the options."""
    from aiocomms_ucx import bringup

    for outside in (None, "192.0.2.1"):
        for gpu in (False, True):
            assert dict(bringup._options(outside, gpu=gpu))["TLS"].startswith("^sysv")


@pytest.mark.deterministic
@pytest.mark.fault(69, transport="ucx")
@pytest.mark.parametrize("what", ["file", "unsealed memory", "another user's"])
def test_foreign_memory_descriptor_is_refused_before_mapping(tmp_path: Path, what: str) -> None:
    if what == "file":
        (tmp_path / "file").write_bytes(bytes(10**6))
        fd = os.open(tmp_path / "file", os.O_RDWR)
    else:
        flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if what == "another user's" else 0)
        fd = os.memfd_create("it", flags)
        os.truncate(fd, 10**6)
    if what == "another user's":
        if os.geteuid() != 0:
            pytest.skip("giving memory away needs root")
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.fchown(fd, NOBODY, -1)
    before = Counter(held()[1])
    with pytest.raises(ProtocolError, match="rank 3 names memory for its window that is not its own"):
        ucx_windows.open_segment(3, os.getpid(), fd)
    assert not Counter(held()[1]) - before  # Descriptors that other tests left may go meanwhile.
    os.close(fd)


# ------------------------------------------------------------------------------------------------------ 70: windows


async def out_of_bounds(place: Rank) -> None:
    """Access a window out of bounds by the raw engine: Python's own checks would hide the engine's."""
    canary = 0x5A5A5A5A
    whole = torch.full((3 * 1024,), canary, dtype=torch.int64)
    mine = whole[1024:2048]
    async with place.open() as comm:
        window = await comm.new_window(mine)
        other, size = 1 - place.rank, 1024 * 8
        transport = transport_of(comm)
        engine, group, number = transport.engine, transport.group, window._info.handle.number
        data = numbers(1024, place.rank)
        raw = torch.empty(2 * size, dtype=torch.uint8)
        for offset, nbytes in ((size, 8), (size - 8, 16), (0, size + 8), (2**40, 8), (2**64 - 8, 16), (2**64 - 8, 8)):
            for call in (engine.put, engine.get):
                with pytest.raises(IndexError, match="beyond the end of a window"):
                    call(1, group, number, other, offset, raw[:nbytes])
            if nbytes == 8:
                with pytest.raises(IndexError):
                    engine.atomic(1, group, number, other, offset, False, 8, 1, 0)
        for rank in (2, -1, 2**31 - 1):
            with pytest.raises(IndexError):
                engine.put(1, group, number, rank, 0, raw[:8])
        with pytest.raises(IndexError):
            engine.put(1, group, number + 1, other, 0, raw[:8])
        await comm.barrier()
        assert (whole == canary).all()
        await comm.barrier()
        await window.put(data, other)
        await window.flush()
        await comm.barrier()
        assert torch.equal(mine, numbers(1024, other))
        await window.aclose()
        for call in (engine.put, engine.get):
            with pytest.raises(IndexError):
                call(1, group, number, other, 0, raw[:8])
        with pytest.raises(IndexError):
            engine.signal(1, group, number, other)
        assert (whole[:1024] == canary).all()
        assert (whole[2048:] == canary).all()
        await exchange(comm, 3)


@pytest.mark.fault(65, 70)
@on_ucx
def test_malformed_control_frames_and_window_access_out_of_bounds_are_refused(ranks: Run, transport: str) -> None:
    """engine_hostile.hpp tests malformed headers."""
    ranks(2, in_turn, bombed_frames, out_of_bounds)


async def out_of_bounds_requests(place: Rank) -> None:
    """Send a forged request to a window made of messages: its owner checks it before it touches the tensor."""
    canary = 0x5A5A5A5A
    whole = torch.full((3 * 64,), canary, dtype=torch.int64)
    async with place.open() as comm:
        window = await comm.new_window(whole[64:128])
        if place.rank == 1:
            await forged.send(comm, forged.swap(64, canary, 0), 0, window._info.handle.tag, ops.RMA_REQUEST)
        await comm.barrier()
        assert (whole == canary).all()


@pytest.mark.deterministic
@pytest.mark.fault(70, transport="c10d")
@pytest.mark.parametrize(
    ("offset", "count"), [(0, 65), (64, 1), (-1, 1), (0, -1), (2**63 - 1, 1), (-(2**63), 2**63 - 1), (1, 2**63 - 1)]
)
def test_window_request_out_of_bounds_is_refused_by_span(offset: int, count: int) -> None:
    """The owner of a c10d window, which is made of messages, refuses the request."""
    from aiocomms.lowering.windows import _Window

    whole = torch.full((3 * 64,), 7)
    window = _Window(1, whole[64:128], 0)
    with pytest.raises(ProtocolError, match="of a window of 64"):
        window.span(offset, count)
    with pytest.raises(ProtocolError):
        window.atomic(3, offset if count == 1 else 64, 1, 1)
    assert (whole == 7).all()


@pytest.mark.fault(65, 70)
@on_c10d
def test_oversized_headers_and_window_requests_out_of_bounds_are_refused(ranks: Run, transport: str) -> None:
    ranks(2, in_turn, bombed, out_of_bounds_requests)


@pytest.mark.deterministic
def test_memory_key_is_hidden_in_repr() -> None:
    part = ucx_windows.WindowPart(3, 0, (4,), 4, 2**47, b"secret key")
    for text in (repr(part), str(part)):
        assert "secret" not in text
        assert str(2**47) not in text
