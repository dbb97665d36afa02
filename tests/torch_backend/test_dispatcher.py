"""Calls through torch's dispatcher: dispatch modes see them, and the group still runs the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from calls import Calls
from forms import Form, calls, forms
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group, _unregister_process_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from aiocomms.errors import UnsupportedOperation
from aiocomms.integrations.torch_backend import Group, communicators

CPU = torch.device("cpu")
pytestmark = [pytest.mark.deterministic, pytest.mark.fault(134)]


class Spy(TorchDispatchMode):
    """A dispatch mode that records the operators of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.operators.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def comm() -> Calls:
    return Calls(ended=0)


@pytest.fixture
def group(comm: Calls) -> Group:
    return Group(cast("Any", comm), dist.HashStore())


def twice(value: Any) -> Any:
    """Return a value with a TwoTensor for each tensor: itself, and ten times itself."""
    if isinstance(value, Tensor):
        return TwoTensor(value, value * 10)
    return [twice(each) for each in value] if isinstance(value, list) and value else value


def called(group: Group, form: Form, arguments: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """Return the calls of a method of a group, with all arguments that torch has for it."""
    comm = cast("Calls", group.comm)
    comm.seen.clear()
    call = next(calls(form, 1))
    getattr(group, form.method)(*map(arguments, call.args))
    return list(comm.seen)


def torchs() -> Iterator[Form]:
    """Return the forms that torch calls, and that start an operation at once."""
    return (form for form in forms() if form.owner == "ProcessGroup" and form.method != "recv_anysource")


def test_a_mode_sees_each_operation(group: Group) -> None:
    """Each mode sees one operator for each operation, and the communicator gets the same calls as without modes."""
    for form in torchs():
        expected = called(group, form)
        with Spy() as outer, Spy() as inner:
            assert called(group, form) == expected, str(form)
        assert len(inner.operators) == 1, str(form)
        assert inner.operators == outer.operators


def test_a_tensor_of_several_is_each_of_them(group: Group) -> None:
    for form in torchs():
        expected = called(group, form) * (1 if form.method == "barrier" else 2)
        assert [name for name, *_ in called(group, form, twice)] == [name for name, *_ in expected], str(form)
    group.broadcast([TwoTensor(torch.ones(2), torch.zeros(2))])
    assert cast("Calls", group.comm).seen[-2:] == [("broadcast", [[1.0, 1.0], 0]), ("broadcast", [[0.0, 0.0], 0])]


def test_a_work_is_done_when_all_that_was_started_is(group: Group, comm: Calls) -> None:
    work = group.allreduce(TwoTensor(torch.ones(2), torch.zeros(2)))
    assert not work.is_completed()
    comm.ended = 1  # Gloo's work would be done here.
    assert not work.is_completed()
    comm.ended = 2
    assert work.is_completed()


def test_communication_is_counted(group: Group) -> None:
    with CommDebugMode() as counted:
        group.allreduce(torch.ones(2))
        group.broadcast([torch.ones(2)])
    assert counted.get_total_counts() == 2


def test_fake_tensors_reach_no_rank(group: Group, comm: Calls) -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.ones(2))
    group.allreduce([fake])  # The mode of the tensor is off.
    with mode:
        group.allreduce([torch.ones(2)])
        with Spy() as spy:
            group.broadcast([fake])
    assert comm.seen == []
    assert spy.operators == ["broadcast_"]


def test_a_program_is_traced_and_runs(group: Group, comm: Calls) -> None:
    def program(tensor: Tensor) -> Tensor:
        group.allreduce([tensor])
        return tensor + 1

    traced = make_fx(program)(torch.ones(2))
    assert "c10d.allreduce_" in traced.code
    assert [name for name, *_ in comm.seen] == ["all_reduce"]
    assert make_fx(program, tracing_mode="fake")(torch.ones(2)).code == traced.code


def test_a_factor_that_the_dispatcher_does_not_tell_is_refused(group: Group, comm: Calls) -> None:
    scaled = dist._make_nccl_premul_sum(torch.tensor(0.5))
    with Spy(), pytest.raises(UnsupportedOperation, match="PREMUL_SUM"):
        group.allreduce(torch.ones(2), scaled)
    assert comm.seen == []


def test_another_backends_operation_within_a_mode_is_its_own(group: Group, comm: Calls) -> None:
    other = dist.ProcessGroup(dist.HashStore(), 0, 1)
    other._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(0, 1))

    class Answers(Spy):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            other.allreduce(torch.ones(3)).wait()
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Answers():
        group.broadcast([torch.ones(2)])
    assert [name for name, *_ in comm.seen] == ["broadcast"]


@pytest.mark.fault(137)
def test_another_backends_device_is_answered_by_what_to_write(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert group._get_backend(cuda) is group
    monkeypatch.setitem(distributed_c10d._world.pg_backend_config, group, "cpu:aiocomms,cuda:nccl")
    monkeypatch.setattr(communicators, "device_of", lambda tensors: cuda)
    for call in (lambda: group._get_backend(cuda), lambda: group.allreduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match=r"write init_process_group\('nccl'\) and new_group\(backend='aiocomms'"):
            call()
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(RuntimeError, match="carries no tensors of meta"):
        group._get_backend(torch.device("meta"))


@pytest.fixture
def named(group: Group) -> Iterator[str]:
    """Yield a name under which torch finds the group."""
    name = "a group of the tests"
    group.setGroupName(name)
    _register_process_group(name, group)
    yield name
    _unregister_process_group(name)


@pytest.mark.fault(135)
def test_an_all_gather_into_a_tensor_of_inductors(named: str, comm: Calls) -> None:
    out = torch.zeros(4)
    started = torch.ops._c10d_functional.all_gather_into_tensor_out(torch.ones(2), 2, named, out=out)
    assert started is out
    assert comm.seen == [("all_gather_single", [[0.0] * 4, [1.0] * 2])]
    comm.ended = 1
    assert torch.ops._c10d_functional.wait_tensor(out) is out
