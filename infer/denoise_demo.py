"""`dflax demo --diffusion`: one problem solved twice out of the masks, pass by pass and side by side, then timed."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dflax import controllers, policies
from dflax.infer.denoise_command import MASK, Frame, frames, shown
from dflax.infer.diffuse import DenoiseOutput, denoise, end_tokens, stream_denoise
from dflax.infer.endings import text_length
from dflax.infer.report import table
from dflax.model import Model, load
from dflax.train import stories
from dflax.train.problems import Problem

MODEL = "arith-llada"
GEN_LENGTH, BLOCK_LENGTH = 64, 32
PACE = 0.08  # seconds a pass stays on the screen: a pass of so small a model is too quick to see


@dataclass(frozen=True)
class Way:
    """A way to denoise. options: of `dflax.denoise`."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Race:
    """What each way needed. problem: None where the reader asked something of their own."""

    ways: tuple[Way, ...]
    outputs: tuple[DenoiseOutput, ...]
    seconds: tuple[float, ...]
    problem: Problem | None

    def lines(self) -> str:
        headers = ["", "forward passes", "tokens per pass", "tokens/s", "speed-up", "answer"]
        rows = []
        for way, out, seconds in zip(self.ways, self.outputs, self.seconds, strict=True):
            assert out.texts is not None
            speed = round(out.stats.tokens_per_forward * out.nfe[0]) / seconds
            gain = f"{self.seconds[0] / seconds:.2f} times"
            rows.append([way.name, out.nfe[0], out.stats.tokens_per_forward, speed, gain, self._verdict(out.texts[0])])
        return table(headers, rows)

    def _verdict(self, written: str) -> str:
        value = written.rpartition("####")[2].strip() or "none"
        if self.problem is None:
            return value
        return f"{value} (right)" if self.problem.check(written) else f"{value} (wrong: {self.problem.value})"


def run(prompt: str, seed: int | None, repeats: int, console: Console) -> Race:
    """Shows and measures plain decoding beside TSPD with the look-ahead. prompt "": a test problem of ours, by `seed`."""
    model = load(MODEL)
    problem = None
    if not prompt:
        number = time.time_ns() % 10**6 if seed is None else seed
        problem = stories.generate(0, number, "test")
        prompt = problem.prompt
    ways = default_ways()
    console.out(f"{prompt}\n", style="bold", highlight=False)
    show(console, model, prompt, ways, PACE if console.is_terminal else 0.0)
    result = race(model, prompt, ways, repeats, problem)
    console.out(f"\n{result.lines()}", highlight=False)
    return result


def default_ways() -> tuple[Way, ...]:
    """One token a pass; and what the shipped controller and look-ahead make of it, without cache and with."""
    lengths = {"gen_length": GEN_LENGTH, "block_length": BLOCK_LENGTH}
    adaptive = lengths | {
        "policy": policies.TSPD.load(MODEL),
        "extrapolation": controllers.load_extrapolation(MODEL),
    }
    return (
        Way("one token a pass", lengths),
        Way("TSPD + CE", adaptive),
        Way("TSPD + CE, dual cache", adaptive | {"cache": "dual"}),
    )


def show(console: Console, model: Model, prompt: str, ways: tuple[Way, ...], pace: float) -> list[str]:
    """Draws the first two ways after every pass, beside each other; returns what they wrote."""
    ends = set(end_tokens(model, None))
    runs = [frames(stream_denoise(model, [prompt], **way.options), way.options["gen_length"]) for way in ways[:2]]
    last: list[Frame] = []
    with Live(console=console, auto_refresh=False) as live:
        for last in _together(runs):
            panels = [_panel(model, way.name, frame, ends) for way, frame in zip(ways[:2], last, strict=True)]
            live.update(Columns(panels, width=max(32, console.width // 2 - 2)), refresh=console.is_terminal)
            time.sleep(pace)
    return [shown(model, _said(frame, ends)) for frame in last]


def _together(runs: list[Iterator[Frame]]) -> Iterator[list[Frame]]:
    """A frame of each in every turn; who is done stays as it is."""
    held = [next(run) for run in runs]
    yield held
    for turn in itertools.zip_longest(*runs):
        held = [new or old for new, old in zip(turn, held, strict=True)]
        yield held


def _said(frame: Frame, ends: set[int]) -> list[int | None]:
    """All that there is while anything is masked, then up to the end token."""
    if None in frame.answer:
        return frame.answer
    return frame.answer[: text_length(frame.answer, ends)]


def _panel(model: Model, name: str, frame: Frame, ends: set[int]) -> Panel:
    answer = [token for token in _said(frame, ends) if token is None or token not in ends]
    text = Text(shown(model, answer))
    text.highlight_words([MASK], "dim")
    return Panel(text, title=name, subtitle=f"{frame.nfe} forward passes")


def race(model: Model, prompt: str, ways: tuple[Way, ...], repeats: int, problem: Problem | None = None) -> Race:
    """Times all ways in turn; the first round only warms up."""
    outputs = [denoise(model, [prompt], **way.options) for way in ways]
    seconds = [0.0] * len(ways)
    for _ in range(repeats):
        for i, way in enumerate(ways):
            outputs[i] = denoise(model, [prompt], **way.options)
            seconds[i] += outputs[i].stats.seconds
    return Race(ways, tuple(outputs), tuple(s / repeats for s in seconds), problem)
