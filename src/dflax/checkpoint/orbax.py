"""Training state on disk by Orbax (its v1 API): atomic, written while training goes on; the last few are kept, and the best.

Orbax writes a checkpoint beside its place and renames it, so a killed process leaves either a whole checkpoint or a folder under a
temporary name. What a kill may also leave is an old checkpoint half deleted. Both are swept away when the folder is opened.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from dflax.errors import DflaxError


class TrainingCheckpoints:
    """The checkpoints of one training run: `folder/<step>`, the newest `keep` of them, and of those saved with metrics the one whose
    `best` is highest ("-NAME": lowest; "": none is kept for that)."""

    def __init__(self, folder: str | Path, keep: int = 2, best: str = ""):
        self.folder = Path(folder).absolute()
        if jax.process_index() == 0:
            _make(self.folder)
            _sweep(self.folder)
        policies = ocp.training.preservation_policies
        policy: Any = policies.LatestN(keep)
        if best:
            name, sign = best.removeprefix("-"), -1 if best.startswith("-") else 1
            by_metric = policies.BestN(
                get_metric_fn=lambda found: sign * found[name], n=1, keep_checkpoints_without_metrics=False
            )
            policy = policies.AnyPreservationPolicy([policy, by_metric])
        self._writing: Any = None
        where: Any = self.folder  # annotated as etils' path, which a pathlib one is at run time
        self._orbax = ocp.training.Checkpointer(where, preservation_policy=policy)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, None if there is none."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def save(
        self, step: int, state: dict[str, Any], metadata: dict[str, Any], metrics: dict[str, Any] | None = None
    ) -> None:
        """Begin to write `state` (arrays by name, which may be donated afterwards), `metadata` (JSON) and what was measured at this step.

        The checkpoint before is complete on return, this one after `wait`.
        """
        self.wait()
        with self._told(step):
            self._writing = (
                step,
                self._orbax.save_async(step, state, force=True, custom_metadata=metadata, metrics=metrics),
            )

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete; raises DflaxError if it could not be."""
        if self._writing is None:
            return
        (step, response), self._writing = self._writing, None
        with self._told(step):
            if response is not None:
                response.result()

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        try:
            yield
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
        """Waits for what is being written."""
        try:
            self.wait()
        finally:
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
