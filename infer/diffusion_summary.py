"""From the calls of a denoising bench to its figures, tables and pictures. Pure functions of the rows of calls.jsonl.

Tokens are those before an answer's first end token. tokens/s is their number over the time of the passes, where an answer's share of its
batch's time is one in so many as the batch has places. A call that was repeated counts once, with the median of its times. A speed-up
compares only calls on the same problems that one process made: of two methods measured on different days it says nothing.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dflax.infer import report
from dflax.infer.frontier import NOTHING, Curve, Equal, Interval, compare, paired, standard_error
from dflax.infer.methods import PLAIN

HEADERS = (
    "method", "cache", "n", "accuracy %", "- plain [95 %]", "passes", "fewer", "tokens/pass", "ms/pass", "tok/s", "speed-up", "median",
)  # fmt: skip
EQUAL_HEADERS = ("policy", "cache", "values", "passes [95 %]", "x reference [95 %]", "read off")


@dataclass(frozen=True)
class Setting:
    """What the methods that are compared have in common."""

    model: str
    gen_length: int

    def __str__(self) -> str:
        return f"{self.model}, {self.gen_length} tokens"


@dataclass(frozen=True)
class Measured:
    """A method with a cache: arrays have an entry per problem, in the order of `keys`."""

    family: str
    keys: list[tuple[str, int]]
    correct: Float[Any, "n"]
    """1, 0, or NaN where an answer cannot be checked."""
    passes: Float[Any, "n"]
    tokens: Float[Any, "n"]
    commit_steps: list[list[int]]
    calls: dict[tuple[int, int], tuple[float, float, float]]
    """(session, batch) -> tokens, seconds, and passes of the batch; the last two as many as its places are worth."""


@dataclass(frozen=True)
class Row:
    """Figures of a method. NaN where there is nothing to measure; accuracies are fractions."""

    model: str
    gen_length: int
    method: str
    family: str
    cache: str
    problems: int
    checked: int
    """Problems whose answers can be checked."""
    accuracy: float
    accuracy_error: float
    """Standard error."""
    difference: Interval
    """Accuracy minus that of plain decoding without cache, paired on the same problems."""
    passes: float
    """Mean number of forward passes."""
    passes_error: float
    fewer_passes: float
    """Passes of plain decoding without cache, on the same problems, over these."""
    tokens_per_pass: float
    seconds_per_pass: float
    """Of a whole batch: what a step of the loop takes with all that the policy does."""
    tokens_per_second: float
    speedup: float
    """tokens/s over those of plain decoding without cache in the calls that one process made on the same problems."""
    speedup_median: float
    """Median over the calls' own ratios."""


@dataclass(frozen=True)
class Summary:
    """All figures of a bench."""

    rows: list[Row]
    equal: dict[tuple[Setting, str], list[Equal]]
    """By setting and cache: passes at the accuracy of plain decoding - margin."""
    measured: dict[Setting, dict[tuple[str, str], Measured]]
    """By setting, then by (method, cache)."""
    margin: float
    reference: str

    def table(self, markdown: bool = False) -> str:
        parts = []
        for setting in self.measured:
            title = f"## {setting}" if markdown else str(setting)
            rows = [
                cells(row) for row in self.rows if (row.model, row.gen_length) == (setting.model, setting.gen_length)
            ]
            parts += [title, report.table(HEADERS, rows, markdown)]
            equal = [[cache, one] for (where, cache), found in self.equal.items() if where == setting for one in found]
            if equal:
                sign = "### " if markdown else ""
                parts += [
                    f"{sign}Passes at the accuracy of plain decoding - {100 * self.margin:g} points; reference {self.reference}",
                    report.table(EQUAL_HEADERS, [_equal_cells(cache, one) for cache, one in equal], markdown),
                ]
        return "\n\n".join(parts)

    def plot(self, folder: Path, block_length: int, maps: Sequence[str] = ()) -> None:
        """Per setting and cache accuracy against tokens per pass, and the pass in which each position was written: the mean over the
        problems, and of the first problem alone. maps: methods to draw there; none: plain and the cheapest good one of each family."""
        several = len(self.measured) > 1
        for number, (setting, methods) in enumerate(self.measured.items()):
            suffix = f"-{number}-{setting.gen_length}" if several else ""
            rows = [row for row in self.rows if (row.model, row.gen_length) == (setting.model, setting.gen_length)]
            plain = [row.accuracy for row in rows if (row.method, row.cache) == (PLAIN.label, "none")]
            target = plain[0] - self.margin if plain else math.nan
            for cache in dict.fromkeys(row.cache for row in rows):
                mine = [row for row in rows if row.cache == cache]
                name = f"{suffix}-{cache}.png"
                if all(row.checked for row in mine):
                    _plot_accuracy(folder / f"accuracy{name}", str(setting), mine, target)
                chosen = maps or worth_a_map(mine, target)
                steps = {row.method: methods[row.method, cache].commit_steps for row in mine if row.method in chosen}
                if steps:
                    mean = {method: mean_steps(each) for method, each in steps.items()}
                    first = {method: mean_steps(each[:1]) for method, each in steps.items()}
                    report.plot_commit_steps(folder / f"commits-mean{name}", mean, block_length)
                    report.plot_commit_steps(folder / f"commits-first{name}", first, block_length)


