"""Prints the table: see :mod:`benchmarks.structure`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.structure import sources, ways

HERE = Path(__file__).parents[2]
Row = tuple[str, str]


def rows(root: Path, walks: dict[str, ways.Walk | None]) -> Iterator[Row]:
    """What is counted, and how much."""
    checkout = sources.Checkout(root)
    yield from ((f"modules in `{folder}`", str(count)) for folder, count in checkout.folders().items())
    yield "import floors, without testing", str(sources.floors(checkout.graph(testing=False)))
    yield "circles", circles(checkout.graph())
    yield "circles, types included", circles(checkout.graph(types=True))
    yield "circles, types and imports in functions included", circles(checkout.graph(types=True, functions=True))
    yield from private(checkout)
    for transport, modules in checkout.transports.items():
        imported = {name for m in modules.values() for name in checkout.core_imports(m, types=True, functions=True)}
        names = ", ".join(sorted(module.removeprefix("aiocomms.") for module in imported))
        yield f"imported by `{transport}`", f"{len(imported)}: {names}"
    for name in ("Communicator", "Work", "Driver"):
        members = checkout.members(name)
        hidden = {attribute for attribute in members.attributes if attribute.startswith("_")}
        yield f"attributes of `{name}`, public + private", f"{len(members.attributes - hidden)} + {len(hidden)}"
        yield f"public methods of `{name}`", str(sum(not method.startswith("_") for method in members.methods))
    yield from engine(root)
    for way, title in ways.WAYS.items():
        yield f"{title}: calls / files / changes of file", "n/a" if walks[way] is None else str(walks[way])


def circles(graph: sources.Graph) -> str:
    """How many, and of how many modules."""
    sizes = [len(circle) for circle in sources.circles(graph)]
    return str(len(sizes)) + (f" (of {', '.join(map(str, sizes))} modules)" if sizes else "")


def private(checkout: sources.Checkout) -> Iterator[Row]:
    """Private names used across modules."""
    library = [checkout.core, *checkout.transports.values()]
    for title, packages in (("the library", library), ("tests", [checkout.tests])):
        uses = checkout.private_uses([module for package in packages for module in package.values()])
        yield f"private names used across modules, {title}", f"{len(uses)} places, {len(set(uses))} distinct"


def engine(root: Path) -> Iterator[Row]:
    """The C++ class."""
    found = sources.engine(root)
    figures = ("n/a",) * 3 if found is None else (len(found.data), len(found.methods), len(found.friends))
    for what, figure in zip(("data members", "methods", "friends"), figures, strict=True):
        yield f"{what} of `Engine`", str(figure)


def table(roots: list[Path], walks: list[dict[str, ways.Walk | None]]) -> Iterator[str]:
    """The lines of the Markdown table, a column for each root; what only one of them has stands where it has it."""
    columns = [dict(rows(root, walked)) for root, walked in zip(roots, walks, strict=True)]
    titles = list(columns[-1])
    for before in columns[:-1]:  # a folder that is gone comes where it was
        for title, following in zip([None, *before], before, strict=False):
            if following not in titles:
                titles.insert(titles.index(title) + 1 if title in titles else 0, following)
    heads = ["now"] if len(roots) == 1 else ["before", "after"]
    yield " | ".join(["| counted", *heads]) + " |"
    yield "|---" * (1 + len(roots)) + "|"
    for title in titles:
        yield " | ".join([f"| {title}", *(column.get(title, "-") for column in columns)]) + " |"


def main() -> None:
    """Measure one checkout or two."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure", description="How the code is built, in figures."
    )
    parser.add_argument("root", nargs="*", type=Path, help="a checkout (default: this one), or two: before and after")
    parser.add_argument("--calls", action="store_true", help="list what is called on each way, too")
    args = parser.parse_args()
    roots = [root.resolve() for root in args.root or [HERE]]
    if len(roots) > 2:
        parser.error(f"{len(roots)} roots, wanted at most two: before and after")
    for root in roots:
        if not (root / "aiocomms" / "__init__.py").is_file():
            parser.error(f"root is {root}, wanted a checkout: there is no aiocomms/__init__.py in it")
    walks = [{way: ways.middle_walk(root, way) for way in ways.WAYS} for root in roots]
    print("\n".join(table(roots, walks)))
    for root, walked in zip(roots, walks, strict=True) if args.calls else ():
        for way, found in walked.items():
            if found is not None:
                print(f"\n{ways.WAYS[way]}, in {root}:", *found.listing(), sep="\n    ")


if __name__ == "__main__":
    main()
