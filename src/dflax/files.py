"""Files that appear whole or not at all, folders that one process works in, and that are bound to the settings they were begun with."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflax.errors import DflaxError


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside `path` to write a file to. It becomes `path` when the block ends, and goes when the block fails. What a killed
    process left there is written over."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        yield beside
        sync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """What was written to a file is on the disk, so that a loss of power after a rename leaves no empty file under the new name."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """No other process on this machine works in the folder meanwhile; DflaxError if one does, before anything is touched."""
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise DflaxError(f"cannot write in {folder}: {error.strerror}; choose another output folder") from error
    with file:
        try:
            # The system lets go of it when the process ends, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DflaxError(f"another process works in {folder}; wait for its end, or give another folder") from None
        except OSError:
            pass  # a file system without locks
        yield


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """A small file that people read too."""
    with whole(path) as beside:
        beside.write_text(json.dumps(value, indent=2) + "\n")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values are not the same, with both values; None where a key is not there."""
    values = {key: (before.get(key), now.get(key)) for key in {**now, **before}}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def bind(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings that the results in a folder depend on; DflaxError if the file is there and holds others."""
    settings = json.loads(json.dumps(settings))  # tuples become lists, as they will be when they are read
    if not path.exists():
        write_json(path, settings)
        return
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DflaxError(f"{path} is damaged; remove the folder to start over")
    for key, (before, now) in differences(found, settings).items():
        raise DflaxError(f"{path.parent} was begun with {key} = {before!r}, now it is {now!r}; give another folder")
