"""Tables, figures and records of what a run did. Pure functions of acceptance lengths and times; `dflax bench` calls them.

An acceptance length is the number of tokens a round committed: accepted drafts and the bonus token. `lengths` is one
list per response, of one acceptance length per round, as `out.acceptance_lengths` has it.
"""

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dflax import files
from dflax.infer.frontier import Interval

PACKAGES = ("dflax", "jax", "jaxlib", "flax", "numpy", "transformers")
"""Packages whose versions a record names."""


def acceptance_by_slot(lengths: Sequence[Sequence[int]], block_size: int) -> Float64[np.ndarray, "slots"]:
    """Share of rounds that accepted draft i and all before it, for i = 1 .. K - 1; NaN when there was no round.

    A round cut short by a stop token or by the token budget counts as recorded, which lowers the later slots a little.

    Args:
      lengths: acceptance lengths, 1 .. K.
      block_size: K.

    Returns:
      float64 [K - 1].
    """
    rounds = _rounds(lengths)
    if len(rounds) == 0:
        return np.full(block_size - 1, np.nan)
    return np.mean(rounds[:, None] > np.arange(1, block_size), axis=0)


def mean_acceptance_length(lengths: Sequence[Sequence[int]]) -> float:
    """Tau of arXiv 2602.06036: the mean over the rounds of a response, then over responses. NaN when there was no round.

    Responses without a round (the token of the prefill ended them) do not count.
    """
    means = [sum(response) / len(response) for response in lengths if len(response) > 0]
    return float(sum(means) / len(means)) if means else math.nan


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], markdown: bool = False) -> str:
    """Lays out rows under headers, columns of numbers to the right. Floats get four significant digits; NaN and None are "-".

    Args:
      headers: one per column.
      rows: as many cells in each row as there are headers.
      markdown: a GitHub table in place of plain columns.

    Raises:
      ValueError: a row with another number of cells.
    """
    if any(len(row) != len(headers) for row in rows):
        raise ValueError(f"every row of the table needs {len(headers)} cells")
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    if markdown:
        cells = [[text.replace("|", r"\|") for text in row] for row in cells]
    right = [
        all(value is None or isinstance(value, (int, float, np.number)) for value in column)
        for column in zip(*rows, strict=True)
    ]
    right = right or [False] * len(headers)
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    head, *body = (
        [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)] for row in cells
    )
    if markdown:
        rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))
    rule = ["-" * w for w in widths]
    return "\n".join("  ".join(row).rstrip() for row in (head, rule, *body))


def plot_acceptance_by_slot(path: str | Path, runs: Mapping[str, Sequence[Sequence[int]]], block_size: int) -> None:
    """PNG: share of rounds that accepted each slot, one line per named run."""

    def draw(axes: Axes) -> None:
        for name, lengths in runs.items():
            axes.plot(range(1, block_size), acceptance_by_slot(lengths, block_size), marker="o", label=name)
        axes.set(xlabel="draft slot", ylabel="share of rounds that accepted it", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()

    _figure(path, draw)


def plot_acceptance_lengths(path: str | Path, runs: Mapping[str, Sequence[Sequence[int]]], block_size: int) -> None:
    """PNG: histogram of acceptance lengths 1 .. K, one group of bars per named run; tau in the legend."""

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(runs))
        for number, (name, lengths) in enumerate(runs.items()):
            rounds = _rounds(lengths)
            share = np.bincount(rounds, minlength=block_size + 1)[1:] / max(1, len(rounds))
            middle = np.arange(1, len(share) + 1) + (number - (len(runs) - 1) / 2) * width
            axes.bar(middle, share, width, label=f"{name} (mean {mean_acceptance_length(lengths):.2f})")
        axes.set(xlabel="tokens committed in a round", ylabel="share of rounds")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()

    _figure(path, draw)


def plot_speeds(path: str | Path, tokens_per_second: Mapping[str, float], baseline: str | None = None) -> None:
    """PNG: one bar per named run, labelled with its speed and, when a baseline is named, with how many times faster it is."""

    def draw(axes: Axes) -> None:
        names, speeds = list(tokens_per_second), list(tokens_per_second.values())
        labels = [f"{speed:.1f}" for speed in speeds]
        if baseline is not None:
            labels = [f"{speed:.1f} ({speed / tokens_per_second[baseline]:.2f}x)" for speed in speeds]
        axes.bar_label(axes.barh(names, speeds), labels, padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set(xlabel="tokens per second")

    _figure(path, draw)


def plot_accuracy(
    path: str | Path, curves: Mapping[str, Sequence[tuple[float, float, float]]], target: float, title: str = ""
) -> None:
    """PNG: accuracy against tokens per forward pass.

    Args:
      curves: by policy (tokens per pass, accuracy in per cent, its standard error) of every value of its knob.
      target: the accuracy at which policies are compared, a dashed line; NaN draws none.
    """

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(curves.items()):
            x, y, error = zip(*points, strict=True)
            axes.errorbar(
                x, y, yerr=error, marker="osD^v"[number // 10 % 5], markersize=4, linewidth=1, capsize=2, label=name
            )
        if math.isfinite(target):
            axes.axhline(target, color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel="tokens per forward pass", ylabel="accuracy, %", title=title)
        axes.legend(fontsize=7)

    _figure(path, draw, (8.0, 5.0))


def plot_commit_steps(path: str | Path, steps: Mapping[str, Sequence[float]], block_length: int) -> None:
    """PNG, a heat map: the forward pass that wrote each position of the answer, a row per method. NaN: no pass did.

    Args:
      steps: by method, the pass from 1 of every position.
      block_length: lines are drawn between blocks.
    """
    values = np.array(list(steps.values()), np.float64)
    last = max(2.0, float(np.nanmax(values)) if np.isfinite(values).any() else 0.0)

    def draw(axes: Axes) -> None:
        norm = LogNorm(1, last)  # plain decoding takes many times the passes of the others
        image = axes.imshow(values, aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
        for edge in range(block_length, values.shape[1], block_length):
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        axes.set_yticks(range(len(steps)), list(steps), fontsize=7)
        axes.set(xlabel="position in the answer")
        bar = axes.figure.colorbar(image, label="written in pass", format="%d")
        bar.set_ticks([tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if tick <= last])
        bar.minorticks_off()

    _figure(path, draw, (9.0, 1.5 + 0.35 * len(steps)))


def plot_comparison(path: str | Path, rows: Mapping[str, tuple[float, Interval]]) -> None:
    """PNG: a line per method with its mean number of passes, and how its accuracy differs from plain decoding's, with the interval."""

    def draw(left: Axes, right: Axes) -> None:
        places, passes = range(len(rows)), [value for value, _ in rows.values()]
        left.bar_label(left.barh(places, passes), fmt="%.3g", padding=2, fontsize=7)
        left.set_yticks(places, list(rows), fontsize=7)
        left.invert_yaxis()
        left.margins(x=0.15)
        left.set(xlabel="forward passes")
        ends = np.array([(one.value, one.value - one.low, one.high - one.value) for _, one in rows.values()]).T
        right.errorbar(100 * ends[0], places, xerr=100 * ends[1:], fmt="o", markersize=4, capsize=2)
        right.axvline(0, color="gray", linestyle="--", linewidth=1)
        right.set(xlabel="accuracy - plain decoding's, points")

    _figure(path, draw, (9.0, 1.5 + 0.22 * len(rows)), panels=2)


def plot_bandwidth(path: str | Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """PNG: share of the copy's bytes a second that calls reach, against the bytes that a call reads; a curve per kind of call."""

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            axes.plot([size / 2**20 for size, _ in points], [share for _, share in points], marker="o", label=name)
        axes.axhline(0.8, color="gray", linestyle="--", linewidth=1)
        axes.set(
            xlabel="MiB that a call reads", ylabel="share of the measured copy bandwidth", xscale="log", ylim=(0, None)
        )
        if curves:
            axes.legend()

    _figure(path, draw)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes `data`, with `provenance()` under that name, beside its place and renames it. NaN becomes null, arrays lists."""
    text = json.dumps(_plain({**data, "provenance": provenance()}), indent=2, allow_nan=False)
    _write(path, lambda file: file.write(text.encode() + b"\n"))


def write_text(path: str | Path, text: str) -> None:
    """Writes a file of text beside its place and renames it."""
    _write(path, lambda file: file.write(text.encode()))


def provenance() -> dict[str, Any]:
    """What made a result: commit, package versions, machine, JAX devices."""
    devices = jax.devices()
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"platform": platform.platform(), "architecture": platform.machine(), "cpus": os.cpu_count()},
        "devices": {"backend": jax.default_backend(), "kind": devices[0].device_kind, "count": len(devices)},
    }


def commit(folder: str | Path = Path(__file__).parent) -> str | None:
    """Git commit of the source tree at `folder`, with "-dirty" for local changes; None outside git and for an installed wheel.

    A wheel may be installed inside somebody's repository: a folder git does not track says nothing about our commit.
    """
    try:
        if not _git(folder, "ls-files", "."):
            return None
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: str | Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rounds(lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """All acceptance lengths of all responses, int64 [rounds]."""
    return np.array([length for response in lengths for length in response], np.int64)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, (float, np.floating)) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def _plain(value: Any) -> Any:
    """`value` as what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _figure(
    path: str | Path, draw: Callable[..., None], inches: tuple[float, float] = (7.0, 4.0), panels: int = 1
) -> None:
    """Panels side by side, drawn by `draw`, as a PNG. No pyplot: no global state, and no display is needed."""
    figure = Figure(figsize=inches, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw(*figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    _write(path, lambda file: canvas.print_png(file))


def _write(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """A reader sees the old file or the whole new one."""
    with files.whole(path) as beside, open(beside, "wb") as file:
        write(file)
