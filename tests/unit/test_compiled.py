"""Operations in functions that ``torch.compile`` compiles: it calls them unchanged, between two graphs."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from aiocomms import functional
from aiocomms.communicator.communicator import Communicator
from aiocomms.lowlevel.handles import Handle
from aiocomms.testing import local_world

pytestmark = [pytest.mark.deterministic, pytest.mark.slow, pytest.mark.fault(131)]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Reset the compiler. Other packages may warn while it is imported, but not later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def started(start: Callable[[Tensor], Any]) -> list[Any]:
    """Start something twice in a compiled function, whose operators before and after it make two graphs."""
    operators = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        operators.extend([names] if names else [])
        return graph.forward

    def step(x: Tensor) -> tuple[Any, Tensor]:
        y = x * 2
        return start(y), x + 1

    compiled = torch.compile(step, backend=backend)
    first, second = compiled(torch.ones(2)), compiled(torch.ones(2))
    assert first[1].tolist() == second[1].tolist() == [2.0, 2.0]
    assert operators == [["mul"], ["add"]]
    return [first[0], second[0]]


OPERATIONS: dict[str, tuple[Callable[[Communicator, Tensor], Any], list[float]]] = {
    "a collective": (lambda comm, y: comm.all_reduce(y), [4.0, 4.0]),
    "a functional one": (lambda comm, y: functional.all_reduce(y, group=comm), [4.0, 4.0]),
    "of a lane": (lambda comm, y: comm.lane("a").all_reduce(y), [4.0, 4.0]),
    "an object": (lambda comm, y: comm.all_gather_object(y), [2.0, 2.0]),
    "a message": (lambda comm, y: comm.recv(y, 1) if comm.rank == 0 else comm.send(y, 0), [2.0, 2.0]),
}


@pytest.mark.parametrize("transport", ["local", "ucx"])
@pytest.mark.parametrize(("start", "value"), OPERATIONS.values(), ids=OPERATIONS)
def test_compiled_function_starts_operations(run: Any, transport: str, start: Any, value: list[float]) -> None:
    async def main() -> None:
        async with local_world(2, transport) as comms:
            works = [work for comm in comms for work in started(lambda y, comm=comm: start(comm, y))]
            for work in works:
                result = await work
                assert (result if isinstance(result, Tensor) else result[0]).tolist() == value

    run(main)


@pytest.mark.parametrize("transport", ["local", "ucx"])
def test_compiled_function_waits_on_a_portal(transport: str) -> None:
    async def main() -> None:
        async with local_world(2, transport) as (one, two):
            portal = one.portal()
            blocking = asyncio.to_thread(started, lambda y: portal.all_reduce(y).wait())
            thread = asyncio.ensure_future(blocking)
            for _ in range(2):
                await two.all_reduce(torch.full((2,), 2.0))
            assert [result.tolist() for result in await thread] == [[4.0, 4.0]] * 2

    asyncio.run(main())


def test_torch_compile_skips_every_method_of_a_handle() -> None:
    """The check covers untested methods, too, and all public functions of the functional form."""
    kinds, methods = [Handle], []
    for kind in kinds:
        kinds += kind.__subclasses__()
        named = {name: it for name, it in vars(kind).items() if not name.startswith("__")}
        methods += [it for it in named.values() if isinstance(it, FunctionType)]
    methods += [
        it for it in vars(functional).values() if inspect.isfunction(it) and it.__module__ == functional.__name__
    ]
    assert len(methods) > 200
    assert not [it for it in methods if not getattr(it, "_torchdynamo_disable", False)]
