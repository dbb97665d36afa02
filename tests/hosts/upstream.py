"""The tests of distributed_test in torch's wheel, each in processes of its own, over a backend.

Torch's decorators decide at import which tests a backend has. They see ``gloo`` here, or ``mpi`` for the tests of MPI
alone. The tests themselves see the backend that they run on.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import sys
import unittest
import warnings
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

RANKS = 4
_NAME = "torch.testing._internal.distributed.distributed_test"
_OF_A_GPU = ("skip_if_no_gpu.", "skip_if_lt_x_gpu.")
# With a file as the rendezvous, torch has one more test. The environment of each test names its file.
os.environ.update(WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1", BACKEND="gloo", INIT_METHOD="file://")


@functools.cache
def module(decorated: str) -> ModuleType:
    """Return torch's module of tests as its decorators leave it for a backend."""
    os.environ["BACKEND"] = decorated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if decorated == "gloo":  # the fork server has imported the module under this name
            return importlib.import_module(_NAME)
        origin = importlib.util.find_spec(_NAME)
        assert origin is not None
        spec = importlib.util.spec_from_file_location(f"{_NAME}_{decorated}", str(origin.origin))
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found


def names(decorated: str) -> list[str]:
    """Return the names of the tests that torch runs on a machine without a GPU."""
    tests = inspect.getmembers(case(decorated, ""), lambda it: inspect.isfunction(it) and it.__name__[:5] == "test_")
    return [name for name, test in tests if not getattr(test, "__unittest_skip__", False) and not _needs_a_gpu(test)]


def _needs_a_gpu(test: Any) -> bool:
    while not test.__code__.co_qualname.startswith(_OF_A_GPU):
        if not hasattr(test, "__wrapped__"):
            return False
        test = test.__wrapped__
    return True


def case(decorated: str, backend: str) -> type[unittest.TestCase]:
    """Return the class of torch's tests. Its processes are forked from one that has imported torch."""
    of = module(decorated)

    class Case(of.TestDistBackend, of.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(functools.partial(_process, decorated, backend))

        def run_test(self, test_name: str, parent_pipe: Connection) -> None:
            if test_name.startswith("test_accumulate_gradients"):  # these tests know the devices of some backends only
                of.BACKEND = decorated
            super().run_test(test_name, parent_pipe)

    return Case


def _process(decorated: str, backend: str, target: object, name: str, args: Any, kwargs: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_NAME, "aiocomms.integrations.torch_backend", "aiocomms_ucx"])
    return context.Process(target=_rank, name=name, args=(dict(os.environ), decorated, backend, *args), kwargs=kwargs)


def _rank(environ: dict[str, str], decorated: str, backend: str, *args: Any, **kwargs: Any) -> None:
    os.environ.update(environ)
    of = module(decorated)
    import aiocomms.integrations.torch_backend

    of.BACKEND, of.INIT_METHOD = backend, environ["INIT_METHOD"]
    os.environ["BACKEND"] = "mpi"  # otherwise torch skips ops of two ranks in a world of fewer than 8
    for backends in (of.PROFILING_SUPPORTED_BACKENDS, of.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append(aiocomms.integrations.torch_backend.BACKEND)
    case(decorated, backend)._run(*args, **kwargs)  # type: ignore[attr-defined]


def outcome(decorated: str, backend: str, name: str) -> tuple[str, str]:
    """Run a test; return whether it "passed", was "skipped" or "failed", and why."""
    result = unittest.TestResult()
    case(decorated, backend)(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    why = "\n".join(text for _, text in [*result.errors, *result.failures])
    return ("failed", why) if why else ("passed", "")
