"""``aiocomms info``."""

from __future__ import annotations

import importlib
import json

import pytest

import aiocomms
from aiocomms.cli import info, main

pytestmark = pytest.mark.deterministic


def test_info_json_holds_the_sections_of_the_text_output(capsys, monkeypatch):
    monkeypatch.setenv("AIOCOMMS_TOKEN", "of nobody's business")
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "transports", "devices", "interfaces", "environment", "next"]
    assert found["versions"]["aiocomms"].startswith(aiocomms.__version__)
    assert found["transports"]["local on cpu"].startswith("available")
    assert found["environment"]["AIOCOMMS_TOKEN"] == "set, and not shown"
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{name}:" for name in found]
    for section in found.values():
        for name, value in section.items():
            assert any(line.split() == [*name.split(), *value.split()] for line in lines), name


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"aiocomms-ucx"}, {"try": "aiocomms bench"}),
        (set(), {"install": "pip install 'aiocomms[ucx]'"}),
    ],
)
def test_info_ends_with_the_part_that_lacks_or_what_to_try(monkeypatch, capsys, installed, expected):
    monkeypatch.setattr(info, "_is_installed", installed.__contains__)
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] == expected


@pytest.mark.fault(125)
def test_python_dash_m_aiocomms_runs_the_command():
    assert importlib.import_module("aiocomms.__main__").main is main
