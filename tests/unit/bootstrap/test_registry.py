"""Transports by entry point, by name and by preference, and the reason why one is not available."""

from __future__ import annotations

import sys
from types import MappingProxyType

import pytest
import torch
from aiocomms_local import LocalTransport
from concurrency import ranks
from torch.distributed import HashStore

import aiocomms
from aiocomms import ops
from aiocomms.bootstrap import registry
from aiocomms.errors import ArgumentError, ArgumentTypeError, CommAbortedError, CommError, UnsupportedOperation
from aiocomms.testing import local_world
from aiocomms.transport import Capabilities, Transport

pytestmark = pytest.mark.deterministic

CPU = torch.device("cpu")

STRANGER = """
from aiocomms_local import LocalTransport

class Stranger(LocalTransport):
    pass
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Yield a function that writes a distribution with transports to where Python finds installed packages."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str, **classes: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{transport} = {name}:{cls}" for transport, cls in classes.items()]
        (info / "entry_points.txt").write_text("\n".join(["[aiocomms.transports]", *lines, ""]))
        forget()

    def forget() -> None:  # The process caches the installed transports, and outlives this folder.
        registry._entries.cache_clear()
        registry._load.cache_clear()

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)
    forget()


class Named(LocalTransport):
    """The ``local`` transport with a preference and an availability that a test sets."""

    liking = 0
    reason = None

    @classmethod
    async def open(cls, rendezvous, options):
        place = (rendezvous.name, rendezvous.rank, rendezvous.size)
        return await super().open(rendezvous.child(cls.__name__, *place), options)

    @classmethod
    def probe(cls, device):
        return cls.reason

    @classmethod
    def preference(cls, device, size, family):
        return cls.liking


def make(name="Made", *, of=LocalTransport.capabilities.ops, devices=("cpu",), liking=0, reason=None, in_process=True):
    capabilities = Capabilities(ops=frozenset(of), devices=frozenset(devices), in_process=in_process)
    return type(name, (Named,), {"capabilities": capabilities, "liking": liking, "reason": reason})


P2P = {ops.Send, ops.Recv}


def test_installed_transport_is_found():
    assert registry.find("local", CPU) is LocalTransport
    assert registry.available(CPU)["local"] is None


def test_third_party_transport_is_found_and_works(run, distribution):
    distribution("stranger", STRANGER, strange="Stranger")

    async def main():
        async with local_world(2, "strange") as world:
            assert set(world[0].transports.values()) == {"strange"}
            results = await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
            assert [r.item() for r in results] == [2, 2]

    run(main)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libstranger.so.1: cannot open')", "OSError: libstranger.so.1: cannot open"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("this is no Python", "SyntaxError: "),
        ("", "AttributeError: module 'stranger' has no attribute 'Stranger'"),
        (
            "Stranger = 42",
            "TypeError: entry point 'stranger:Stranger' is not a subclass of aiocomms.transport.Transport",
        ),
        ("class Stranger: pass", "is not a subclass of aiocomms.transport.Transport"),
        (
            STRANGER + "    @classmethod\n    def probe(cls, device):\n        raise RuntimeError('boom')",
            "RuntimeError: boom",
        ),
        (
            STRANGER + "    @classmethod\n    def probe(cls, device):\n        return 'there is no wire'",
            "there is no wire",
        ),
    ],
    ids=["library", "import", "syntax", "attribute", "type", "class", "probe", "reason"],
)
def test_broken_transport_is_listed_with_its_reason_and_leaves_others_usable(run, distribution, source, reason):
    distribution("stranger", source, strange="Stranger")
    assert reason in registry.available(CPU)["strange"]
    assert registry.available(CPU)["local"] is None

    async def main():
        for unavailable in ("strange", {"p2p": "strange"}):
            with pytest.raises(UnsupportedOperation) as caught:
                await aiocomms.new_comm(unavailable)
            first, second, *rows = str(caught.value).splitlines()
            assert first.startswith("transport 'strange' is not available: ")
            assert reason in first
            assert second == "installed transports (for device cpu):"
            assert "  local: available" in rows
            assert any(row.startswith("  strange: ") and reason in row for row in rows)
        async with aiocomms.new_comm("auto") as comm:
            assert set(comm.transports.values()) == {"local"}

    run(main)


def test_transport_that_failed_to_load_is_loaded_again(distribution, tmp_path):
    distribution("stranger", "raise OSError('not yet')", strange="Stranger")
    assert "not yet" in registry.find("strange", CPU)
    (tmp_path / "stranger.py").write_text(STRANGER + "# of another length than before\n")
    assert registry.find("strange", CPU).__name__ == "Stranger"


@pytest.mark.parametrize("name", ["locl", "", "Local", "aiocomms"])
def test_unknown_transport_name_lists_the_installed_ones(run, install, name):
    install(sick=make(reason="it is sick"), well=make())

    async def main():
        for unknown in (name, {"p2p": name}):
            with pytest.raises(ArgumentError) as caught:
                await aiocomms.new_comm(unknown)
            first, second, *rows = str(caught.value).splitlines()
            assert first == f"transport is {name!r}, which is not installed"
            assert second == "installed transports (for device cpu):"
            assert {"  local: available", "  sick: it is sick", "  well: available"} <= set(rows)

    run(main)


@pytest.mark.parametrize("bad", [None, 42, ["local"], b"local", ("local", "local"), {"local"}], ids=repr)
def test_transport_argument_of_wrong_type_is_refused(run, bad):
    async def main():
        with pytest.raises(
            ArgumentTypeError, match=r"transport is .*, wanted a name, 'auto', or a mapping of families"
        ):
            await aiocomms.new_comm(bad)

    run(main)


@pytest.mark.parametrize("mapping", [{}, {"p2p": None}, {"p2p": ["local"]}, {1: "local"}, {"p2p": 42}], ids=repr)
def test_transport_mapping_without_a_valid_name_is_refused(run, mapping):
    async def main():
        with pytest.raises(ArgumentError, match="transport "):
            await aiocomms.new_comm(mapping)

    run(main)


def test_transport_mapping_with_an_unknown_family_is_refused(run):
    async def main():
        with pytest.raises(
            ArgumentError, match="names the family 'collective', wanted some of 'p2p', 'collectives', 'rma'"
        ):
            await aiocomms.new_comm({"collective": "local"})

    run(main)


def test_transport_mapping_with_an_unsupported_family_is_refused(run, install):
    install(small=make(of=P2P))

    async def main():
        with pytest.raises(ArgumentError, match="transport 'small' does not carry 'rma'"):
            await aiocomms.new_comm({"p2p": "small", "rma": "small"})

    run(main)


def test_unsupported_device_is_refused(run):
    async def main():
        with pytest.raises(UnsupportedOperation, match="it carries tensors on cpu, cuda, not on meta"):
            await aiocomms.new_comm("local", "meta")

    run(main)


def test_transport_mapping_opens_a_transport_for_each_family(run, install):
    install(one=make("One"), two=make("Two"))

    async def main():
        mapping = MappingProxyType({"collectives": "one", "p2p": "two", "rma": "one"})
        async with local_world(2, mapping) as world:
            assert world[0].transports == dict(mapping)
            results = await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
            assert [r.item() for r in results] == [2, 2]
            world[0].send(torch.ones(1), 1)
            await world[1].recv(torch.zeros(1), 0)
            windows = await ranks(world, lambda comm: comm.new_window(torch.zeros(1)))
            await windows[0].put(torch.ones(1), 1)
            assert windows[1].tensor.item() == 1

    run(main)


def test_communicator_with_some_families_refuses_ops_of_the_others(run, install):
    install(small=make(of=P2P))

    async def main():
        async with local_world(2, {"p2p": "small"}) as world:
            results = await ranks(world, lambda comm: comm.all_reduce(torch.ones(1)))
            assert [r.item() for r in results] == [2, 2]
        async with local_world(2, {"collectives": "local"}) as world:
            assert world[0].transports == {"collectives": "local"}
            await ranks(world, lambda comm: comm.barrier())
            with pytest.raises(UnsupportedOperation, match="no transport of this communicator carries it") as caught:
                world[0].send(torch.ones(1), 1)
            assert caught.value.op == "send"
            await ranks(world, lambda comm: comm.barrier())

    run(main)


def test_auto_prefers_the_best_available_transport_for_each_family(install):
    everything = LocalTransport.capabilities.ops
    install(
        **dict.fromkeys(registry.entries(), make(liking=0)),  # A preference of 0 means never.
        all=make("All", of=everything, liking=1),
        pairs=make("Pairs", of=P2P | ops.RMA, liking=5),
        sums=make("Sums", of=ops.COLLECTIVES, liking=7),
        sick=make("Sick", of=everything, liking=9, reason="it is sick"),
        cuda=make("Cuda", of=everything, liking=9, devices=("cuda",)),
    )
    plan = registry.choose("auto", CPU, 4, {})
    assert plan.names == {"p2p": "pairs", "collectives": "sums", "rma": "pairs"}
    assert {cls.__name__ for cls in plan.classes.values()} == {"Pairs", "Sums"}


def test_auto_lowers_collectives_to_a_transport_that_has_none(install):
    install(**dict.fromkeys(registry.entries(), make(liking=0)), pairs=make("Pairs", of=P2P, liking=5))
    assert registry.choose("auto", CPU, 4, {}).names == {"p2p": "pairs", "collectives": "pairs"}


def test_auto_without_an_available_transport_lists_the_reasons(run, install):
    known = {name: make(liking=9, reason=f"{name} is sick") for name in registry.entries()}
    install(**known)

    async def main():
        with pytest.raises(UnsupportedOperation, match="transport is 'auto', and none can serve 1 ranks") as caught:
            await aiocomms.new_comm()
        for name in known:
            assert f"  {name}: {name} is sick" in str(caught.value)
        with pytest.raises(UnsupportedOperation, match="no transport runs several ranks in one process"):
            async with local_world(2):
                pass

    run(main)


def test_transport_receives_the_hints(run, install):
    seen = []

    class Listening(Named):
        @classmethod
        async def open(cls, rendezvous, options):
            seen.append(options)
            return await super().open(rendezvous, options)

    install(listening=Listening)

    async def main():
        async with aiocomms.new_comm("listening", hints={"colour": "red"}):
            assert seen == [{"colour": "red"}]

    run(main)


def test_a_transport_named_twice_is_opened_once(run, install):
    opened = []

    class Counting(Named):
        @classmethod
        async def open(cls, rendezvous, options):
            opened.append(rendezvous.rank)
            return await super().open(rendezvous, options)

    install(counting=Counting)

    async def main():
        async with local_world(2, {"p2p": "counting", "collectives": "counting"}):
            assert sorted(opened) == [0, 1]

    run(main)


def test_opened_transport_is_closed_if_another_fails_to_open(run, install):
    closed = []

    class Closing(Named):
        async def aclose(self):
            closed.append(self)
            await super().aclose()

    class Failing(Named):
        @classmethod
        async def open(cls, rendezvous, options):
            raise ValueError("boom")

    install(closing=Closing, failing=Failing)

    async def main():
        with pytest.raises(CommError, match="the transport 'failing' cannot be opened: ValueError: boom") as caught:
            await aiocomms.new_comm({"p2p": "closing", "collectives": "failing"})
        assert isinstance(caught.value.__cause__, ValueError)
        assert len(closed) == 1
        assert closed[0].fileno() == -1

    run(main)


def test_from_process_group_refuses_an_unknown_group(run):
    class Group:
        def rank(self):
            return 0

        def size(self):
            return 1

    async def main():
        with pytest.raises(ArgumentTypeError, match="pg is a Group, which no available transport can adopt") as caught:
            await aiocomms.from_process_group(Group())
        assert "  local: available" in str(caught.value)

    run(main)


def test_transport_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Transport()


BROKEN = """
from aiocomms_local import LocalTransport

