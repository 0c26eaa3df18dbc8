"""Text in, batches out: rows of a dataset -> conversations -> tokens with a loss mask -> packed rows -> the batch of a step.

Every stage is a pure function of its input and a seed. `Shuffled.batch_at(step)` finds the batch of any step without walking through those
before it, so a resumed run sees the data in the order of an uninterrupted one.
"""

import gzip
import hashlib
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool, Int

from dflax import files, text
from dflax.errors import DflaxError

Row = dict[str, Any]
Message = dict[str, str]

SUFFIXES = (".jsonl", ".jsonl.gz")
HUB = "hf://"
HUB_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([^:/]*))?(?::([^:/]*))?")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Located:
    """A row of a dataset and where it stands ("file.jsonl:12"), for messages about it."""

    where: str
    row: Row


@dataclass(frozen=True)
class Conversation:
    """What is said before the response (text, or chat messages), and the response if there is one (text, tokens or both)."""

    prompt: str | list[Message]
    response: str | None = None
    response_tokens: list[int] | None = None
    prompt_tokens: list[int] | None = None
    temperature: float | None = None
    source: str = ""
    where: str = ""

    @property
    def key(self) -> str:
        """The same for the same prompt, wherever it stands."""
        return json.dumps(self.prompt or self.prompt_tokens, sort_keys=True)


@dataclass(frozen=True)
class Document:
    """One tokenized conversation."""

    tokens: Int[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]  # tokens of responses


@dataclass(frozen=True)
class Packed:
    """Documents side by side in rows of equal length.

    `ctx_start` is the column where a token's document begins: what a token may look back to, and, within a row, the document's identity
    (a label at another `ctx_start` than its anchor belongs to another document). Padding has its own column there and no loss.
    """

    tokens: Int[np.ndarray, "R S"]
    loss_mask: Bool[np.ndarray, "R S"]
    ctx_start: Int[np.ndarray, "R S"]


# --- rows