def _plot_accuracy(path: Path, title: str, rows: Sequence[Row], target: float) -> None:
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        point = (row.tokens_per_pass, 100 * row.accuracy, 100 * row.accuracy_error)
        curves.setdefault(row.family, []).append(point)
    report.plot_accuracy(path, {name: sorted(points) for name, points in curves.items()}, 100 * target, title)


def worth_a_map(rows: Sequence[Row], target: float) -> list[str]:
    """Of each family the cheapest method that reaches the target accuracy, else the most accurate one."""
    chosen = []
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        good = [row for row in mine if not row.accuracy < target]  # NaN: as good as any
        best = min(good, key=lambda row: row.passes) if good else max(mine, key=lambda row: row.accuracy)
        chosen.append(best.method)
    return chosen


def cells(row: Row) -> list[Any]:
    """A row of the table of `HEADERS`."""
    return [
        row.method, row.cache, row.problems, with_error(row.accuracy, row.accuracy_error), points(row.difference), row.passes,
        row.fewer_passes, row.tokens_per_pass, 1e3 * row.seconds_per_pass, row.tokens_per_second, row.speedup, row.speedup_median,
    ]  # fmt: skip


def with_error(accuracy: float, error: float) -> str | None:
    """In per cent, with the standard error."""
    return None if math.isnan(accuracy) else f"{100 * accuracy:.1f} ± {100 * error:.1f}"


def points(difference: Interval) -> str | None:
    """In percentage points, with the interval."""
    if math.isnan(difference.value):
        return None
    low, high = (f"{100 * end:+.2f}" for end in (difference.low, difference.high))
    return f"{100 * difference.value:+.2f} [{low}, {high}]"


def _equal_cells(cache: str, one: Equal) -> list[Any]:
    text = lambda i, form: None if math.isnan(i.value) else f"{i.value:{form}} [{i.low:{form}}, {i.high:{form}}]"
    between = one.below if one.below == one.above else f"{one.below} .. {one.above}"
    return [one.family, cache, one.points, text(one.passes, ".2f"), text(one.ratio, ".3f"), between]


def summarise(calls: Iterable[Mapping[str, Any]], margin: float = 0.005, reference: str = "tspd+ce") -> Summary:
    """Figures of every method, and the comparison at equal accuracy.

    Args:
      margin: the target accuracy is that of plain decoding without cache less this fraction.
      reference: the family that the others are compared with.
    """
    measured = gather(calls)
    rows, equal = [], {}
    for setting, methods in measured.items():
        plain = methods.get((PLAIN.label, "none"))
        rows += [_row(setting, *name, one, plain) for name, one in methods.items()]
        if plain is None or np.isnan(plain.correct).any():
            continue
        for cache in dict.fromkeys(cache for _, cache in methods):
            curves = _curves(methods, cache, plain)
            if curves:
                equal[setting, cache] = compare(curves, plain.correct, margin, reference)
    return Summary(rows, equal, measured, margin, reference)