class Broken(LocalTransport):
    @classmethod
    def preference(cls, device, size, family):
        raise RuntimeError("how much?")

    @classmethod
    def adopts(cls, foreign):
        raise RuntimeError("what is that?")

    @classmethod
    def info(cls):
        raise RuntimeError("what of it?")

    def fileno(self):
        raise RuntimeError("what descriptor?")

    def side_channel(self):
        raise RuntimeError("what channel?")
"""


def test_transport_that_raises_when_asked_leaves_others_usable(run, distribution, caplog):
    distribution("broken", BROKEN, broken="Broken")

    async def main():
        async with await aiocomms.new_comm(store=HashStore(), rank=0, size=1) as comm:
            assert "broken" not in comm.transports.values()
        with pytest.raises(ArgumentTypeError, match="which no available transport can adopt"):
            await aiocomms.from_process_group(type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})())

    run(main)
    assert registry.info(CPU)["broken"] == {}
    assert {"how much?", "what is that?", "what of it?"} <= {str(record.exc_info[1]) for record in caplog.records}


def test_transport_whose_fileno_raises_loses_only_its_communicator(run, distribution, caplog):
    distribution("broken", BROKEN, broken="Broken")

    async def main():
        comm = await aiocomms.new_comm("broken", store=HashStore(), rank=0, size=1)
        assert comm.aborted
        with pytest.raises(CommAbortedError, match=r"Broken is broken: fileno\(\) raised RuntimeError: what descr"):
            comm.barrier()
        async with await comm.reconfigure(ranks=[0], timeout=60) as again:  # the store is all that is left
            assert again.aborted
        await comm.aclose()

    run(main)
    assert "what channel?" in {str(record.exc_info[1]) for record in caplog.records if record.exc_info}
