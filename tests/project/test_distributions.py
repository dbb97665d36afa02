"""The distributions to upload, before they are built: `make wheels` builds them, and `make test-wheels` tries them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import aiocomms_ucx
import pytest
import yaml
from markdown_it import MarkdownIt
from processes import HANGS

import aiocomms
from wheels import check, pythons, sysroot

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
UCX = ROOT / "transports" / "ucx"
CORE, ENGINE = (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, UCX))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_both_distributions_have_one_version_everywhere():
    version = aiocomms.__version__
    assert aiocomms_ucx.__version__ == CORE["version"] == ENGINE["version"] == version
    assert CORE["optional-dependencies"]["ucx"] == [f"aiocomms-ucx[cu13]=={version}"]
    assert CORE["optional-dependencies"]["ucx-cu12"] == [f"aiocomms-ucx[cu12]=={version}"]
    assert ENGINE["dependencies"] == [f"aiocomms=={version}"]


@pytest.mark.search
@pytest.mark.real
def test_import_of_an_engine_of_another_version_fails_with_advice():
    code = "import aiocomms; aiocomms.__version__ = '9.0'; import aiocomms_ucx"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == 1
    ours = aiocomms.__version__
    assert f"ImportError: aiocomms-ucx {ours} works with aiocomms {ours} alone, and aiocomms 9.0" in ended.stderr
    assert "is installed: pip install 'aiocomms[ucx]==9.0'" in ended.stderr


def test_both_distributions_include_the_license():
    for folder, project in ((ROOT, CORE), (UCX, ENGINE)):
        assert project["license-files"] == ["LICENSE"]
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.search
@pytest.mark.real
@pytest.mark.parametrize("folder", [ROOT, UCX], ids=["aiocomms", "aiocomms-ucx"])
def test_pypi_readme_has_only_absolute_links(folder):
    """There is none around it: whatever is linked or shown has an address."""
    tool = Path(sys.executable).with_name("hatch-fancy-pypi-readme")
    shown = subprocess.run([tool], cwd=folder, capture_output=True, text=True, timeout=HANGS, check=True).stdout
    addresses = re.findall(r"""(?:href|src)=["']([^"']*)""", MarkdownIt().enable("table").render(shown))
    assert [address for address in addresses if not address.startswith("https://")] == []
    assert "pip install 'aiocomms[ucx]'" in shown


def test_declared_python_versions_are_those_of_the_wheels():
    built = re.search(r"^WHEEL_PYTHONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for project in (CORE, ENGINE):
        declared = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", it) for it in project["classifiers"]]
        assert [it[1] for it in declared if it] == built
    boxes = tomllib.loads((UCX / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    assert boxes == [f"cp{version.replace('.', '')}-manylinux_*" for version in built]
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]["wheels"]["steps"]
    setup = next(step for step in jobs if "setup-python" in step.get("uses", ""))
    assert sorted(setup["with"]["python-version"].split()) == built


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_step_is_a_make_target(workflow):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", [])
        steps = [step["run"] for step in job["steps"] if "run" in step]
        for step in steps:
            assert step.startswith(("make ", "sudo apt-get "))
            named = step.removeprefix("make ").split()
            if named == ["${{", "matrix.target", "}}"]:
                assert set(matrix) <= targets
            elif step.startswith("make "):
                assert set(named) <= targets


def test_readme_blocks_are_those_that_the_check_runs():
    blocks = [mark for mark, _ in check.BLOCK.findall((ROOT / "README.md").read_text())]
    assert sorted(blocks) == ["file: hello.py", "run", "wheels"]


@pytest.mark.search
@pytest.mark.real
def test_find_accepts_the_path_of_an_interpreter():
    found = pythons.find(sys.executable)
    assert found is not None
    assert found.version == sys.version_info[:2]


@pytest.mark.search
@pytest.mark.real
def test_missing_interpreter_is_reported(capsys):
    assert pythons.find_all(["9.9", "/nowhere/python"]) == []
    said = capsys.readouterr().out
    assert "no Python 9.9 on PATH or in pyenv" in said
    assert "no Python /nowhere/python" in said


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.search
@pytest.mark.real
def test_find_takes_the_newest_pyenv_version_behind_a_refusing_shim(tmp_path, monkeypatch):
    """A shim of pyenv ends with 127 where another version is chosen; of pyenv's versions the newest is taken."""
    program(tmp_path / "bin" / "python8.1", "exit 127")
    program(tmp_path / "bin" / "pyenv", f"echo {tmp_path}")
    for patch in (9, 10):
        program(tmp_path / "versions" / f"8.1.{patch}" / "bin" / "python", f"echo /there/8.1.{patch} 8 1")
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "bin"), "/usr/bin", "/bin")))
    assert pythons.find("8.1") == pythons.Python("/there/8.1.10", (8, 1))


def test_sysroot_includes_the_python_headers_of_this_machine(tmp_path):
    """Debian's interpreters keep pyconfig.h in the folder of the kind of processor, which the compiler does not see."""
    headers, root = tmp_path / "usr" / "include" / "x86_64-linux-gnu", tmp_path / "root"
    (headers / "python3.14").mkdir(parents=True)
    (headers / "python3.14" / "pyconfig.h").write_text("here")
    (root / headers.relative_to("/")).mkdir(parents=True)
    for _ in range(2):  # again, as in the next build
        sysroot.let_in_pythons(root, headers)
    assert (root / headers.relative_to("/") / "python3.14" / "pyconfig.h").read_text() == "here"
