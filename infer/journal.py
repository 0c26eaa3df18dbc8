"""A folder of results that a killed run goes on with: its settings, and rows appended one JSON line at a time."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflax import files
from dflax.errors import DflaxError

SETTINGS = "settings.json"


class Journal:
    """Rows of a JSONL file, each written by one call to the system.

    Opening reads the rows that are there (`rows`) and cuts a last line that a kill left half-written. `settings` are kept beside the
    file; a folder that holds rows of other settings is refused, so that one file never mixes two experiments.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.path = Path(path)
        with ExitStack() as stack:
            stack.enter_context(files.alone(self.path.parent))
            self._open(settings)
            self._alone = stack.pop_all()

    def _open(self, settings: Mapping[str, Any]) -> None:
        try:
            self.rows = _recover(self.path)
            if not self.rows:  # what was begun in vain binds nobody
                (self.path.parent / SETTINGS).unlink(missing_ok=True)
            files.bind(self.path.parent / SETTINGS, settings)
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
        self._alone.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def line(row: Mapping[str, Any]) -> bytes:
    """The bytes of a row."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


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
