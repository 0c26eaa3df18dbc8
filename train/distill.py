"""`dflax distill`: the target answers prompts, and its answers are what a drafter learns from.

Slots of one batch answer independently and are refilled from the queue as they finish. An answer depends on its prompt, the seed and its
number, not on what is answered beside it, so a run that is killed and started again ends with the file of an undisturbed one.
"""

import hashlib
import json
import re
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from dflax import text
from dflax.errors import DflaxError
from dflax.infer.journal import Journal
from dflax.infer.refill import Finished, Request, Slots
from dflax.infer.state import capacity
from dflax.model import Model, load
from dflax.train import data

RESPONSES = "responses.jsonl"

ROUNDS = 8
"""Rounds between two looks for finished rows; a finished row idles for half of that on average."""

KEYS = ("prompt", "question", "instruction", "problem", "text")
"""Columns that hold a prompt in the usual datasets, tried in this order; `messages` and `conversations` come before them."""


@dataclass(frozen=True)
class DistillConfig:
    """Let a target write responses to prompts, to train a drafter on."""

    target: str = ""
    """The model that answers: a folder, a .gguf file, a hub id or a built-in name."""
    data: tuple[str, ...] = ()
    """Prompts: .jsonl(.gz) files, folders of them or datasets of the hub (NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, as in
    openai/gsm8k:main:train, which is the split unless named); with "[600:974]" behind it, these rows only."""
    out: str = "distilled"
    """Folder for responses.jsonl; the same folder again goes on where a run was stopped."""
    prompt_key: str | None = None
    """Column of the prompt; default: messages, conversations, prompt, question, instruction (with its input), problem or text."""
    limit: int | None = None
    """Prompts at most, the first ones of all data together."""
    samples: int = 1
    """Responses per prompt."""
    max_new_tokens: int = 256
    max_prompt_tokens: int = 384
    """Longer prompts are left out."""
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    greedy_fraction: float = 0.0
    """This share of the responses, chosen by the seed and their number, is written at temperature 0 all the same."""
    seed: int = 0
    chat: bool | None = None
    """Put a text prompt to the model as a user's message; default: if the tokenizer has a chat template."""
    enable_thinking: bool | None = None
    """Thinking mode of the chat template, where it has one; recorded with every response. None: its default."""
    slots: int = 32
    """Responses that are written at the same time."""
    drafter: str | None = None
    """Write in blocks with this drafter; what is written stays the same."""
    block_size: int | None = None
    """Default: as the drafter was trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if not self.target:
            raise DflaxError("target is empty; name the model that answers")
        if not self.data:
            raise DflaxError("data is empty; name files or datasets of prompts")
        for name in ("limit", "samples", "max_new_tokens", "max_prompt_tokens", "slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DflaxError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.greedy_fraction <= 1:
            raise DflaxError(f"greedy_fraction is {self.greedy_fraction}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Asked:
    """A prompt as the dataset has it, and as the model reads it."""

    source: str
    prompt: str | list[data.Message] | None
    tokens: tuple[int, ...]


def run(config: DistillConfig) -> Path:
    """Writes OUT/responses.jsonl, one row per response sorted by its index, and returns the folder."""
    target = load(config.target, dtype=config.dtype)
    drafter = None if config.drafter is None else load(config.drafter, dtype=config.dtype)
    asked, too_long = prompts(config, target)
    if too_long:
        print(f"{too_long} prompts of more than {config.max_prompt_tokens} tokens are left out")
    if not asked:
        raise DflaxError("there is no prompt to answer")
    longest, positions = max(len(prompt.tokens) for prompt in asked), target.config.max_positions
    if longest + config.max_new_tokens > positions:
        raise DflaxError(
            f"the longest prompt has {longest} tokens and max_new_tokens is {config.max_new_tokens}, but {config.target} has "
            f"{positions} positions; lower max_new_tokens or max_prompt_tokens"
        )
    path = Path(config.out) / RESPONSES
    with Journal(path, _settings(config, target, asked)) as journal:
        respond(config, target, drafter, asked, journal)
        rows = sorted(journal.rows, key=lambda row: row["index"])
    data.write_rows(path, rows)
    written = sum(len(row["response_tokens"]) for row in rows)
    print(f"{len(rows)} responses, {written} tokens")
    return path.parent


def respond(
    config: DistillConfig, target: Model, drafter: Model | None, asked: Sequence[Asked], journal: Journal
) -> None:
    """Answers what the journal lacks."""
    columns = capacity(max(len(prompt.tokens) for prompt in asked) + config.max_new_tokens)
    slots = Slots(target, drafter, config.slots, columns, config.block_size)
    finished = {row["index"] for row in journal.rows}
    total = len(asked) * config.samples
    queue = deque(request for request in _requests(config, target, asked) if request.index not in finished)
    written, begin = 0, time.perf_counter()
    with tqdm(total=total, initial=total - len(queue), desc="distill", unit="response", disable=None) as progress:
        while queue or slots.busy:
            while queue and slots.free:
                slots.admit(queue.popleft())
            for answer in slots.step(ROUNDS):
                journal.append(_row(config, target, asked[answer.request.index // config.samples], answer))
                written += len(answer.tokens)
                progress.update()
            progress.set_postfix_str(f"{written / (time.perf_counter() - begin):.0f} tokens/s", refresh=False)


def prompts(config: DistillConfig, target: Model) -> tuple[list[Asked], int]:
    """All prompts in order, and how many were too long."""
    asked, too_long = [], 0
    chat = bool(getattr(target.tokenizer, "chat_template", None)) if config.chat is None else config.chat
    for where, source, prompt in _located(config):
        if config.limit is not None and len(asked) == config.limit:
            break
        given = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        try:
            tokens = text.encode(target.tokenizer, given, target.config.vocab_size, config.enable_thinking)
        except DflaxError as error:
            raise DflaxError(f"{where}: {error}") from error
        if len(tokens) > config.max_prompt_tokens:
            too_long += 1
        else:
            asked.append(Asked(source, prompt if isinstance(prompt, str) else None, tuple(tokens)))
    return asked, too_long


def _located(config: DistillConfig) -> Iterator[tuple[str, str, Any]]:
    """(place, name of the source, prompt as text, messages or token ids)."""
    for entry in config.data:
        match = re.fullmatch(r"(.+)\[(\d*):(\d*)\]", entry)
        name, start, stop = match.groups() if match else (entry, "", "")
        stem = re.split("[.:]", Path(name).name)[0]
        for number, located in enumerate(data.read(name)):
            if number < int(start or 0):
                continue
            if stop and number >= int(stop):
                break
            prompt = _prompt(located, config.prompt_key)
            yield located.where, str(located.row.get("source") or stem), prompt


def _prompt(located: data.Located, key: str | None) -> Any:
    row = located.row
    if key is None and "prompt_tokens" in row and "prompt" not in row:
        return row["prompt_tokens"]
    if key is None and not {"messages", "conversations"} & set(row):
        key = next((name for name in KEYS if name in row), None)
        if key is None:
            raise DflaxError(
                f"{located.where}: no column holds a prompt; the row has {', '.join(row)} (prompt_key names one)"
            )
        if key == "instruction":
            match row:  # a seed task of self-instruct has inputs in its instances
                case {"input": str(given)} | {"instances": [{"input": str(given)}, *_]} if given:
                    return f"{row[key]}\n\n{given}"
    return data.conversation(located, prompt_key=key).prompt


def _requests(config: DistillConfig, target: Model, asked: Sequence[Asked]) -> Iterator[Request]:
    stops = tuple(token for token in target.stop_token_ids if token < target.config.vocab_size)
    for number, prompt in enumerate(asked):
        for index in range(number * config.samples, (number + 1) * config.samples):
            chance = zlib.crc32(f"{config.seed} {index}".encode()) / 2**32
            temperature = 0.0 if chance < config.greedy_fraction else config.temperature
            yield Request(
                prompt.tokens, index, config.max_new_tokens, temperature, config.top_k, config.top_p, config.seed, stops
            )


def _row(config: DistillConfig, target: Model, asked: Asked, answer: Finished) -> dict[str, Any]:
    """In the form that `dflax train drafter` reads. The prompt's tokens, as the model read them, are what training takes."""
    prompt = {} if asked.prompt is None else {"prompt": asked.prompt}
    response = {} if target.tokenizer is None else {"response": text.decode(target.tokenizer, answer.tokens)}
    return {
        "index": answer.request.index,
        "source": asked.source,
        **prompt,
        "prompt_tokens": list(asked.tokens),
        "temperature": answer.request.temperature,
        "seed": answer.request.seed,
        "model": target.name,
        "thinking": config.enable_thinking,
        "response_tokens": answer.tokens,
        **response,
    }


def _settings(config: DistillConfig, target: Model, asked: Sequence[Asked]) -> dict[str, Any]:
    """What every response of one file must agree on."""
    settings = asdict(config)
    for name in ("out", "data", "prompt_key", "limit", "max_prompt_tokens", "slots", "drafter", "block_size"):
        del settings[name]
    digest = hashlib.sha256(json.dumps([asdict(prompt) for prompt in asked]).encode()).hexdigest()
    return settings | {"target_weights": target.fingerprint, "prompts": len(asked), "prompts_sha256": digest}
