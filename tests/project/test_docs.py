"""The documentation holds: its code runs, its links lead somewhere, and the reference leaves nothing out.

Python blocks of one page are run in order in one namespace; one that awaits at top level gets an event loop of its own.
A comment above a block says what else to do with it, and is invisible on the page:

* ``<!-- file: NAME -->``: write it to a file in a folder of the page's own, for a later block to use;
* ``<!-- run -->``: run the block's ``$ `` commands in that folder, and look for the other lines in what they print.
"""

from __future__ import annotations

import ast
import asyncio
import codeop
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

import aiocomms
from aiocomms import errors
from docs import chart

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "transports" / "README.md",
        ROOT / "changes" / "README.md",
    ]
)
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
# Pages whose code waits for no clock, and starts no process.
BY_THEMSELVES = {
    "arrays.md",
    "cancellation.md",
    "messages.md",
    "metrics.md",
    "notebook.md",
    "recovery.md",
    "reference.md",
    "serving.md",
}
FOR_HOSTS = ["ray.md", "running.md"]  # tests/hosts and tests/launchers run their code
SEARCHED = {
    "README.md",
    "index.md",
    "live.md",
    "mpi4py.md",
    "resharding.md",
    "torch-distributed.md",
    "which-way.md",
}  # The search runs these: the gate has as many real tests as it may have.
BOUND = 240.0  # seconds after which a command hangs

FENCE = re.compile(r"(?:^<!-- (run|file: (\S+)) -->\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    """A page's path within the repository."""
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    mark: str
    file: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are to be run or written to a file."""
    text = page.read_text()
    found = [
        Block(page, text.count("\n", 0, match.start(4)), *(group or "" for group in match.groups()))
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if block.mark or block.language == "python"]


class Session:
    """A page being worked through."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self.namespace: dict[str, object] = {"__name__": page.stem}

    def run(self, block: Block) -> None:
        if block.file:
            (self.folder / block.file).write_text(block.text)
            if block.file == "pyproject.toml":
                self.install(tomllib.loads(block.text)["project"])
        elif block.mark:
            self.run_commands(block.text)
        else:
            self.run_python(block)

    def run_python(self, block: Block) -> None:
        source = "\n" * block.line + block.text
        code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, self.namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(result)

    def run_commands(self, text: str) -> None:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *wanted = part.splitlines()
            output = self.run_command(shlex.split(command))
            for line in wanted:
                assert line in output, f"{command!r} did not print {line!r}, but\n{output}"

    def run_command(self, command: list[str]) -> str:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = os.environ | {"PATH": path, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=BOUND)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its workers then
                raise
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
        return output

    def install(self, project: dict) -> None:
        """Enter the entry points as ``pip install --editable`` does, without pip."""
        info = self.folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        lines = [line for group, names in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines))


def kind_of(page: Path) -> list[pytest.MarkDecorator]:
    """Return the marks of the test of a page."""
    if page.name in BY_THEMSELVES:
        return [pytest.mark.deterministic, pytest.mark.slow]
    return [pytest.mark.real, pytest.mark.search] if page.name in SEARCHED else [pytest.mark.real]


