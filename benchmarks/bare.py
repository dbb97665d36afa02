"""The core without the flight recorder, to see what that costs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from aiocomms import communicator
from aiocomms.communicator import Communicator


@cache
def without_recorder() -> Callable[..., Any]:
    """``Communicator._issue`` whose ops leave no trace if they complete inside ``post``: the same code less two lines.

    To be put in the class: on an instance a method is found in another way, which takes longer.

    :raises AssertionError: the lines are not where this looks for them.
    """
    source = textwrap.dedent(inspect.getsource(Communicator._issue))
    cut = ("self._ring.append(kind)", "PEERS")
    without = "".join(line for line in source.splitlines(True) if not any(what in line for what in cut))
    assert source.count("\n") == without.count("\n") + 2, "the recorder's lines are not where this benchmark looks"
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{without}", vars(communicator) | {"__name__": "without"}, namespace)
    issue: Callable[..., Any] = namespace["_issue"]
    return issue
