"""`dflax denoise`: prompts from the command line or a file, answers as they come out of the masks or as JSON lines."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tyro.conf import Positional

import dflax
from dflax import controllers, text
from dflax.errors import DflaxError
from dflax.infer.canvas import Cache
from dflax.infer.diffuse import DenoiseOutput, DenoisePiece, denoise, end_tokens, stream_denoise
from dflax.infer.endings import EndOfText, text_length
from dflax.infer.generate_command import THINKING
from dflax.infer.policy_names import PolicyName, build_policy
from dflax.infer.prompts import asked
from dflax.model import Model

MASK = "▁"


@dataclass(frozen=True)
class DenoiseConfig:
    """Answer prompts with a diffusion language model.

    A single prompt is answered before the eye, masks turning into text. Several prompts, or a file, are answered with one JSON
    line each: the prompt's number, text, tokens, forward passes and the pass that wrote each token. Where the tokenizer has a chat
    template, a prompt of text is put to the model as a user's message.
    """

    model: Positional[str]
    """LLaDA, Dream or LLaDA-MoE: a folder, a hub id or a built-in name."""
    prompts: Positional[tuple[str, ...]] = ()
    """Texts to answer."""
    file: Path | None = None
    """More prompts: .jsonl with objects that have "prompt", "messages" or "prompt_tokens", or any other file with one a line."""
    raw: bool = False
    """Take prompts as they are, without the chat template."""
    thinking: Literal["default", "on", "off"] = "default"
    """Thinking mode, where the chat template has one."""
    gen_length: int = 256
    """Tokens of an answer, a multiple of the block length."""
    block_length: int = 32
    """Tokens that are denoised together."""
    steps: int | None = None
    """Of the schedule, a multiple of the number of blocks; default: one token per step."""
    policy: PolicyName = "threshold"
    """Who gets committed. "schedule" is LLaDA's own sampler."""
    value: float | None = None
    """The policy's number: its threshold, factor, margin, or (Dream's rules) alg_temp; default: the published one."""
    controller: str | None = None
    """Of "tspd" and "learn2pd": the folder that `dflax train controller` wrote, a hub id or a built-in name."""
    cache: Literal["none", "prefix", "dual"] = "none"
    """What of a canvas is not computed again in every pass."""
    refresh_every: int | None = None
    """A full pass at least every so many steps of a block; default: at its first step only."""
    look_ahead: bool = False
    """Confidence extrapolation in front of the policy."""
    stop: bool = False
    """Stop an answer when everything before a written end token is written."""
    truncate: bool = False
    """Cut an answer at end tokens that are predicted with 0.9 or more, too."""
    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int | None = None
    """Draw among the k most probable tokens only."""
    top_p: float | None = None
    """Draw among the most probable tokens that make up this mass."""
    cfg_scale: float = 0.0
    """Guidance away from what the model would write without the prompt."""
    seed: int = 0
    """Noise is keyed by this, the prompt's number, position and step."""
    mask_token_id: int | None = None
    """Where the model's config.json lacks it (LLaDA-MoE: 156895)."""
    batch_size: int = 16
    """Prompts that are answered together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and cache."""


def run(config: DenoiseConfig) -> None:
    """Prints the answers."""
    if config.batch_size < 1:
        raise DflaxError(f"batch-size is {config.batch_size}; it must be at least 1")
    prompts = asked(config.prompts, config.file)
    settings = _settings(config)
    model = dflax.load(config.model, dtype=config.dtype, mask_token_id=config.mask_token_id)
    if not config.raw and getattr(model.tokenizer, "chat_template", None):
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    if len(prompts) == 1 and config.file is None:
        _watch(model, prompts, settings, config.gen_length)
        return
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        out = denoise(model, batch, **settings, index=range(start, start + len(batch)))
        for number, record in enumerate(_records(out), start):
            print(json.dumps({"prompt": number, **record}, ensure_ascii=False), flush=True)


def _settings(config: DenoiseConfig) -> dict[str, Any]:
    names = ("gen_length", "block_length", "steps", "temperature", "top_k", "top_p", "cfg_scale", "seed")
    end = EndOfText(stop=config.stop, truncate=config.truncate) if config.stop or config.truncate else None
    return {name: getattr(config, name) for name in names} | {
        "policy": build_policy(config.policy, config.value, config.controller),
        "cache": Cache(config.cache, refresh_every=config.refresh_every),
        "extrapolation": _look_ahead(config),
        "end_of_text": end,
        "enable_thinking": THINKING[config.thinking],
    }


def _look_ahead(config: DenoiseConfig) -> dflax.ConfidenceExtrapolation | None:
    """The constants fitted with the controller, where there is one."""
    if not config.look_ahead:
        return None
    return (
        dflax.ConfidenceExtrapolation()
        if config.controller is None
        else controllers.load_extrapolation(config.controller)
    )


@dataclass(frozen=True)
class Frame:
    """An answer after a pass. answer: token ids, None where it is masked."""

    answer: list[int | None]
    nfe: int


def frames(pieces: Iterable[DenoisePiece], gen_length: int) -> Iterator[Frame]:
    """The single answer of a stream (`stream_denoise`) as it grows."""
    answer: list[int | None] = [None] * gen_length
    for piece in pieces:
        for position, token in zip(piece.positions, piece.tokens, strict=True):
            answer[position] = token
        answer = answer[: piece.length]
        yield Frame(list(answer), piece.nfe)


def _watch(model: Model, prompts: list[Any], settings: dict[str, Any], gen_length: int) -> None:
    """One answer, redrawn after every pass on a terminal; elsewhere printed when it is done."""
    ends = set(end_tokens(model, settings["end_of_text"]))
    frame = Frame([None] * gen_length, 0)
    console = Console()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for frame in frames(stream_denoise(model, prompts, **settings), gen_length):
            if console.is_terminal:
                live.update(Text(shown(model, frame.answer)), refresh=True)
    answer = frame.answer
    cut = text_length(answer, {*ends, None})
    print(shown(model, answer[:cut]))
    console.print(f"{frame.nfe} forward passes, {cut} tokens", style="dim", highlight=False)


def shown(model: Model, answer: list[int | None]) -> str:
    """Text with a sign for every masked token; ids where there is no tokenizer."""
    if model.tokenizer is None:
        return " ".join(MASK if token is None else str(token) for token in answer)
    out, run = [], []
    for token in [*answer, None]:
        if token is not None:
            run.append(token)
            continue
        out.append(text.decode(model.tokenizer, run) + MASK)
        run = []
    return "".join(out).removesuffix(MASK)


def _records(out: DenoiseOutput) -> list[dict[str, Any]]:
    return [
        {
            "text": None if out.texts is None else out.texts[row],
            "tokens": tokens,
            "nfe": out.nfe[row],
            "commit_steps": out.commit_steps[row],
        }
        for row, tokens in enumerate(out.tokens)
    ]
