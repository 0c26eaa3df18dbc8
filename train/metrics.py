"""What a run measured, one JSON object a line, and a picture of it.

The file belongs to the newest checkpoint: on resume every line beyond the restored step is cut, so that a killed and resumed run leaves
the same lines as an uninterrupted one (the timing fields `TIMINGS` apart).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflax import files
from dflax.errors import DflaxError

TIMINGS = ("seconds", "tokens_per_second", "steps_per_second")


def read(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file, [] if it does not exist; a last line cut short by a kill is left out."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def minutes(run: str | Path) -> float:
    """How long the training in this folder took, calls that were killed included up to their last log line."""
    times = [row["seconds"] for row in read(Path(run) / "metrics.jsonl") if "seconds" in row]
    return round(times[-1] / 60, 2) if times else 0.0


class MetricsFile:
    """Appends to `path`, which first loses every line whose step is beyond `after_step`."""

    def __init__(self, path: str | Path, after_step: int = 0):
        self.path = Path(path)
        kept = [row for row in read(self.path) if row["step"] <= after_step]
        try:
            with files.whole(self.path) as beside:
                beside.write_text("".join(_line(row) for row in kept))
            self._file = self.path.open("a")
        except OSError as error:
            raise DflaxError(f"cannot write {self.path}: {error.strerror}") from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, flushed; values that are no finite numbers become null, because JSON knows none."""
        self._file.write(_line({"step": step, **values}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"


def plot(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw every numeric series of a metrics file against the step, one small panel each; the picture is replaced whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, float]]] = {}
    for row in read(metrics_path):
        for name, value in row.items():
            if name not in ("step", "epoch", "seconds") and isinstance(value, int | float):
                series.setdefault(name, []).append((row["step"], value))
    if not series:
        return
    columns = min(3, len(series))
    rows = math.ceil(len(series) / columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows))
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, (name, points) in zip(panels, series.items(), strict=False):
        few = len(points) < 50
        panel.plot([x for x, _ in points], [y for _, y in points], lw=1, marker="." if few else None)
        panel.set_title(name, fontsize=9)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=7)
    for panel in list(figure.axes)[len(series) :]:
        panel.set_visible(False)
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.08, top=0.94, wspace=0.2, hspace=0.35)
    with files.whole(png_path) as beside:
        figure.savefig(beside, format="png", dpi=110)