def gather(calls: Iterable[Mapping[str, Any]]) -> dict[Setting, dict[tuple[str, str], Measured]]:
    """The calls by setting, method and cache; plain decoding first, then as they were made."""
    sorted_calls: dict[Setting, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for call in calls:
        mine = sorted_calls.setdefault(Setting(call["model"], call["gen_length"]), {})
        mine.setdefault((call["method"], call["cache"]), []).append(call)
    first = lambda name: name[0] != PLAIN.label
    return {
        setting: {name: _measured(methods[name]) for name in sorted(methods, key=first)}
        for setting, methods in sorted_calls.items()
    }


def _measured(calls: Sequence[Mapping[str, Any]]) -> Measured:
    once = {call["batch"]: call for call in reversed(calls)}  # of repeats the first
    ordered = [once[batch] for batch in sorted(once)]
    together = lambda name: [value for call in ordered for value in call[name]]
    times: dict[tuple[int, int], list[float]] = {}
    for call in calls:
        times.setdefault((call["session"], call["batch"]), []).append(call["seconds"])
    number = lambda values: np.array([math.nan if value is None else float(value) for value in values])
    return Measured(
        family=calls[0]["family"],
        keys=[(name, index) for call in ordered for name, index in zip(call["set"], call["index"], strict=True)],
        correct=number(together("correct")),
        passes=number(together("nfe")),
        tokens=number(together("counted")),
        commit_steps=together("commit_steps"),
        calls={
            (session, batch): (
                float(sum(once[batch]["counted"])),
                statistics.median(each),
                once[batch]["passes"] * once[batch]["share"],
            )
            for (session, batch), each in times.items()
        },
    )


def _row(setting: Setting, method: str, cache: str, one: Measured, plain: Measured | None) -> Row:
    right = one.correct[~np.isnan(one.correct)]
    mine, other = _paired(one, plain) if plain is not None else (np.zeros(0, int),) * 2
    difference, fewer = NOTHING, math.nan
    if plain is not None and len(mine):
        fewer = float(plain.passes[other].mean() / one.passes[mine].mean())
        known = ~np.isnan(one.correct[mine]) & ~np.isnan(plain.correct[other])
        difference = paired(one.correct[mine][known], plain.correct[other][known])
    # The call's latest session: a batch that was measured in several counts once.
    latest = {batch: one.calls[session, batch] for session, batch in sorted(one.calls)}
    tokens, seconds, passes = np.sum(list(latest.values()), axis=0)
    speedup, median = _speedup(one, plain) if plain is not None else (math.nan, math.nan)
    return Row(
        model=setting.model,
        gen_length=setting.gen_length,
        method=method,
        family=one.family,
        cache=cache,
        problems=len(one.keys),
        checked=len(right),
        accuracy=float(right.mean()) if len(right) else math.nan,
        accuracy_error=standard_error(right),
        difference=difference,
        passes=float(one.passes.mean()),
        passes_error=standard_error(one.passes),
        fewer_passes=fewer,
        tokens_per_pass=float(one.tokens.sum() / one.passes.sum()),
        seconds_per_pass=float(seconds / passes),
        tokens_per_second=float(tokens / seconds),
        speedup=speedup,
        speedup_median=median,
    )


def _paired(one: Measured, other: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Places of the problems that both have."""
    at = {key: i for i, key in enumerate(other.keys)}
    mine = [i for i, key in enumerate(one.keys) if key in at]
    return np.array(mine, int), np.array([at[one.keys[i]] for i in mine], int)


def _speedup(one: Measured, plain: Measured) -> tuple[float, float]:
    """Of all calls that one process made with both on the same problems, and the median of their own ratios."""
    both = [key for key in one.calls if key in plain.calls and one.calls[key][0] and plain.calls[key][0]]
    if not both:
        return math.nan, math.nan
    pace = lambda measured, keys: np.divide(*np.sum([measured.calls[key][:2] for key in keys], axis=0))
    ratios = [pace(one, [key]) / pace(plain, [key]) for key in both]
    return float(pace(one, both) / pace(plain, both)), float(statistics.median(ratios))


def _curves(methods: Mapping[tuple[str, str], Measured], cache: str, plain: Measured) -> dict[str, Curve]:
    """The families with this cache whose points all answer the problems of plain decoding; its own point with this cache ends each."""
    end = methods.get((PLAIN.label, cache), plain)
    if end.keys != plain.keys:  # a cache whose run was cut short
        return {}
    whole = {label: one for (label, kind), one in methods.items() if kind == cache and one.keys == plain.keys}
    curves = {}
    for family in dict.fromkeys(one.family for one in whole.values() if one.family != PLAIN.family):
        points = {label: one for label, one in whole.items() if one.family == family} | {PLAIN.label: end}
        columns = lambda name, points=points: np.stack([getattr(one, name) for one in points.values()], axis=1)
        curves[family] = Curve(tuple(points), columns("passes"), columns("correct"))
    return curves


def mean_steps(commit_steps: Sequence[Sequence[int]]) -> list[float]:
    """Per position of the answer the mean number of the pass, from 1, that wrote it; NaN where it was always filled in."""
    steps = np.array(commit_steps, np.float64)
    written = steps >= 0
    count = written.sum(axis=0)
    total = np.where(written, steps + 1, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).tolist()


def plain_data(summary: Summary) -> dict[str, Any]:
    """What goes into bench.json."""
    return {
        "results": [asdict(row) for row in summary.rows],
        "equal_accuracy": {
            "margin": summary.margin,
            "reference": summary.reference,
            "policies": [
                {**asdict(setting), "cache": cache, **asdict(one)}
                for (setting, cache), found in summary.equal.items()
                for one in found
            ],
        },
    }
