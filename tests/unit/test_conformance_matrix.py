"""The cells in which the checks of the conformance suite run, and its recognition of changed data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aiocomms.testing.conformance import data, options
from aiocomms.testing.conformance.case import Outcome, Place
from aiocomms.testing.conformance.matrix import Cell, Marks, Subject, cells
from aiocomms.testing.conformance.world import verdict

pytestmark = pytest.mark.deterministic

LOOPS = ["asyncio", "uvloop", "trio"]
LOCAL = Subject("local", "local")
C10D = Subject("c10d", "c10d")
UCX = Subject("ucx", "ucx", native=True)
UCX_PROCESSES = Subject("ucx@processes", "ucx", processes=True, native=True)
NCCL = Subject("nccl", "nccl", processes=True)
EVERYTHING = [LOCAL, C10D, UCX, UCX_PROCESSES]


def places(marks: Marks, subjects=EVERYTHING, loops=LOOPS, sizes=None, full=False) -> list[str]:
    return [f"{cell.subject.name}-{cell.loop}-{cell.size}" for cell in cells(marks, subjects, loops, sizes, full)]


def test_unmarked_check_runs_on_each_transport_and_the_first_loop():
    assert places(Marks((2,))) == ["local-asyncio-2", "c10d-asyncio-2", "ucx-asyncio-2"]
    assert places(Marks((1, 7)), [NCCL], ["trio", "asyncio"]) == ["nccl-trio-1", "nccl-trio-7"]


def test_check_marked_loops_runs_on_each_loop():
    assert places(Marks((2,), loops=True), [C10D]) == ["c10d-asyncio-2", "c10d-uvloop-2", "c10d-trio-2"]


def test_check_marked_core_runs_on_the_first_transport_and_those_with_shortcuts():
    core = Marks((2,), core=True)
    assert places(core) == ["local-asyncio-2", "ucx-asyncio-2"]
    assert places(core, [C10D, LOCAL]) == ["c10d-asyncio-2"]
    assert places(core, [UCX_PROCESSES, UCX]) == ["ucx-asyncio-2"]


def test_check_marked_memory_runs_again_in_processes():
    memory = Marks((1, 2, 3, 4, 7), memory=True)
    assert places(memory, [UCX_PROCESSES, UCX], sizes={1, 2, 3}) == [
        "ucx@processes-asyncio-2", "ucx@processes-asyncio-3", "ucx-asyncio-1", "ucx-asyncio-2", "ucx-asyncio-3"
    ]  # fmt: skip
    assert places(Marks((2,), core=True, memory=True), [LOCAL, UCX, UCX_PROCESSES])[-1] == "ucx@processes-asyncio-2"


def test_every_check_runs_where_processes_are_the_only_choice():
    assert places(Marks((1, 2), core=True), [UCX_PROCESSES]) == ["ucx@processes-asyncio-1", "ucx@processes-asyncio-2"]
    assert places(Marks((7,)), [LOCAL, UCX_PROCESSES]) == ["local-asyncio-7", "ucx@processes-asyncio-7"]


def test_full_runs_every_transport_loop_and_size():
    marks = Marks((2,), more=(1, 7), core=True)
    found = cells(marks, EVERYTHING, LOOPS, None, full=True)
    assert found == [Cell(subject, loop, size) for subject in EVERYTHING for loop in LOOPS for size in (1, 2, 7)]


def test_loops_and_sizes_not_chosen_are_left_out():
    marks = Marks((2, 3), more=(7,), loops=True)
    assert places(marks, [LOCAL], ["trio"], {3, 7}) == ["local-trio-3"]
    assert places(marks, [LOCAL], ["trio"], {3, 7}, full=True) == ["local-trio-3", "local-trio-7"]
    assert places(marks, [LOCAL], ["trio"], {4}) == []


@pytest.mark.parametrize(
    ("given", "name", "transport", "processes"),
    [
        ("local", "local", "local", False),
        ("local@processes", "local@processes", "local", True),
        ("p2p=local,rma=local", "local+local", {"p2p": "local", "rma": "local"}, False),
        ("p2p=local,rma=local@processes", "local+local@processes", {"p2p": "local", "rma": "local"}, True),
    ],
)
def test_transport_option_is_parsed_into_a_subject(given, name, transport, processes):
    subject = options.subject(given, torch.device("cpu"), {"local": None})
    assert subject == Subject(name, transport, processes)
    place = Place(subject.name, subject.transport, "cpu", "trio", 2, subject.processes, 30.0)
    assert str(place) == f"{name}-trio-2"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("local@thread", "--transport local@thread: got '@thread' after the name, wanted '@processes' or nothing"),
        ("local@", "--transport local@: got '@' after the name, wanted '@processes' or nothing"),
        ("nobody@processes", "--transport nobody: it is not installed"),
        ("p2p=local,broken", "--transport p2p=local,broken: got 'broken', wanted FAMILY=NAME"),
        ("gone", "--transport gone: it lacks a wheel"),
    ],
)
def test_wrong_transport_option_is_refused(given, why):
    with pytest.raises(pytest.UsageError) as caught:
        options.subject(given, torch.device("cpu"), {"local": None, "gone": "it lacks a wheel"})
    assert str(caught.value) == why


def test_number_of_checks_marked_loops_or_memory_is_bounded():
    """Few checks carry these marks themselves; a module that is marked as a whole does not count."""
    texts = [path.read_text() for path in Path(data.__file__).parent.glob("test_*.py")]
    counts = {mark: sum(text.count(f"@pytest.mark.{mark}\n") for text in texts) for mark in ("loops", "memory")}
    assert counts["loops"] <= 60
    assert counts["memory"] <= 71


# ------------------------------------------------------------------------------------------------------------ data


def test_expected_data_is_computed_once_per_check():
    given = [data.numbers(3, torch.float32, (5,), "check", rank) for rank in range(2)]
    assert given[0] is data.numbers(3, torch.float32, (5,), "check", 0)
    data.forget()
    again = data.numbers(3, torch.float32, (5,), "check", 0)
    assert again is not given[0]
    assert again.equal(given[0])
    data.verify()


def test_equal_keys_of_different_types_have_their_own_data():
    assert not data.bits(3, torch.int32, (5,), 1).equal(data.bits(3, torch.int32, (5,), True))


def test_changed_random_data_raises_wrong_data():
    content = data.bits(2**31, torch.uint8, (5,), "changed")
    before = content.clone()
    content[2] += 1
    try:
        with pytest.raises(data.WrongData, match="random data was changed"):
            data.verify()
    finally:
        content.copy_(before)
    data.verify()


def test_wrong_data_names_the_difference():
    slot = data.Slot(torch.zeros(3), torch.float32, (3,), torch.device("cpu"))
    with pytest.raises(data.WrongData, match=r"got \[0.0, 0.0\], wanted \[5.0, 0.0\], from element 1 on"):
        slot.expect(torch.tensor([0.0, 5.0, 0.0]))
    with pytest.raises(data.WrongData, match="error"):
        slot.expect(torch.ones(3), torch.full((3,), 0.5))
    slot._memory[0] = 1
    with pytest.raises(data.WrongData, match="memory around"):
        slot.expect_untouched()
    outcome = verdict([Outcome("passed", agreed=(("sum", value),)) for value in (1, 2)])
    assert outcome == Outcome("failed", "WrongData: the ranks disagree: ('sum', 1) on rank 0, ('sum', 2) on rank 1")
