"""The command ``kvfabric verify-certificates``: check a certificate log and say what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from codec.errors import CertificateError
from fabric.output import FileError, writable, write_json
from policies.certificate_lines import MAX_LINE_BYTES
from policies.certificates import Report, verify


@click.command(name="verify-certificates")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=writable, help="Write the findings."
)
def verify_certificates(*, file: Path, path: Path | None) -> None:
    """Check that every reuse of memory in a certificate log follows from the log.

    Exit code 1 if one does not, with the first line that is wrong; 2 if it cannot be read.
    """
    try:
        with file.open("rb") as source, _bar() as bar:
            report = verify(_lines(source, bar, file.stat().st_size))
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from error
    except CertificateError as error:
        write_json(path, {"holds": False, "line": error.line, "why": error.why})
        raise
    write_json(path, {"holds": True, **asdict(report)})
    Console().print(_table(file, report))
    click.echo(f"{report.num_certified} certificates hold")


def _lines(source: BinaryIO, bar: Progress, num_bytes: int) -> Iterator[bytes]:
    """The file's lines; of one that is too long, only enough to see that it is."""
    task = bar.add_task("checking", total=num_bytes)
    while line := source.readline(MAX_LINE_BYTES + 1):
        bar.update(task, advance=len(line))
        yield line


def _bar() -> Progress:
    """A bar that is gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _table(file: Path, report: Report) -> Table:
    table = Table(title=escape(f"{file.name}: arena {report.arena[:8]}, epoch {report.epoch}"))
    table.add_column("what")
    table.add_column("value", overflow="fold")
    rows = {
        "lines": str(report.num_lines),
        "steps": str(report.num_steps),
        "certificates": _listed(report.reasons),
        "work ended up to": _listed(report.completed_through),
        "still held": _listed({k: n for k, n in report.held.items() if n}),
        "last line": report.digest,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "nothing"
