"""Transports of the tests' own, installed as plug-ins."""

from __future__ import annotations

from pathlib import Path


def installed(folder: Path, **transports: str) -> Path:
    """Write the metadata by which transports are found to a folder, which is to be on the path.

    :param transports: the module and class of each, by name.
    """
    info = folder / "fake-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in transports.items()]
    (info / "entry_points.txt").write_text("\n".join(["[aiocomms.transports]", *lines, ""]))
    return folder
