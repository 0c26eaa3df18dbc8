"""Results of finished runs as JSON files, each with the settings that it was made with: what a resumable series of runs goes on from."""

import json
from pathlib import Path
from typing import Any

from dflax.errors import DflaxError
from dflax.files import differences


def read(path: Path, settings: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The result in a file, whose key "settings" says what it depends on; None if there is no file.

    Raises DflaxError if it is damaged, or was made with other settings than these.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        before = found["settings"]
    except (ValueError, KeyError) as error:
        raise DflaxError(f"{path} is no result of a run ({error}); delete it and run again") from None
    if settings is not None and (changed := sorted(differences(before, settings))):
        raise DflaxError(
            f"{path} was made with other settings ({', '.join(changed)}); set them back, or use another out"
        )
    return found
