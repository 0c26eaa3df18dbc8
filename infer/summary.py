"""From the samples of a bench to its figures, tables and pictures. Pure functions of the rows of samples.jsonl.

tokens/s counts decoding only: all tokens of a response but the first (which comes from prefill), over the time of the rounds. A
response decoded several times counts once, with the median of its times. The speed-up is the ratio of the time per token of the same
prompts; its median is over the prompts' own ratios, which one slow moment of the machine cannot move. The efficiency is speed-up over
acceptance length: 1 would mean that a round costs what a plain step costs.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflax.errors import DflaxError
from dflax.infer import report

OVERALL = "all sets"
BASELINE = "baseline"


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded by one method."""

    tokens: tuple[int, ...]
    seconds: float
    """Decoding, median of the repeats."""
    prefill_seconds: float
    lengths: tuple[int, ...]
    block_size: int

    @property
    def steps(self) -> int:
        """Tokens that decoding wrote."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Row:
    """Figures of a method on a set (or on all sets pooled). NaN where there is nothing to measure."""

    dtype: str
    temperature: float
    set: str
    method: str
    prompts: int
    tokens: int
    tokens_per_second: float
    tokens_per_second_median: float
    speedup: float
    """Against plain decoding of the same prompts."""
    speedup_median: float
    acceptance_length: float
    """Mean over the rounds of a response, then over responses."""
    efficiency: float
    identical: int
    """Responses equal to those of plain decoding, token for token."""
    acceptance_by_slot: list[float]
    prefill_seconds: float
    """Mean per prompt."""


@dataclass(frozen=True)
class Summary:
    """All figures of a bench."""

    rows: list[Row]
    lengths: dict[tuple[str, float, str, str], list[tuple[int, ...]]]
    """Acceptance lengths of every response by (dtype, temperature, set, method)."""
    baseline_name: str | None = None

    def table(self, markdown: bool = False) -> str:
        headers = [
            "set",
            "method",
            "prompts",
            "tok/s",
            "median",
            "speed-up",
            "median",
            "acceptance",
            "efficiency",
            "identical",
        ]
        kinds = list(dict.fromkeys((row.dtype, row.temperature) for row in self.rows))
        parts = []
        for kind in kinds:
            cells = [
                [row.set, self._method(row), row.prompts, row.tokens_per_second, row.tokens_per_second_median, row.speedup,
                 row.speedup_median, row.acceptance_length, row.efficiency, f"{row.identical}/{row.prompts}"]
                for row in self.rows if (row.dtype, row.temperature) == kind
            ]  # fmt: skip
            parts.append(f"{kind[0]}, temperature {kind[1]:g}\n\n{report.table(headers, cells, markdown)}")
        return "\n\n".join(parts)

    def plot(self, folder: Path) -> None:
        """Three pictures per dtype and temperature: acceptance by slot and lengths per set (first block size), and speeds."""
        for dtype, temperature in dict.fromkeys((row.dtype, row.temperature) for row in self.rows):
            rows = [row for row in self.rows if (row.dtype, row.temperature) == (dtype, temperature)]
            suffix = f"{dtype}-t{temperature:g}.png"
            speeds = {self._method(row): row.tokens_per_second for row in rows if row.set == rows[-1].set}
            if all(math.isfinite(speed) and speed > 0 for speed in speeds.values()):
                report.plot_speeds(folder / f"speed-{suffix}", speeds, "plain")
            method = next((row.method for row in rows if row.acceptance_by_slot), None)
            if method is None:
                continue
            runs = {
                row.set: self.lengths[dtype, temperature, row.set, method]
                for row in rows
                if row.method == method and row.set != OVERALL
            }
            size = 1 + max(len(row.acceptance_by_slot) for row in rows if row.method == method)
            report.plot_acceptance_by_slot(folder / f"slots-{suffix}", runs, size)
            report.plot_acceptance_lengths(folder / f"lengths-{suffix}", runs, size)

    def _method(self, row: Row) -> str:
        return self.baseline_name or BASELINE if row.method == BASELINE else row.method


@dataclass(frozen=True)
class Baseline:
    """Responses of another program to the same prompts, by (set, index)."""

    name: str
    responses: dict[tuple[str, int], Decoded]


def read_baseline(path: str | Path | None) -> Baseline | None:
    """What tools/hf_baseline.py wrote; None for None."""
    if path is None:
        return None
    try:
        data = json.loads(Path(path).read_text())
        responses = {
            (row["set"], row["index"]): Decoded(
                tuple(row["tokens"]), row["decode_seconds"], row["prefill_seconds"], (), 1
            )
            for row in data["rows"]
        }
        return Baseline(data["name"], responses)
    except OSError as error:
        raise DflaxError(f"cannot read the baseline {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DflaxError(f"{path} is no baseline of tools/hf_baseline.py: {error!r}") from error


def summarise(samples: Sequence[Mapping[str, Any]], baseline: Baseline | None = None) -> Summary:
    """Figures per dtype, temperature, set and method, and pooled over the sets where there are several.

    A baseline is greedy: it stands beside the rows of temperature 0, over the prompts it has.
    """
    rows: list[Row] = []
    lengths: dict[tuple[str, float, str, str], list[tuple[int, ...]]] = {}
    for dtype, temperature in dict.fromkeys((s["dtype"], s["temperature"]) for s in samples):
        mine = [s for s in samples if (s["dtype"], s["temperature"]) == (dtype, temperature)]
        names = list(dict.fromkeys(s["set"] for s in mine))
        for name in names if len(names) == 1 else [*names, OVERALL]:
            decoded = _by_method([s for s in mine if name in (s["set"], OVERALL)])
            plain = decoded["plain"]
            if baseline is not None and temperature == 0:
                there = {key: response for key, response in baseline.responses.items() if key in plain}
                if there:
                    decoded = {BASELINE: there, **decoded}
            for method, responses in decoded.items():
                rows.append(_row(dtype, temperature, name, method, responses, plain))
                lengths[dtype, temperature, name, method] = [r.lengths for r in responses.values()]
    return Summary(rows, lengths, None if baseline is None else baseline.name)


def _by_method(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[str, int], Decoded]]:
    out: dict[str, dict[tuple[str, int], Decoded]] = {}
    for sample in samples:
        for method in sorted({run["method"] for run in sample["runs"]}, key=lambda name: (name != "plain", name)):
            runs = [run for run in sample["runs"] if run["method"] == method]
            median = lambda key, runs=runs: statistics.median(run[key] for run in runs)
            out.setdefault(method, {})[sample["set"], sample["index"]] = Decoded(
                tuple(runs[0]["tokens"]), median("decode_seconds"), median("prefill_seconds"),
                tuple(runs[0]["lengths"]), runs[0]["block_size"],
            )  # fmt: skip
    return out


def _row(
    dtype: str, temperature: float, name: str, method: str, responses: Mapping[tuple[str, int], Decoded],
    plain: Mapping[tuple[str, int], Decoded],
) -> Row:  # fmt: skip
    written = {key: response for key, response in responses.items() if response.steps > 0}
    both = [(response, plain[key]) for key, response in written.items() if plain[key].steps > 0]
    lengths = [r.lengths for r in responses.values()]
    size = max((r.block_size for r in responses.values()), default=1)
    speculative = method not in ("plain", BASELINE)
    speedup = _pace([p for _, p in both]) / _pace([r for r, _ in both]) if both else math.nan
    tau = report.mean_acceptance_length(lengths) if speculative else math.nan
    return Row(
        dtype=dtype,
        temperature=temperature,
        set=name,
        method=method,
        prompts=len(responses),
        tokens=sum(len(r.tokens) for r in responses.values()),
        tokens_per_second=1 / _pace(list(written.values())) if written else math.nan,
        tokens_per_second_median=_median([r.steps / r.seconds for r in written.values()]),
        speedup=speedup,
        speedup_median=_median([_pace([p]) / _pace([r]) for r, p in both]),
        acceptance_length=tau,
        efficiency=speedup / tau,
        identical=sum(r.tokens == plain[key].tokens for key, r in responses.items()),
        acceptance_by_slot=report.acceptance_by_slot(lengths, size).tolist() if speculative else [],
        prefill_seconds=float(np.mean([r.prefill_seconds for r in responses.values()])),
    )


def _pace(responses: Sequence[Decoded]) -> float:
    """Seconds per token."""
    return sum(r.seconds for r in responses) / sum(r.steps for r in responses)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan
