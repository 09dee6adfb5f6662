"""The files that commands write: looked at before the work starts, written at its end, under one rule for all options.

The rule: a file's folder is made if the folder above it is there, and never in ``/``. More than one folder that is missing is a
slip of the pen more often than a wish, and is refused with the folder's name.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dblp.errors import LocalError

PICTURE_FORMS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "eps", "ps", "svgz", "tif", "tiff")
"""What matplotlib writes without further programs, by the file's ending."""

Outputs = Mapping[str, Path | None]
"""Options and their files; None where an option was not given."""


def check_outputs(files: Outputs, pictures: Outputs | None = None) -> None:
    """Look whether all files can be written; nothing is left of it. Raises LocalError that names option, file and remedy."""
    given = [(option, path) for option, path in {**files, **(pictures or {})}.items() if path is not None]
    for option, path in given:
        if option in (pictures or {}):
            picture_form(option, path)
        elif option == "--report":
            _check_page(option, path)
        _try(option, path)
    for number, (option, path) in enumerate(given):
        for before, other in given[:number]:
            if path.absolute() == other.absolute():
                raise LocalError(f"{option} {path}: is the file of {before} too; name another")


def picture_form(option: str, path: Path) -> str:
    """The form that a picture's file name asks for: ``png``. Raises LocalError for one that cannot be drawn."""
    form = path.suffix.removeprefix(".").lower()
    if path.is_dir():
        raise LocalError(f"{option} {path}: is a folder; name a file")
    if form not in PICTURE_FORMS:
        what = f"a picture cannot end in .{form}" if form else "a picture's name needs an ending"
        raise LocalError(f"{option} {path}: {what}; use one of .{', .'.join(PICTURE_FORMS)}")
    return form


def _check_page(option: str, path: Path) -> None:
    """Refuse a page under the name of a picture, which nothing would open."""
    if path.suffix.removeprefix(".").lower() in PICTURE_FORMS:
        raise LocalError(
            f"{option} {path}: a report is one HTML file, pictures included; end its name in .html"
        )


def check_folder(option: str, path: Path | None) -> None:
    """The same for a folder that a command fills."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise LocalError(f"{option} {path}: is a file; name a folder")
    made = not path.is_dir()
    if made:
        _check_parent(option, path, path)
    try:
        path.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise LocalError(
            f"{option} {path}: cannot be written: {error.strerror}. Remedy: name a folder that can be"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            if made:
                path.rmdir()


def write_file(option: str, path: Path, content: bytes) -> None:
    """Write a file, with its folder by the rule; of a new one no part is left where that fails. Raises LocalError that names
    option and file."""
    new = not path.exists()
    try:
        make_folder(option, path)
        path.write_bytes(content)
    except OSError as error:
        if new:
            with contextlib.suppress(OSError):
                path.unlink()
        raise _refusal(option, path, error) from None


def make_folder(option: str, path: Path) -> None:
    """Make a file's folder by the rule; raises LocalError, or OSError where the kernel refuses."""
    if path.parent.exists() and not path.parent.is_dir():
        raise LocalError(f"{option} {path}: cannot be written: {path.parent} is no folder")
    if not path.parent.is_dir():
        _check_parent(option, path, path.parent)
        path.parent.mkdir(exist_ok=True)


def _check_parent(option: str, path: Path, folder: Path) -> None:
    """Raise LocalError unless ``folder`` may be made."""
    above = folder.absolute().parent
    if above.is_dir() and above != above.parent:
        return
    missing = folder.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    if not missing.parent.is_dir():
        raise LocalError(f"{option} {path}: cannot be written: {missing.parent} is no folder")
    raise LocalError(
        f"{option} {path}: cannot be written: there is no folder {missing}. Remedy: mkdir -p {folder}"
    )


def _try(option: str, path: Path) -> None:
    """Open the file as it will be opened, and take back what that made."""
    if path.is_dir():
        raise LocalError(f"{option} {path}: is a folder; name a file")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        return  # a pipe or a terminal: to open it may wait for a reader
    made_folder, made_file = not path.parent.is_dir(), not path.exists()
    try:
        make_folder(option, path)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    except OSError as error:
        raise _refusal(option, path, error) from None
    finally:
        with contextlib.suppress(OSError):
            if made_file:
                path.unlink()
        with contextlib.suppress(OSError):
            if made_folder:
                path.parent.rmdir()


def _refusal(option: str, path: Path, error: OSError) -> LocalError:
    return LocalError(f"{option} {path}: cannot be written: {error.strerror}")
