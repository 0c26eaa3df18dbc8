"""The prompt sets that speculative decoding is measured on, by name, and prompts of the user's own."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflax import text
from dflax.errors import DflaxError

MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What the benchmark of the DFlash authors adds to mathematical problems."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set: `index` counts within the set, `tokens` is what the model reads."""

    set: str
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PromptSet:
    """Where a set is on the hub and how one of its rows is asked.

    hub: as `dflax.train.data.read` takes it. columns: names of the column that holds the task, any of them. after: what is put behind
    it. ask: the row's text made a request, if the text is none. keep: rows that belong to the set.
    """

    name: str
    hub: str
    columns: tuple[str, ...]
    after: str = ""
    ask: Callable[[str, Mapping[str, Any]], str] = lambda task, row: task
    keep: Callable[[Mapping[str, Any]], bool] = lambda row: True

    def request(self, row: Mapping[str, Any], where: str, bare: bool = False) -> str:
        """What is asked of the model; `bare`: without `after`."""
        column = next((name for name in self.columns if name in row), None)
        if column is None:
            raise DflaxError(
                f"{where}: {self.name} needs a column {' or '.join(self.columns)}; the row has {', '.join(row)}"
            )
        task = row[column]
        if isinstance(task, list) and task:  # turns: the first
            task = task[0]
        if not isinstance(task, str) or not task:
            raise DflaxError(f"{where}: column {column!r} is empty or no text")
        return self.ask(task, row) + ("" if bare else self.after)


def _complete(task: str, row: Mapping[str, Any]) -> str:
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{task}\n```"


def _contest(task: str, row: Mapping[str, Any]) -> str:
    start = row.get("starter_code")
    form = (
        f"Begin with this code:\n```python\n{start}\n```"
        if start
        else "Read from standard input and write to standard output."
    )
    return f"Write a Python program that solves this problem.\n\n{task}\n\n{form}"


SETS = {
    "gsm8k": PromptSet("GSM8K", "openai/gsm8k:main:test", ("question",), after=MATH),
    "math-500": PromptSet("MATH-500", "HuggingFaceH4/MATH-500::test", ("problem",), after=MATH),
    "aime25": PromptSet("AIME25", "MathArena/aime_2025", ("problem", "question"), after=MATH),
    "humaneval": PromptSet("HumanEval", "openai/openai_humaneval::test", ("prompt",), ask=_complete),
    "mbpp": PromptSet(
        "MBPP", "google-research-datasets/mbpp:full:test", ("text", "prompt"),
        keep=lambda row: 11 <= int(row.get("task_id", 11)) <= 510,
    ),
    "livecodebench": PromptSet(
        "LiveCodeBench", "hf://datasets/livecodebench/code_generation_lite/test*.jsonl", ("question_content",), ask=_contest
    ),
    "mt-bench": PromptSet("MT-Bench", "HuggingFaceH4/mt_bench_prompts", ("turns", "prompt")),
}  # fmt: skip
"""By the name used on the command line. MT-Bench: the first turns; MBPP: its test ids, 11 to 510. LiveCodeBench: its files, all releases
together, for the script that picks among them is refused by `datasets`."""


def load_set(
    name: str, tokenizer: text.Tokenizer | None, *, source: str | None = None, limit: int | None = None,
    bare: bool = False, enable_thinking: bool | None = None,
) -> list[Prompt]:  # fmt: skip
    """The first `limit` prompts of a named set, from the hub or from a local JSONL file with the set's own columns.

    Args:
      name: one of `SETS`.
      tokenizer: of the model; its chat template is used if it has one.
      source: a .jsonl or .jsonl.gz file; None: the hub.
      limit: None: all.
      bare: without the instruction that the DFlash authors add to mathematical problems.
      enable_thinking: passed to the chat template.

    Raises:
      DflaxError: an unknown name, a missing file, a row without the set's column, or the hub's complaint.
    """
    prompt_set = SETS.get(name.lower())
    if prompt_set is None:
        raise DflaxError(f"there is no prompt set {name!r}; there are {', '.join(SETS)}")
    from dflax.train import data  # reads rows of every kind; brings the data loader with it

    prompts: list[Prompt] = []
    for located in data.read(source or prompt_set.hub):
        if limit is not None and len(prompts) == limit:
            break
        if prompt_set.keep(located.row):
            request = prompt_set.request(located.row, located.where, bare)
            tokens = tokenize(request, tokenizer, located.where, enable_thinking)
            prompts.append(Prompt(prompt_set.name, len(prompts), tokens))
    if not prompts:
        raise DflaxError(f"{source or prompt_set.hub} has no row of {prompt_set.name}")
    return prompts


def load_file(
    path: str | os.PathLike[str], tokenizer: text.Tokenizer | None, *, limit: int | None = None,
    enable_thinking: bool | None = None,
) -> list[Prompt]:  # fmt: skip
    """Prompts of the user's own, the first `limit` of each set.

    A .jsonl file has rows with `prompt` (text), `messages` or `prompt_tokens`, and perhaps `set`; any other file one prompt a line.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    for where, name, prompt in read(path):
        index = counts.get(name, 0)
        if limit is None or index < limit:
            counts[name] = index + 1
            prompts.append(Prompt(name, index, tokenize(prompt, tokenizer, where, enable_thinking)))
    if not prompts:
        raise DflaxError(f"{path} has no prompt")
    return prompts


def read(path: Path) -> Iterator[tuple[str, str, Any]]:
    """(where it stands, set, prompt) of every prompt of a file; forms as in `load_file`, prompts as they are there."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DflaxError(f"cannot read prompts from {path}: {error}") from error
        yield from ((f"{path}:{number}", path.stem, line) for number, line in enumerate(lines, 1) if line.strip())
        return
    from dflax.train import data

    for located in data.read(path):
        row = located.row
        name = str(row.get("set") or path.name.split(".")[0])
        if "prompt_tokens" in row:
            yield located.where, name, row["prompt_tokens"]
        else:
            yield located.where, name, data.conversation(located).prompt


def asked(given: Sequence[str], path: Path | None) -> list[Any]:
    """The prompts of a command line and then those of its --file, as they are there; DflaxError if there is none or an empty one.

    (A tokenizer may make a begin token of an empty text, which a model would go on from.)
    """
    prompts = [*given, *(() if path is None else (prompt for _, _, prompt in read(path)))]
    if not prompts:
        raise DflaxError("there is no prompt; give some after the model, or --file")
    if any(isinstance(prompt, str) and not prompt.strip() for prompt in prompts):
        raise DflaxError("a prompt is empty; a model needs at least one token to continue")
    return prompts


def tokenize(
    prompt: Any, tokenizer: text.Tokenizer | None, where: str, enable_thinking: bool | None = None
) -> tuple[int, ...]:
    """Text (one user message where there is a chat template), chat messages or token ids -> token ids."""
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
        prompt = [{"role": "user", "content": prompt}]
    try:
        return tuple(text.encode(tokenizer, prompt, enable_thinking=enable_thinking))
    except DflaxError as error:
        raise DflaxError(f"{where}: {error}") from error
