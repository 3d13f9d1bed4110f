"""`python -m llmlab.data`: bring public traces and corpora to this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from llmlab.bench import datasets, fetch
from llmlab.bench.datasets import CATALOGUE, Dataset, find

__all__ = ["find", "main"]

_DESCRIPTION = """\
Bring public traces and corpora to this machine.

llmlab ships no third-party data. This command fetches it from its public source (or takes it from
a folder of yours), checks its sha256 and keeps it in a cache folder.
"""

_EPILOG = """\
examples:
  python -m llmlab.data list                    what there is, its licence, what is already here
  python -m llmlab.data get azure2023_conv      download one data set
  python -m llmlab.data import ~/Downloads      take the known files of a folder (no network)

then replay it:
  python -m llmlab.run workload=trace workload.path=data:azure2023_conv workload.n_requests=64

exit codes: 0 done, 1 not brought here, 2 wrong use.
"""

_SHOWN_IGNORED = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.data",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help=f"folder to keep data in (default: {datasets.cache_folder()}, which is the one that "
        "workload.path=data:NAME looks into)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("list", parents=[shared], help="show the data sets and what is cached")
    get = commands.add_parser("get", parents=[shared], help="download a data set")
    get.add_argument("name", metavar="NAME", help="as shown by `list`")
    bring = commands.add_parser(
        "import", parents=[shared], help="take known files from a folder on this machine"
    )
    bring.add_argument("folder", metavar="FOLDER", type=Path, help="searched with its subfolders")
    return parser


def main(argv: Sequence[str] | None = None, catalogue: Mapping[str, Dataset] = CATALOGUE) -> int:
    """Run the command; its exit code."""
    args = _parser().parse_args(argv)
    cache: Path = (args.cache or datasets.cache_folder()).expanduser()
    try:
        if args.command == "list":
            return _list(catalogue, cache)
        if args.command == "get":
            return _get(args.name, catalogue, cache)
        return _import(args.folder.expanduser(), catalogue, cache)
    except fetch.FetchError as error:
        print(error, file=sys.stderr)
        return 1


def _list(catalogue: Mapping[str, Dataset], cache: Path) -> int:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 1, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    table.add_column("what, source, whether cached", overflow="fold")
    for d in catalogue.values():
        path = datasets.cached(d, cache)
        here = "[dim]not cached[/dim]" if path is None else f"[green]cached[/green] as {path.name}"
        about = f"{d.what}\n{d.source}\n{here}"
        table.add_row(d.name, f"{d.download.bytes:,}", d.licence, about)
    Console(highlight=False).print(table)
    print(f"cache: {cache}/<name>/")
    return 0


def _get(name: str, catalogue: Mapping[str, Dataset], cache: Path) -> int:
    dataset = catalogue.get(name)
    if dataset is None:
        print(f"{name}: no such data set (allowed: {', '.join(catalogue)})", file=sys.stderr)
        return 2
    path = fetch.intact(dataset, cache)
    verb = "already here" if path else "fetched"
    path = path or fetch.download(dataset, cache)
    print(f"{name}: {verb}: {path} (licence {dataset.licence}, source {dataset.source})")
    return 0


def _import(folder: Path, catalogue: Mapping[str, Dataset], cache: Path) -> int:
    if not folder.is_dir():
        print(f"{folder}: no such folder", file=sys.stderr)
        return 2
    result = fetch.import_folder(folder, catalogue.values(), cache)
    for name, path in result.taken:
        print(f"taken    {name}: {path} (licence {catalogue[name].licence})")
    for path, reason in result.refused:
        print(f"refused  {path}: {reason}", file=sys.stderr)
    for path in result.ignored[:_SHOWN_IGNORED]:
        print(f"ignored  {path}")
    if len(result.ignored) > _SHOWN_IGNORED:
        print(f"ignored  {len(result.ignored) - _SHOWN_IGNORED} more files")
    if not result.taken and not result.refused:
        known = ", ".join(f.name for d in catalogue.values() for f in (d.download, *d.forms))
        print(f"{folder}: holds no known file (known: {known})", file=sys.stderr)
    return 1 if result.refused or not result.taken else 0


if __name__ == "__main__":
    sys.exit(main())
