"""What the bench of denoising asks: problems whose answers can be checked, and prompts that cannot."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflax import text
from dflax.errors import DflaxError
from dflax.infer import prompts

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Task:
    """One problem: `index` counts within its set, `tokens` is what the model reads."""

    set: str
    index: int
    tokens: tuple[int, ...]
    check: Callable[[str], bool] | None = None
    """Whether an answer is right; None where that cannot be told."""
    value: float | None = None
    """The right number, where there is one."""


def load_stories(tokenizer: text.Tokenizer | None, count: int) -> list[Task]:
    """The arithmetic stories that diffusion models learn, of the test split; right is the value behind the last ####."""
    from dflax.train import stories  # brings the tokenizers library with it

    if tokenizer is None:
        raise DflaxError("the model has no tokenizer to read stories with; give prompts as token ids, by data")
    drawn = stories.stories(0, "test", count)
    asked = ((story, prompts.tokenize(story.prompt, tokenizer, "a story")) for story in drawn)
    return [Task("stories", i, tokens, story.check) for i, (story, tokens) in enumerate(asked)]


def load_file(path: str | Path, tokenizer: text.Tokenizer | None, limit: int | None = None) -> list[Task]:
    """Problems of a file, the first `limit`.

    A .jsonl(.gz) file has rows with `question`, `prompt`, `messages` or `prompt_tokens`, and perhaps an `answer`: a number, or text that
    ends in "#### number" as GSM8K's does. Such a row is right when the last number of the answer given is that one. Any other file has
    a prompt a line.
    """
    path = Path(path)
    found: list[Task] = []
    for where, asked, answer in _rows(path):
        if limit is not None and len(found) == limit:
            break
        number = None if answer is None else known_number(answer)
        check = None if number is None else partial(ends_in, number)
        tokens = prompts.tokenize(asked, tokenizer, where)
        found.append(Task(path.name.split(".")[0], len(found), tokens, check, number))
    if not found:
        raise DflaxError(f"{path} has no problem")
    return found


def _rows(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """(where it stands, prompt, answer or None) of every row."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from ((where, asked, None) for where, _, asked in prompts.read(path))
        return
    from dflax.train import data  # reads rows of every kind; brings the data loader with it

    for located in data.read(path):
        row = located.row
        asked = row["prompt_tokens"] if "prompt_tokens" in row else data.conversation(located).prompt
        yield located.where, asked, row.get("answer")


def known_number(answer: Any) -> float | None:
    """Of an answer column: what stands behind its last ####, or the whole; None if that is no number."""
    told = str(answer).rpartition("####")[2].strip()
    return final_number(told) if NUMBER.fullmatch(told) else None


def final_number(text: str) -> float | None:
    """The last number of a text, thousands separated by commas or not; None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def ends_in(number: float, text: str) -> bool:
    """Whether this is the last number of the text."""
    return final_number(text) == number


def with_room(tasks: Sequence[Task], gen_length: int, max_positions: int) -> list[Task]:
    """Those whose prompt leaves room for an answer of this length."""
    return [task for task in tasks if len(task.tokens) + gen_length <= max_positions]
