"""A folder of results that a killed run goes on with: its settings, and rows appended one JSON line at a time."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflax.errors import DflaxError

SETTINGS = "settings.json"


class Journal:
    """Rows of a JSONL file, each written by one call to the system.

    Opening reads the rows that are there (`rows`) and cuts a last line that a kill left half-written. `settings` are kept beside the
    file; a folder that holds rows of other settings is refused, so that one file never mixes two experiments.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.rows = _recover(self.path)
            _claim(self.path.parent, settings, fresh=not self.rows)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise DflaxError(f"cannot write {self.path}: {error.strerror}") from error

    def append(self, row: Mapping[str, Any]) -> None:
        data = line(row)
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(0, "the line was written only in part")
        except OSError as error:
            raise DflaxError(f"cannot write {self.path}: {error.strerror}; is the disk full?") from error
        self.rows.append(dict(row))

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def line(row: Mapping[str, Any]) -> bytes:
    """The bytes of a row."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _claim(folder: Path, settings: Mapping[str, Any], fresh: bool) -> None:
    path = folder / SETTINGS
    wanted = json.loads(json.dumps(settings))
    if path.exists() and not fresh:
        try:
            found = json.loads(path.read_text())
        except ValueError:
            raise DflaxError(f"{path} is damaged; remove the folder to start over") from None
        for key in wanted | found:
            if wanted.get(key) != found.get(key):
                raise DflaxError(
                    f"{folder} was begun with {key} = {found.get(key)!r}, now it is {wanted.get(key)!r}; give another folder"
                )
        return
    beside = path.with_name(f"{SETTINGS}.partial")
    beside.write_text(json.dumps(wanted, indent=2) + "\n")
    os.replace(beside, path)


def _recover(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    rows = []
    for number, text in enumerate(data[:whole].splitlines(), 1):
        try:
            rows.append(json.loads(text))
        except ValueError:
            raise DflaxError(f"{path}:{number} is not JSON; the file was changed by something else") from None
    return rows
