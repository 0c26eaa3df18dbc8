"""`dflax demo`: text written in blocks before your eyes, then what that gained, measured in the same process."""

import random
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from tyro.conf import Positional

from dflax import text
from dflax.errors import DflaxError
from dflax.infer import denoise_demo
from dflax.infer.generate import Output, generate, speculate, stream_speculate
from dflax.infer.report import mean_acceptance_length, table
from dflax.model import Model, load, locate

PAIRS = {"smollm2": ("smollm2-135m", "smollm2-135m-dflash"), "tiny": ("arith", "arith-dflash")}

PROMPTS = (
    "Explain to a ten-year-old why the sky is blue.",
    "Write a Python function that says whether a word is a palindrome, and explain how it works.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take? Think step by step.",
    "List five things to check before a long bicycle tour, with one sentence on each.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Tell me how bread is made, from the field to the table.",
)
"""For SmolLM2, written for this demo."""

DRAFTED = "bold green"  # accepted drafts; what the target wrote itself is plain


@dataclass(frozen=True)
class DemoConfig:
    """Watch a model write in blocks, and what that gains over one token at a time.

    Accepted drafts are green on a terminal, what the target wrote itself is plain. Then plain and speculative decoding of the same
    prompt are timed in turn, compilation excluded, and compared token for token.
    """

    prompt: Positional[str] = ""
    """What to answer; one of ours if left out."""
    pair: Literal["smollm2", "tiny"] = "smollm2"
    """SmolLM2-135M-Instruct and its drafter, or the tiny pair that solves arithmetic word problems."""
    diffusion: bool = False
    """In place of a pair, a diffusion model solves a problem out of the masks: one token a pass, and adaptively, side by side."""
    max_new_tokens: int = 128
    """Tokens to write at most."""
    block_size: int | None = None
    """Tokens per block, the anchor counted; default: as the drafter was trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and cache. float32 is exact; in bfloat16 a CPU verifies blocks faster."""
    repeats: int = 1
    """How often each way is timed."""
    seed: int | None = None
    """Which of our prompts; default: another one each time."""


@dataclass(frozen=True)
class Comparison:
    """What was measured. Speeds are decoded tokens per second over all repeats, prefill and compilation excluded."""

    plain: Output
    speculative: Output
    plain_speed: float
    speculative_speed: float

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.speculative.tokens

    def lines(self) -> str:
        """The table and its verdict."""
        rows = [
            [name, speed, mean_acceptance_length(out.acceptance_lengths), sum(out.stats.rounds)]
            for name, speed, out in (
                ("plain", self.plain_speed, self.plain),
                ("speculative", self.speculative_speed, self.speculative),
            )
        ]
        gain = f"{self.speculative_speed / self.plain_speed:.2f} times" if self.plain_speed else "-"
        length = rows[1][2]
        return (
            f"{table(['', 'tokens/s', 'tokens per round', 'rounds'], rows)}\n\n"
            f"speed-up           {gain}\n"
            f"acceptance length  {f'{length:.2f}' if rows[1][3] else '-'}\n"
            f"identical output   {'yes' if self.identical else 'no'}"
        )


def run(config: DemoConfig, console: Console | None = None) -> Comparison | denoise_demo.Race:
    """Streams, measures, prints."""
    console = console or Console()
    if config.repeats < 1:
        raise DflaxError(f"repeats is {config.repeats}; it must be at least 1")
    if config.diffusion:
        for name in ("pair", "max_new_tokens", "block_size", "dtype"):
            if getattr(config, name) != getattr(DemoConfig(), name):
                raise DflaxError(
                    f"{name} is {getattr(config, name)!r}, which means nothing to --diffusion; leave it out"
                )
        return denoise_demo.run(config.prompt, config.seed, config.repeats, console)
    names = PAIRS[config.pair]
    for name in names:
        locate(name)  # a missing one is told before the other takes its time to load
    shown, prompt = choose_prompt(config)
    console.out(f"loading {' and '.join(names)} ...", style="dim", highlight=False)
    target, drafter = (load(name, dtype=config.dtype) for name in names)
    console.out(f"\n{shown}\n", style="bold", highlight=False)
    show(console, target, drafter, prompt, config.max_new_tokens, config.block_size)
    console.out("\nmeasuring ...", style="dim", highlight=False)
    result = compare(target, drafter, prompt, config.max_new_tokens, config.block_size, config.repeats)
    console.out(f"\n{result.lines()}", highlight=False)
    if not result.identical and config.dtype == "bfloat16":
        console.out("In bfloat16 two tokens of nearly the same score can change places; --dtype float32 is exact.")
    return result


def choose_prompt(config: DemoConfig) -> tuple[str, Any]:
    """What to show, and the prompt for the model: a chat for SmolLM2, plain text for the tiny pair."""
    chance = random.Random(config.seed)
    if config.pair == "tiny":
        from dflax.train import stories

        shown = config.prompt or stories.generate(0, chance.randrange(10**6), "test").prompt
        return shown, shown
    shown = config.prompt or chance.choice(PROMPTS)
    return shown, [{"role": "user", "content": shown}]


def show(
    console: Console, target: Model, drafter: Model, prompt: Any, max_new_tokens: int, block_size: int | None = None
) -> str:
    """Writes the response as it comes, accepted drafts in `DRAFTED`, and returns it."""
    writer = text.Detokenizer(target.tokenizer) if target.tokenizer is not None else None
    written = ""

    def write(tokens: list[int], style: str | None) -> None:
        nonlocal written
        piece = writer.push(tokens) if writer is not None else "".join(f"{token} " for token in tokens)
        written += piece
        console.out(piece, style=style, end="", highlight=False)

    for piece in stream_speculate(target, drafter, [prompt], max_new_tokens, block_size=block_size):
        write(piece.tokens[: piece.accepted], DRAFTED)
        write(piece.tokens[piece.accepted :], None)
    rest = writer.flush() if writer is not None else ""
    console.out(rest, highlight=False)
    return written + rest


def compare(
    target: Model, drafter: Model, prompt: Any, max_new_tokens: int, block_size: int | None = None, repeats: int = 1
) -> Comparison:
    """Times both ways in turn. The first round only warms up: whatever compiles does so there."""
    seconds, decoded = [0.0, 0.0], [0, 0]
    ways = (
        lambda: generate(target, [prompt], max_new_tokens),
        lambda: speculate(target, drafter, [prompt], max_new_tokens, block_size=block_size),
    )
    outputs = [way() for way in ways]
    for _ in range(repeats):
        for i, way in enumerate(ways):
            outputs[i] = way()
            seconds[i] += outputs[i].stats.decode_seconds
            decoded[i] += len(outputs[i].tokens[0]) - 1  # the first token is the prefill's
    speeds = [n / s if s else 0.0 for n, s in zip(decoded, seconds, strict=True)]
    return Comparison(outputs[0], outputs[1], speeds[0], speeds[1])
