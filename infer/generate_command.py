"""`dflax generate`: prompts from the command line or a file, text as it comes or JSON lines."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from dflax.errors import DflaxError
from dflax.infer.generate import Output, generate, speculate
from dflax.infer.prompts import asked
from dflax.infer.report import mean_acceptance_length
from dflax.infer.streaming import stream
from dflax.model import Model, load

THINKING = {"default": None, "on": True, "off": False}


DRAFTING = ("block_size", "drafts", "allow_larger_blocks")


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a model: in blocks with a drafter, one token at a time without.

    A single prompt is answered with text as it is written. Several prompts, or a file, are answered with one JSON line each: the
    prompt's number, text, tokens, verify rounds and acceptance length. Where the tokenizer has a chat template, a prompt of text
    is put to the model as a user's message.
    """

    model: Positional[str]
    """The target: a folder, a .gguf file, a hub id or a built-in name."""
    prompts: Positional[tuple[str, ...]] = ()
    """Texts to continue or answer."""
    drafter: str | None = None
    """A drafter made for the model; the output stays the same."""
    file: Path | None = None
    """More prompts: .jsonl with objects that have "prompt", "messages" or "prompt_tokens", or any other file with one a line."""
    raw: bool = False
    """Take prompts as they are, without the chat template."""
    thinking: Literal["default", "on", "off"] = "default"
    """Thinking mode, where the chat template has one."""
    max_new_tokens: int = 256
    """Tokens to write at most."""
    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int | None = None
    """Draw among the k most probable tokens only."""
    top_p: float | None = None
    """Draw among the most probable tokens that make up this mass."""
    seed: int = 0
    """Noise is keyed by this (plus the number of the batch), the prompt's number in the batch, and the position."""
    block_size: int | Literal["auto"] | None = None
    """Tokens per block, the anchor counted; default: as the drafter was trained; auto: the fastest as measured."""
    drafts: Literal["argmax", "sampled"] = "argmax"
    """What the drafter proposes at temperatures above 0."""
    allow_larger_blocks: bool = False
    """Permit blocks larger than trained."""
    batch_size: int = 16
    """Prompts that are answered together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and cache."""


def run(config: GenerateConfig) -> None:
    """Prints the responses."""
    if config.batch_size < 1:
        raise DflaxError(f"batch-size is {config.batch_size}; it must be at least 1")
    for name in DRAFTING:
        if config.drafter is None and getattr(config, name) != getattr(GenerateConfig, name):
            raise DflaxError(f"--{name.replace('_', '-')} is for blocks that a drafter proposes; give --drafter too")
    prompts = asked(config.prompts, config.file)
    target = load(config.model, dtype=config.dtype)
    drafter = None if config.drafter is None else load(config.drafter, dtype=config.dtype)
    if not config.raw and getattr(target.tokenizer, "chat_template", None):
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    if len(prompts) == 1 and config.file is None and config.block_size != "auto":
        _stream(config, target, drafter, prompts)
        return
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        out = _batch(config, target, drafter, batch, range(start, start + len(batch)))
        for number, record in enumerate(_records(out), start):
            print(json.dumps({"prompt": number, **record}, ensure_ascii=False), flush=True)


def _stream(config: GenerateConfig, target: Model, drafter: Model | None, prompts: list[Any]) -> None:
    pieces = stream(target, drafter, prompts, **_settings(config), **_drafting(config, drafter))
    for piece in pieces:
        sys.stdout.write(piece.text if target.tokenizer is not None else "".join(f"{token} " for token in piece.tokens))
        sys.stdout.flush()
    print()


def _batch(config: GenerateConfig, target: Model, drafter: Model | None, prompts: list[Any], index: range) -> Output:
    if drafter is None:
        return generate(target, prompts, **_settings(config), index=index)
    return speculate(target, drafter, prompts, **_settings(config), **_drafting(config, drafter), index=index)


def _settings(config: GenerateConfig) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    return {name: getattr(config, name) for name in names} | {"enable_thinking": THINKING[config.thinking]}


def _drafting(config: GenerateConfig, drafter: Model | None) -> dict[str, Any]:
    if drafter is None:
        return {}
    return {name: getattr(config, name) for name in DRAFTING}


def _records(out: Output) -> Iterator[dict[str, Any]]:
    for row, tokens in enumerate(out.tokens):
        rounds = out.acceptance_lengths[row]
        yield {
            "text": None if out.texts is None else out.texts[row],
            "tokens": tokens,
            "rounds": len(rounds),
            "acceptance_length": mean_acceptance_length([rounds]) if rounds else None,
        }
