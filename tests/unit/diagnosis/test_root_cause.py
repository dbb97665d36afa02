"""Reports of failures to torchrun, and which rank they blame."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aiocomms.diagnosis import root_cause
from aiocomms.errors import CommAbortedError, CommError, CommTimeoutError, MismatchError, PeerDiedError
from aiocomms.lowlevel import clock

pytestmark = [pytest.mark.deterministic, pytest.mark.fault(126)]


def wrapped(cause: BaseException) -> RuntimeError:
    error = RuntimeError("the step failed")
    error.__cause__ = cause
    return error


OTHERS = {
    "aborted": CommAbortedError("aborted by rank 1", rank=0, peer=1),
    "gone": PeerDiedError("rank 1 is gone", rank=0, peer=1),
    "late": CommTimeoutError("ranks 1 and 2 were missing", rank=0, late=[1, 2]),
    "wrapped": wrapped(PeerDiedError("rank 1 is gone", rank=0, peer=1)),
    "all of a group": ExceptionGroup("", [CommAbortedError("aborted by rank 1", rank=0, peer=1)]),
}
ITS_OWN = {
    "the program's": ValueError("no"),
    "its own abort": CommAbortedError("aborted by rank 0", rank=0, peer=0),
    "it was late itself": CommTimeoutError("ranks 0 and 1 were missing", rank=0, late=[0, 1]),
    "nobody is named": CommError("UCX could not do it"),
    "ranks that disagree": MismatchError("rank 1 calls a barrier", rank=0, peer=1),
    "one of a group": ExceptionGroup("", [ValueError("no"), PeerDiedError("rank 1 is gone", rank=0, peer=1)]),
}


@pytest.mark.parametrize("error", [*OTHERS.values(), *ITS_OWN.values()], ids=[*OTHERS, *ITS_OWN])
@pytest.mark.parametrize("recorded", [True, False], ids=["by torch's record, too", "by us alone"])
def test_process_that_blames_another_rank_exits_later(
    error: Exception, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, slept = tmp_path / "error.json", list[float]()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(clock, "wall", lambda: 1000.25)
    monkeypatch.setattr(clock, "sleep", slept.append)
    if recorded:
        file.write_text("torch's")
    root_cause.tell_torchrun()
    sys.excepthook(type(error), error, None)
    others = error in OTHERS.values()
    assert slept == ([root_cause.PATIENCE] if others else [])
    if recorded and not others:
        assert file.read_text() == "torch's"
        return
    message = json.loads(file.read_text())["message"]
    assert message["message"] == f"{type(error).__name__}: {error}"
    assert message["extraInfo"]["timestamp"] == ("1003" if others else "1000")
    assert str(error) in message["extraInfo"]["py_callstack"]


def test_excepthook_is_unchanged_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook
    root_cause.tell_torchrun()
    assert sys.excepthook is before
