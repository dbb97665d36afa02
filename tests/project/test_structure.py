"""What must stay of the structure's figures, which `make structure` prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.structure import sources, ways

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
DEATH_CALLS, DEATH_FILES = 80, {"ucx": 9, "c10d": 10}
"""Fewer than these, from the socket to the task that is woken."""


def test_no_import_goes_round_not_even_of_types():
    assert sources.circles(sources.Checkout(ROOT).graph(types=True, functions=True)) == []


@pytest.mark.search
@pytest.mark.real
@pytest.mark.parametrize("transport", ["c10d", "ucx"])
def test_a_peers_death_takes_few_calls(transport):
    walk = ways.walk(ROOT, transport)
    if walk is None:
        pytest.skip("no engine was built")
    assert (len(walk.functions) < DEATH_CALLS, walk.files < DEATH_FILES[transport]) == (True, True), walk.listing()


def test_circles_and_floors():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"d"}}
    assert sources.circles(graph) == [["b", "c"]]
    assert sources.floors(graph) == 3


def test_members_count_bases_and_what_methods_assign(tmp_path):
    package = tmp_path / "aiocomms"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base:\n    def up(self): self._up = 1\n")
    (package / "top.py").write_text(
        "class Top(base.Base):\n    x: int = 0\n    __slots__ = ('y',)\n    @property\n    def z(self): ...\n"
    )
    (package / "user.py").write_text("def use(top): return top._up, top._unknown\n")
    checkout = sources.Checkout(tmp_path)
    assert checkout.members("Top") == ({"x", "y", "z", "_up"}, {"up"})
    assert checkout.private_uses(checkout.core.values()) == ["aiocomms.user: _up"]


def test_the_engine_is_read_from_its_header(tmp_path):
    header = tmp_path / "transports" / "ucx" / "src" / "engine.hpp"
    header.parent.mkdir(parents=True)
    header.write_text(
        "struct Engine;\nclass Engine {\n public:\n  Engine(int a);\n  ~Engine();\n"
        "  int f() const { return a_; }  // g();\n"
        "  void h(int b = now());\n private:\n  friend class Wire;\n  struct Job { int c_; };\n  int a_ = now();\n"
        "  std::map<int, int> m_;\n};\nint k();\n"
    )
    assert sources.engine(tmp_path) == ({"a_", "m_"}, {"f", "h"}, {"Wire"})


@pytest.mark.search
@pytest.mark.real
def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    command = [sys.executable, "-m", "benchmarks.structure", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"root is {tmp_path}, wanted a checkout" in refused.stderr


def test_each_class_of_the_engine_has_a_name_of_its_own():
    """The linker would take one of two for both, and what a template makes of it would corrupt memory."""
    names = Counter(
        name
        for header in (ROOT / "transports" / "ucx" / "src").rglob("*.hpp")
        for name in re.findall(r"^(?:class|struct|enum class) (\w+)[^;(]*\{", header.read_text(), re.MULTILINE)
    )
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []
