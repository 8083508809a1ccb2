"""Files that commands write, refused before the work and not after it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click


class FileError(click.ClickException):
    """A file cannot be read or written: as much the caller's fault as a wrong option."""

    exit_code = 2


def writable(_: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Check, as an option's callback, that there can be a file at ``path``.

    Raises
    ------
    BadParameter
        If it is a folder, or its own folder is not there or does not let us.
    """
    if path is not None:
        target = path if path.exists() else path.parent
        if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
            raise click.BadParameter(f"cannot write {path}", param=param)
    return path


def write_json(path: Path | None, found: object) -> str:
    """``found`` as text, which also goes to ``path`` if there is one.

    Raises
    ------
    FileError
        If the file cannot be written.
    """
    text = json.dumps(found, indent=2)
    if path is not None:
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from error
    return text