@pytest.mark.every_case
@pytest.mark.timeout(4 * BOUND)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=kind_of(page)) for page in PAGES if page.name not in FOR_HOSTS and blocks_of(page)],
    ids=name_of,
)
def test_every_code_block_of_a_page_runs(page, tmp_path, monkeypatch):
    """Run all blocks of a page, one after another. They import the files that the page writes."""
    session = Session(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks_of(page):
        monkeypatch.delitem(sys.modules, Path(block.file).stem, raising=False)
        session.run(block)


def test_blocks_that_are_typed_into_the_interpreter_are_complete_line_by_line():
    """An empty line ends a function there before Python 3.13, and no line at the margin may follow a block directly."""
    wrong = []
    for page in PAGES:
        if re.search(r"`python\s-m\sasyncio`", page.read_text()):
            for block in blocks_of(page):
                wrong += [] if block.file or block.mark else untypable(block)
    assert not wrong, "\n".join(wrong)


def untypable(block: Block) -> list[str]:
    """Return the first line that the interpreter would refuse."""
    command, lines = codeop.CommandCompiler(), []
    command.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for number, line in enumerate([*block.text.splitlines(), ""], block.line + 1):
        lines.append(line)
        try:
            if command("\n".join(lines), symbol="single") is not None:
                lines.clear()
        except SyntaxError as error:
            return [f"{name_of(block.page)}:{number}: {error}"]
    return [f"{block}: incomplete"] if any(lines) else []


def test_every_file_that_a_page_writes_is_used():
    """Code that is only written to a file has not been run."""
    wrong = []
    for blocks in map(blocks_of, PAGES):
        for block in blocks:
            later = "".join(other.text for other in blocks if other.line > block.line)
            if block.file and block.file != "pyproject.toml" and Path(block.file).stem not in later:
                wrong.append(f"{block}: nothing uses {block.file}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------------------ links


def prose(page: Path) -> str:
    """Return a page with its lines, but without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def fault_of(link: str, page: Path) -> str:
    """Say what is wrong with a link; an empty text if nothing is."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if ":" in path:
        return ""
    if not target.exists():
        return "leads nowhere"
    if anchor and anchor not in anchors(target):
        return "names no heading"
    # The site is made of docs/ alone.
    return (
        "leads out of docs/" if page.is_relative_to(ROOT / "docs") and not target.is_relative_to(ROOT / "docs") else ""
    )


def test_every_link_has_a_target():
    wrong = [
        f"{name_of(page)}:{number}: {link} {fault}"
        for page in PAGES
        for number, line in enumerate(prose(page).splitlines(), 1)
        for link in re.findall(r"\]\(([^)\s]+)\)", line)
        if (fault := fault_of(link, page))
    ]
    assert not wrong, "\n".join(wrong)


TREE = re.compile(r"(?:^```\{toctree\}|^\.\. toctree::)\n(.*?)(?:^```$|\Z)", re.MULTILINE | re.DOTALL)


def test_every_page_is_in_the_navigation():
    """A new page has a line in a ``toctree``, and in the table above that: of how-to.md, explanation.md, project.md."""
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    for page in [*docs.rglob("*.md"), *docs.rglob("*.rst")]:
        for tree in TREE.findall(page.read_text()):
            names = [re.sub(r".*<(.*)>", r"\1", line.strip()) for line in tree.splitlines()]
            listed |= {page.parent / f"{name}{suffix}" for name in names for suffix in (".md", ".rst")}
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md") if page not in listed} == set()


@pytest.mark.parametrize(("name", "figures"), [("why.png", chart.medians), ("why-gpu.png", chart.ratios)])
def test_chart_shows_the_figures_of_its_page(name, figures):
    with Image.open(ROOT / "docs" / name) as image:
        assert image.text["Description"] == chart.described(figures())


def test_make_targets_named_in_pages_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake (\w+)`", page.read_text())}
    assert named <= targets


# -------------------------------------------------------------------------------------------------------- reference

CLASSES = [
    aiocomms.Communicator,
    aiocomms.Window,
    aiocomms.Work,
    aiocomms.ItemStream,
    aiocomms.TensorStream,
    aiocomms.Portal,
    aiocomms.BlockingWork,
]


def section(title: str) -> str:
    """The part of the reference under a heading of the second level."""
    return REFERENCE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def public(cls: type) -> set[str]:
    """The public names of a class, without what it only inherits from another library."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("aiocomms")]
    return {name for base in own for name in vars(base) if not name.startswith("_") and hasattr(cls, name)}


def test_reference_has_every_method():
    wrong = [
        f"{cls.__name__}.{name}"
        for cls in CLASSES
        for name in sorted(public(cls))
        if not re.search(rf"`(await )?{name}\b", section(cls.__name__))
    ]
    assert not wrong, "\n".join(wrong)


def test_reference_has_every_member_that_a_lane_adds():
    """Its operations are the communicator's, and are told there."""
    shared = {name for base in aiocomms.Lane.__bases__ for name in dir(base)}
    own = {name for name in vars(aiocomms.Lane) if not name.startswith("_")} - shared
    assert {name for name in own if not re.search(rf"`(await )?{name}\b", section("Lane"))} == set()


def test_reference_has_the_signatures():
    """Names, order and defaults of the arguments; ``hints`` and ``timeout`` are said once for all."""
    wrong = []
    for cls in CLASSES:
        for name, given in re.findall(r"`(?:await )?(\w+)\(([^`]*)\)`", section(cls.__name__)):
            if hasattr(cls, name) and re.sub(r"\s", "", given) != (wanted := signature(getattr(cls, name))):
                wrong.append(f"{cls.__name__}.{name}({given}): wanted {wanted}")
    assert not wrong, "\n".join(wrong)


def signature(function: object) -> str:
    """A function's arguments as the reference writes them."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "hints") or (
            parameter.name == "timeout" and parameter.kind is parameter.KEYWORD_ONLY
        ):
            continue
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        parts.append(f"{parameter.name}{default}")
    return ",".join(parts)


def shown(value: object) -> str:
    """A default as the reference writes it."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__name__}"
    return str(value).upper() if isinstance(value, aiocomms.ReduceOp) else repr(value).replace("'", '"')


def test_reference_has_every_public_name():
    assert {name for name in aiocomms.__all__ if f"`{name}" not in REFERENCE} == set()


def test_reference_has_every_function():
    text = section("aiocomms.functional")
    functions = [
        name
        for name, value in inspect.getmembers(aiocomms.functional, inspect.isfunction)
        if value.__module__ == "aiocomms.functional" and not name.startswith("_")
    ]
    assert {name for name in functions if f"`{name}(" not in text} == set()


def test_reference_has_every_error():
    assert {name for name in errors.__all__ if f"`{name}`" not in section("Errors")} == set()


def test_guide_has_every_member_of_a_transport():
    guide = (ROOT / "docs" / "transports.md").read_text()
    members = {name for name in vars(aiocomms.Transport) if not name.startswith("_")}
    fields = set(aiocomms.Capabilities.__struct_fields__)
    assert {name for name in members | fields if not re.search(rf"^\| `{name}\b", guide, re.MULTILINE)} == set()


def test_reference_has_every_environment_variable():
    """The environment variables that the code reads are those that the reference lists."""
    sources = [*(ROOT / "aiocomms").rglob("*.py"), *(ROOT / "transports").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"AIOCOMMS_[A-Z_]+", source.read_text())}
    assert read == set(re.findall(r"AIOCOMMS_[A-Z_]+", section("Environment variables")))