def read(source: str | os.PathLike[str]) -> Iterator[Located]:
    """The rows of a .jsonl or .jsonl.gz file, of all such files in a folder (by name), or of a dataset of the hub.

    The hub's are named NAME, NAME:CONFIG or NAME:CONFIG:SPLIT ("openai/gsm8k:main:test"; NAME::SPLIT leaves the config to the hub, and the
    split is "train" unless named), or by their JSON files (hf://datasets/OWNER/NAME/test*.jsonl) where a dataset is only files.
    Raises DflaxError naming file and line of a malformed row, a missing file, or the hub's complaint.
    """
    path, name = Path(source), os.fspath(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise DflaxError(f"{path} has no .jsonl or .jsonl.gz file")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    elif not name.startswith(HUB) and (path.name.endswith(SUFFIXES) or name.startswith((".", "/", "~"))):
        raise DflaxError(f"there is no file or folder {path}")
    else:
        yield from _read_hub(name)


def _read_file(path: Path) -> Iterator[Located]:
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DflaxError(f"{path}:{number} is not JSON: {error.msg} at column {error.colno}") from None
                if not isinstance(row, dict):
                    raise DflaxError(f"{path}:{number} is a {type(row).__name__}; each line must be a JSON object")
                yield Located(f"{path}:{number}", row)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DflaxError(f"cannot read {path}: {error}") from error


def _read_hub(source: str) -> Iterator[Located]:
    if source.startswith(HUB):
        what: dict[str, Any] = {"path": "json", "data_files": source, "split": "train"}
    elif match := HUB_NAME.fullmatch(source):
        name, config, split = match.groups()
        what = {"path": name, "name": config or None, "split": split or "train"}
    else:
        raise DflaxError(
            f"{source!r} is no file or folder here, and no dataset of the hub either: those are written NAME, NAME:CONFIG, "
            f"NAME:CONFIG:SPLIT or {HUB}datasets/OWNER/NAME/FILES"
        )
    import datasets

    try:
        rows = datasets.load_dataset(**what)
    except Exception as error:  # the hub, the network and the dataset's own files fail in many ways
        says = textwrap.shorten(str(error) or type(error).__name__, 300)
        raise DflaxError(
            f"cannot load the dataset {source!r} (split {what['split']!r}): {says}; NAME:CONFIG:SPLIT names another config or split, "
            "a local .jsonl works too"
        ) from error
    for number, row in enumerate(rows):
        yield Located(f"{source}[{number}]", dict(row))


def write_rows(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as JSON lines, gzipped if the name ends in .gz; the file appears whole or not at all, with the same bytes for the same rows."""
    path = Path(path)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    try:
        with files.whole(path) as beside:
            beside.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
    except OSError as error:
        raise DflaxError(f"cannot write {path}: {error.strerror}") from error


# --- conversations


def conversation(located: Located, *, prompt_key: str | None = None, response_key: str | None = None) -> Conversation:
    """A row in any of the usual forms.

    `messages` (role, content), `conversations` (ShareGPT: from, value), `prompt` with `response` or `response_tokens`,
    `prompt_tokens` with `response_tokens`, `question` with `answer`; `prompt_key` and `response_key` name other columns.
    Raises DflaxError naming the row and the missing key.
    """
    row, where = located.row, located.where
    extra: dict[str, Any] = {
        "source": str(row.get("source", "")),
        "temperature": row.get("temperature"),
        "where": where,
    }
    if prompt_key is None:
        for name in ("messages", "conversations"):
            if name in row:
                return _from_messages(row[name], where, name, extra)
        if "prompt_tokens" in row and "prompt" not in row:
            tokens = _tokens(row, "prompt_tokens", where)
            return Conversation("", row.get("response"), _tokens(row, "response_tokens", where), tokens, **extra)
        prompt_key = "prompt" if "prompt" in row or "question" not in row else "question"
    prompt = row.get(prompt_key)
    if not isinstance(prompt, str) or not prompt:
        state = "is empty or no text" if prompt_key in row else f"is missing; the row has {', '.join(row) or 'nothing'}"
        raise DflaxError(f"{where}: key {prompt_key!r} {state}")
    if response_key is not None and not isinstance(row.get(response_key), str):
        raise DflaxError(f"{where}: key {response_key!r} is missing or no text; the row has {', '.join(row)}")
    if response_key is None:
        response_key = "answer" if prompt_key == "question" else "response"
    response = row.get(response_key)
    tokens = _tokens(row, "response_tokens", where) if "response_tokens" in row else None
    given = _tokens(row, "prompt_tokens", where) if "prompt_tokens" in row else None
    return Conversation(prompt, response if isinstance(response, str) else None, tokens, given, **extra)


def _tokens(row: Row, key: str, where: str) -> list[int]:
    found = row.get(key)
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise DflaxError(f"{where}: key {key!r} is missing or no list of token ids")
    return found


def _from_messages(found: Any, where: str, key: str, extra: dict[str, Any]) -> Conversation:
    messages: list[Message] = []
    for message in found if isinstance(found, list) else ():
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        content = message.get("content", message.get("value")) if isinstance(message, dict) else None
        if role not in SHAREGPT_ROLES or not isinstance(content, str):
            raise DflaxError(
                f"{where}: {key!r} needs messages with a role (system, user, assistant) and text, not {message!r:.80}"
            )
        messages.append({"role": SHAREGPT_ROLES[role], "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise DflaxError(f"{where}: {key!r} has no user message")
    response = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    return Conversation(messages, response, **extra)


def fingerprint(*arrays: np.ndarray) -> str:
    """Tells arrays apart by content."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a prompt is kept out of training: by its hash, so that it stays where it is when the data grow."""
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return value < fraction * 2**64


def split_held_out(
    conversations: Iterable[Conversation], fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """(to train on, held out)."""
    parts: tuple[list[Conversation], list[Conversation]] = ([], [])
    for item in conversations:
        parts[is_held_out(item.key, fraction)].append(item)
    return parts


# --- tokens


def tokenize(
    item: Conversation,
    tokenizer: text.Tokenizer | None,
    *,
    chat: bool | None = None,
    enable_thinking: bool | None = None,
    vocab_size: int | None = None,
) -> Document:
    """Tokens of a conversation, its responses marked.

    A text prompt is one user message if the tokenizer has a chat template (`chat` overrules), else it is taken as it is. Given response
    tokens are taken as they are; a response text is tokenized and closed by the end token. In chats all assistant turns are marked, unless
    the template rewrites earlier turns (then the last one only). DflaxError names the row of an id that is not below vocab_size.
    """
    if item.response is None and item.response_tokens is None:
        raise DflaxError(f"{item.where}: there is no response to train on; `dflax distill` writes them")
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    tokens, mask = _prompt(item, tokenizer, chat, enable_thinking)
    response = item.response_tokens
    if response is None:
        if tokenizer is None:
            raise DflaxError(f"{item.where}: a response in text needs a tokenizer")
        if tokenizer.eos_token_id is None:
            raise DflaxError(f"{item.where}: a response in text is closed by an end token, and the tokenizer has none")
        response = tokenizer.encode(item.response, add_special_tokens=False)
        response = [*response, tokenizer.eos_token_id]
    highest = max((*tokens, *response), default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise DflaxError(f"{item.where}: token id {highest} is outside the model's vocabulary of {vocab_size}")
    ids = np.asarray([*tokens, *response], np.int32)
    return Document(ids, np.asarray([*mask, *[True] * len(response)], bool))


def _prompt(item, tokenizer, chat, enable_thinking) -> tuple[list[int], list[bool]]:
    if item.prompt_tokens is not None:
        return item.prompt_tokens, [False] * len(item.prompt_tokens)
    if not chat:
        if not isinstance(item.prompt, str):
            raise DflaxError(f"{item.where}: chat messages need a tokenizer with a chat template")
        tokens = text.encode(tokenizer, item.prompt)
        return tokens, [False] * len(tokens)
    prompt = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
    pieces = _turns(prompt, tokenizer, enable_thinking)
    tokens: list[int] = []
    mask: list[bool] = []
    for piece, is_response in pieces:
        ids = tokenizer.encode(piece, add_special_tokens=False)
        tokens += ids
        mask += [is_response] * len(ids)
    return tokens, mask


def _turns(
    messages: Sequence[Message], tokenizer: text.Tokenizer, enable_thinking: bool | None
) -> list[tuple[str, bool]]:
    """The rendered prompt, cut at its assistant turns: (text, is a response)."""
    whole = text.render_chat(tokenizer, messages, enable_thinking)
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    pieces: list[tuple[str, bool]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text.render_chat(tokenizer, messages[:index], enable_thinking)
        after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False, **extra).rstrip()
        if not (before.startswith(done) and after.startswith(before) and whole.startswith(after)):
            return [(whole, False)]
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return [*pieces, (whole[len(done) :], False)]


def pack(documents: Iterable[Document], length: int, pad_token: int = 0) -> Packed:
    """First fit: each document goes into the first row with room for it. Documents longer than a row are cut.

    Documents without a response token in what is left of them are dropped. Raises DflaxError if none is left.
    """
    kept = [Document(d.tokens[:length], d.loss_mask[:length]) for d in documents if d.loss_mask[:length].any()]
    if not kept:
        raise DflaxError(f"no document has a response token within {length} tokens; is the sequence length too small?")
    shortest = min(len(d.tokens) for d in kept)
    room = np.full(len(kept), length)
    first_open = rows = 0  # rows before first_open have no room for any document
    places: list[tuple[int, int]] = []
    for document in kept:
        n = len(document.tokens)
        row = first_open + int(np.argmax(room[first_open : rows + 1] >= n))
        places.append((row, length - int(room[row])))
        room[row] -= n
        rows = max(rows, row + 1)
        while first_open < rows and room[first_open] < shortest:
            first_open += 1
    tokens = np.full((rows, length), pad_token, np.int32)
    loss_mask = np.zeros((rows, length), bool)
    ctx_start = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    for document, (row, start) in zip(kept, places, strict=True):
        span = slice(start, start + len(document.tokens))
        tokens[row, span], loss_mask[row, span], ctx_start[row, span] = document.tokens, document.loss_mask, start
    return Packed(tokens, loss_mask, ctx_start)


# --- batches


class Shuffled:
    """Batches of `batch_size` rows of the given arrays (equal first axis), in a new random order every epoch; no row is ever left out.

    The trainer's `Batches`: `batch_at(step)` is a pure function of the arrays, the seed and the step.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], batch_size: int, seed: int):
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DflaxError(f"arrays need equal, positive numbers of rows: {lengths}")
        if batch_size < 1:
            raise DflaxError(f"batch_size is {batch_size}; it must be at least 1")
        self._arrays, self._batch_size = dict(arrays), batch_size
        self._rows = next(iter(lengths.values()))
        self._order = grain.MapDataset.range(self._rows).seed(seed).shuffle().repeat()

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._rows // self._batch_size)

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        first = step * self._batch_size
        chosen = np.asarray([self._order[i] for i in range(first, first + self._batch_size)])
        return {name: array[chosen] for name, array in self._arrays.items()}


def batches(packed: Packed, batch_size: int, seed: int) -> Shuffled:
    """Shuffled rows of packed documents: {"tokens", "loss_mask", "ctx_start"}, each [batch_size, S]."""
    arrays = {"tokens": packed.tokens, "loss_mask": packed.loss_mask, "ctx_start": packed.ctx_start}
    return Shuffled(arrays, batch_size, seed)
