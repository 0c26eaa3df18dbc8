"""What a diffusion model is trained on: rows of prompt, answer and the end tokens that pad it, or rows of running text.

A batch is {"tokens" [B, S], "prompt_len" [B], "length" [B]}; columns from a row's length on are seen by nobody. All rows have the same
S, and answers are never packed: these models know no attention mask.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflax import text
from dflax.errors import DflaxError
from dflax.train import stories
from dflax.train.data import Document, Located, Shuffled

Batch = dict[str, np.ndarray]


def canvases(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], columns: int, gen_length: int, end: int
) -> Batch:
    """One row per answer: cut or padded with end tokens to gen_length tokens; 0: to the end of the row, `columns`."""
    tokens = np.full((len(prompts), columns), end, np.int32)
    prompt_len = np.asarray([len(prompt) for prompt in prompts], np.int32)
    length = np.minimum(prompt_len + gen_length, columns) if gen_length else np.full_like(prompt_len, columns)
    for row, prompt, answer, stop in zip(tokens, prompts, answers, length, strict=True):
        ids = np.asarray([*prompt, *answer], np.int32)[:stop]
        row[: len(ids)] = ids
    return {"tokens": tokens, "prompt_len": prompt_len, "length": length}


class StoryBatches:
    """The trainer's `Batches`: fresh problems of `dflax.train.stories` at every step, a pure function of it."""

    def __init__(self, rows: int, columns: int, gen_length: int, seed: int):
        self._rows, self._shape, self._seed = rows, (columns, gen_length), seed
        self._tokenizer: text.Tokenizer = stories.tokenizer()

    @property
    def steps_per_epoch(self) -> int:
        """There are no epochs; by convention a thousand steps."""
        return 1000

    def batch_at(self, step: int) -> Batch:
        return self.of("train", step * self._rows, self._rows)

    def of(self, split: str, start: int, count: int) -> Batch:
        """Problems start .. start + count - 1 of a split."""
        drawn = list(stories.stories(self._seed, split, count, start))
        ids = self._tokenizer([problem.prompt for problem in drawn])["input_ids"]
        answers = self._tokenizer([problem.answer_text for problem in drawn], add_special_tokens=False)["input_ids"]
        return canvases(ids, answers, *self._shape, self._tokenizer.eos_token_id)


def answer_rows(documents: Iterable[Document], columns: int, gen_length: int, end: int) -> Batch:
    """A row per response of a conversation: all before it is the prompt.

    Prompts that leave no room for an answer in a row are dropped and longer answers cut, which is said; DflaxError if none is left.
    """
    prompts, answers, dropped, cut = [], [], 0, 0
    for document in documents:
        ids, edges = document.tokens.tolist(), np.flatnonzero(np.diff(document.loss_mask, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            room = gen_length or columns - first
            if room < 1 or first + room > columns:
                dropped += 1
                continue
            cut += last - first > room
            prompts.append(ids[:first])
            answers.append(ids[first:last])
    if not prompts:
        raise DflaxError(f"no prompt leaves room for an answer in rows of {columns} tokens ({dropped} were dropped)")
    if dropped or cut:
        print(f"of {len(prompts) + dropped} answers {dropped} are left out for long prompts, {cut} are cut")
    return canvases(prompts, answers, columns, gen_length, end)


def text_rows(rows: Iterable[Located], tokenizer: text.Tokenizer, columns: int) -> Batch:
    """Texts (key "text") side by side, each closed by the end token, cut into whole rows; what is left at the end is dropped."""
    ids: list[int] = []
    for item in rows:
        if not isinstance(item.row.get("text"), str):
            raise DflaxError(f"{item.where}: key 'text' is missing or no text; pretraining reads running text")
        ids += [*text.encode(tokenizer, item.row["text"]), tokenizer.eos_token_id]
    count = len(ids) // columns
    if not count:
        raise DflaxError(f"the data have {len(ids)} tokens; a row takes {columns}")
    tokens = np.asarray(ids[: count * columns], np.int32).reshape(count, columns)
    return {"tokens": tokens, "prompt_len": np.zeros(count, np.int32), "length": np.full(count, columns, np.int32)}


class TextBatches:
    """Shuffled rows of text, of which a share is cut to a random length (LLaDA: 1 % of the data), so that the model knows short ones."""

    def __init__(self, rows: Batch, batch_size: int, seed: int, cut_share: float):
        self._rows, self._seed, self._cut_share = Shuffled(rows, batch_size, seed), seed, cut_share

    @property
    def steps_per_epoch(self) -> int:
        return self._rows.steps_per_epoch

    def batch_at(self, step: int) -> Batch:
        batch: dict[str, Any] = self._rows.batch_at(step)
        chance = np.random.default_rng((self._seed, step))
        rows, columns = batch["tokens"].shape
        cut = chance.random(rows) < self._cut_share
        shorter = chance.integers(1, columns, rows, endpoint=True, dtype=np.int32)
        return {**batch, "length": np.where(cut, shorter, batch["length"])}
