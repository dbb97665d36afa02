"""The measurements of a host by its first engine: they are kept for the user, and its ranks agree on them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aiocomms_ucx import speeds
from aiocomms_ucx._engine import MEASURED_BYTES, measure_speeds
from aiocomms_ucx.speeds import Found, Speeds
from processes import Rank, Run, runner

from aiocomms.cli import main as command
from aiocomms.testing import local_world

pytestmark = pytest.mark.deterministic


class Measurement:
    """A host's speeds, and how often it was measured."""

    def __init__(self, read: int = 6000, copied: int = 6200) -> None:
        self.result, self.calls = (read, copied), 0

    def __call__(self) -> tuple[int, int]:
        self.calls += 1
        return self.result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for what programs keep; not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def find(measure: Measurement) -> Found:
    return speeds._find(speeds._path(), measure)


def test_measured_speeds_are_cached_in_a_private_file(folder: Path) -> None:
    measure = Measurement()
    first, second = find(measure), find(measure)
    assert measure.calls == 1
    assert first.speeds == second.speeds
    assert (first.speeds.read, first.speeds.copied) == measure.result
    (kept,) = (folder / "aiocomms").iterdir()
    assert second.origin == f"kept in {kept}"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 10_000,
        b'{"processor": "another", "system": "s", "version": "v", "read": 1, "copied": 1}',
    ],
    ids=["empty", "bytes", "list", "fields", "nested", "place"],
)
def test_malformed_speed_file_is_measured_again_and_replaced(folder: Path, content: bytes) -> None:
    path = speeds._path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    measure = Measurement()
    assert (find(measure).speeds.read, find(measure).speeds.copied, measure.calls) == (*measure.result, 1)


@pytest.mark.parametrize("field", ["processor", "system", "version"])
def test_speed_file_of_another_host_or_version_is_measured_again(folder: Path, field: str) -> None:
    find(Measurement(1, 1))
    path = speeds._path()
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: "another"}))
    measure = Measurement()
    assert find(measure).speeds.read == measure.result[0]


@pytest.mark.parametrize("value", [0, -1, 10**10, 1.5, "1"])
def test_invalid_time_in_the_speed_file_is_measured_again(folder: Path, value: object) -> None:
    find(Measurement())
    path = speeds._path()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"read": value}))
    measure = Measurement()
    assert (find(measure).speeds.read, measure.calls) == (measure.result[0], 1)


def test_hosts_that_share_a_cache_folder_have_their_own_speed_files(folder: Path, tmp_path: Path) -> None:
    paths = set()
    for name, about in (
        ("intel", "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\n"),
        ("amd", "processor\t: 0\nmodel name\t: AMD EPYC\n"),
        ("arm", "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"),
        ("arm2", "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd40\n"),
    ):
        (tmp_path / name).write_text(about)
        paths.add(speeds._path(tmp_path / name))
    paths.add(speeds._path(tmp_path / "absent"))
    assert len(paths) == 5


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_speed_file_that_is_no_regular_file_is_not_read(folder: Path, tmp_path: Path, kind: str) -> None:
    find(Measurement(1, 1))
    path = speeds._path()
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    measure = Measurement()
    assert find(measure).speeds.read == measure.result[0]
    assert [entry for entry in path.parent.iterdir() if entry != path] == []


def test_speed_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find(Measurement(1, 1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    measure = Measurement()
    assert find(measure).speeds.read == measure.result[0]


@pytest.mark.parametrize("where", ["file", "relative"])
def test_unwritable_cache_folder_measures_without_caching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if where == "file" else "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # a relative path is to be ignored
    assert find(Measurement()).origin == "measured now"


def test_user_without_a_home_measures_without_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert find(Measurement()).origin == "measured now"


def test_unsupported_kernel_read_is_not_cached(folder: Path) -> None:
    measure = Measurement(read=0)
    assert [find(measure).speeds for _ in range(2)] == [None, None]
    assert measure.calls == 2
    assert not folder.exists()


@pytest.mark.parametrize(("read", "copied", "in_place"), [(47, 14, False), (59, 62, True), (70, 62, True)])
def test_quicker_of_read_and_copy_is_chosen(read: int, copied: int, in_place: bool) -> None:
    assert Speeds("processor", "system", "version", read, copied).reads_in_place is in_place


def test_measure_speeds_returns_positive_times() -> None:
    assert min(measure_speeds()) > 0
    assert MEASURED_BYTES == 128 * 1024


@pytest.fixture
def unknown(folder: Path) -> Iterator[None]:
    """Nothing is known of this host in this process."""
    speeds.find.cache_clear()
    yield
    speeds.find.cache_clear()


@pytest.mark.parametrize("measure", [Measurement(47_000, 14_000), Measurement(read=0)], ids=["slots", "refused"])
def test_info_shows_the_speeds_and_their_origin(
    unknown: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measure: Measurement
) -> None:
    monkeypatch.setattr(speeds, "measure_speeds", measure)
    assert command(["info"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "parts of 128 KiB" in line)
    if measure.result[0] == 0:
        assert line.endswith("through slots: the kernel lets no process read another's memory")
        return
    assert "through slots: the kernel reads one in 47.0 µs, two copies take 14.0 µs" in line
    assert f"measured now, kept in {speeds._path()}" in line
    speeds.find.cache_clear()
    assert command(["info"]) == 0
    assert f"kept in {speeds._path()}" in capsys.readouterr().out
    assert measure.calls == 1


async def measured_when_ranks_share_a_host(measure: Measurement) -> None:
    async with local_world(1, "ucx") as world:
        await world[0].barrier()
    assert measure.calls == 0
    async with local_world(3, "ucx") as world:
        assert len(world) == 3
    assert measure.calls == 1


def test_first_rank_of_a_host_measures_its_speeds_once(
    unknown: None, monkeypatch: pytest.MonkeyPatch, run: object
) -> None:
    measure = Measurement()
    monkeypatch.setattr(speeds, "measure_speeds", measure)
    run(measured_when_ranks_share_a_host, measure)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Run]:
    with runner("ucx", tmp_path) as run:
        yield run


async def of_two_minds(place: Rank) -> set[bool]:
    """Each rank would find another way the better one; large parts arrive all the same."""
    mine = Speeds("processor", "system", "version", 1 if place.rank == 1 else 10, 2)
    speeds.find = lambda: Found(mine, "forced")
    taken, count = set(), 2**18
    async with place.open(timeout=30) as comm, await comm.split([0, 1]) as half:
        for where in (comm, half):
            (carrier,) = where._core.transports
            taken.add(carrier.ranks.in_place)
            gathered = torch.zeros(count * where.size)
            await where.all_gather_single(gathered, torch.full((count,), float(place.rank)))
            assert gathered.view(where.size, count).unique(dim=1).flatten().tolist() == list(range(where.size))
    assert mine.reads_in_place is (place.rank == 1)
    return taken


@pytest.mark.real
def test_ranks_agree_though_their_measurements_differ(ranks: Run) -> None:
    assert ranks(2, of_two_minds) == [{False}, {False}]
