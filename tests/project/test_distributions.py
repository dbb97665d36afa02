"""What is uploaded, before it is built: `make wheels` builds it, and `make test-wheels` tries it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import aiocomms_ucx
import pytest
from processes import HANGS

import aiocomms

ROOT = Path(__file__).parents[2]
UCX = ROOT / "transports" / "ucx"
CORE, ENGINE = (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, UCX))


def test_both_are_of_one_version_wherever_it_stands():
    version = aiocomms.__version__
    assert aiocomms_ucx.__version__ == CORE["version"] == ENGINE["version"] == version
    assert CORE["optional-dependencies"]["ucx"] == [f"aiocomms-ucx[cu13]=={version}"]
    assert CORE["optional-dependencies"]["ucx-cu12"] == [f"aiocomms-ucx[cu12]=={version}"]
    assert ENGINE["dependencies"] == [f"aiocomms=={version}"]


@pytest.mark.processes
def test_an_engine_of_another_version_says_so():
    code = "import aiocomms; aiocomms.__version__ = '9.0'; import aiocomms_ucx"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode == 1
    ours = aiocomms.__version__
    assert f"ImportError: aiocomms-ucx {ours} works with aiocomms {ours} alone, and aiocomms 9.0" in ended.stderr
    assert "is installed: pip install 'aiocomms[ucx]==9.0'" in ended.stderr


def test_both_have_the_license_with_them():
    for folder, project in ((ROOT, CORE), (UCX, ENGINE)):
        assert project["license-files"] == ["LICENSE"]
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
