"""Training state on disk by Orbax (its v1 API): atomic, the newest complete checkpoint wins, the last few are kept.

Orbax writes a checkpoint beside its place and renames it, so a killed process leaves either a whole checkpoint or a folder under a
temporary name. What a kill may also leave is an old checkpoint half deleted. Both are swept away when the folder is opened.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from dflax.errors import DflaxError


class TrainingCheckpoints:
    """The checkpoints of one training run: `folder/<step>`, the newest `keep` of them."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.folder = Path(folder).absolute()
        if jax.process_index() == 0:
            _make(self.folder)
            _sweep(self.folder)
        policy: Any = ocp.training.preservation_policies.LatestN(keep)
        where: Any = self.folder  # annotated as etils' path, which a pathlib one is at run time
        self._orbax = ocp.training.Checkpointer(where, preservation_policy=policy)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, None if there is none."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Write `state` (arrays by name) and `metadata` (JSON); on return the checkpoint is complete."""
        try:
            self._orbax.save(step, state, force=True, custom_metadata=metadata)
        except OSError as error:
            raise DflaxError(f"cannot write the checkpoint of step {step} in {self.folder}: {error}") from error

    def restore(self, step: int, abstract_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of `step` with the dtypes and shardings of `abstract_state` (ShapeDtypeStructs by name), and its metadata.

        Raises DflaxError if the checkpoint holds other arrays, other shapes or cannot be read.
        """
        try:
            metadata = self._orbax.metadata(step)
            _compare(metadata.metadata, abstract_state)
            state = self._orbax.load(step, abstract_state)
        except (OSError, ValueError, KeyError) as error:
            raise DflaxError(f"cannot read the checkpoint {self.folder / str(step)}: {error}") from error
        custom = metadata.custom_metadata
        return state, custom if isinstance(custom, dict) else {}

    def close(self) -> None:
        self._orbax.close()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DflaxError(f"cannot write in {folder}: {error.strerror}; choose another output folder") from error


def _is_complete(path: Path) -> bool:
    return path.name.isdigit() and (path / "commit_success.txt").exists() and (path / "_CHECKPOINT_METADATA").exists()


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not _is_complete(path):
            shutil.rmtree(path)


def _compare(stored: Any, wanted: dict[str, Any]) -> None:
    """Say which array differs: Orbax's own message prints both trees whole."""
    for name in {**wanted, **stored}:
        old, new = stored.get(name), wanted.get(name)
        if old is None or new is None:
            raise ValueError(f"array {name!r} is {'not in it' if old is None else 'in it but not in this run'}")
        if tuple(old.shape) != tuple(new.shape):
            raise ValueError(f"array {name!r} has shape {tuple(old.shape)} in it and {tuple(new.shape)} in this run")
