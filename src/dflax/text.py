"""Text and tokens: the tokenizer of a folder, prompts of every accepted kind, stop tokens, text while it is being written."""

import importlib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from dflax.errors import DflaxError
from dflax.hf_keys import Keys

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character (yet)


Tokenizer = Any
"""A transformers tokenizer. Its token attributes are made at run time, so no static type covers what we use of it: chat_template,
eos_token_id, encode, decode, apply_chat_template, save_pretrained."""


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None where the folder has none (drafters have none)."""
    if not any((Path(folder) / name).is_file() for name in FILES):
        return None
    try:
        return _reader(Path(folder)).from_pretrained(os.fspath(folder), local_files_only=True)
    except Exception as error:  # a damaged file shows as almost any exception type
        raise DflaxError(f"cannot load the tokenizer in {folder}: {_one_line(error)}") from error


def _reader(folder: Path) -> Any:
    """The class that reads the tokenizer of a folder.

    For a checkpoint that brings Python files along (LLaDA, Dream), AutoTokenizer stops to ask whether to run them. They are never run:
    such a tokenizer is an ordinary one, in a tokenizer.json or as Qwen2's vocabulary and merges.
    """
    transformers = quiet_transformers()
    parts = [folder / name for name in ("config.json", "tokenizer_config.json")]
    if not any("auto_map" in json.loads(part.read_text()) for part in parts if part.is_file()):
        return transformers.AutoTokenizer
    return (
        transformers.PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else transformers.Qwen2Tokenizer
    )


def quiet_transformers() -> Any:
    """The transformers package, imported without its notice that torch is not there (it imports in a second without torch)."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return importlib.import_module("transformers")


def render_chat(tokenizer: Tokenizer, messages: Sequence[Any], enable_thinking: bool | None = None) -> str:
    """Messages -> the text that the model is asked to continue.

    enable_thinking goes to the template as it is (Qwen3 opens or closes the thinking part); None leaves the template's default.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DflaxError("the tokenizer has no chat template; give the prompt as plain text")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DflaxError(f'a chat message must be {{"role": ..., "content": ...}}, not {message!r}')
    extra = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        return tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **extra
        )
    except Exception as error:  # templates raise jinja2's errors, and their own through raise_exception
        raise DflaxError(f"the chat template refuses the messages: {_one_line(error)}") from error


def encode(
    tokenizer: Tokenizer | None,
    prompt: Any,
    vocab_size: int | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """A prompt of any kind (text, list of token ids, list of chat messages) -> token ids.

    Text gets the tokenizer's own special tokens (Llama's begin token); a chat goes through the template, which writes them
    itself; ids are taken as they are. Raises DflaxError for an
    empty prompt, ids outside the vocabulary and a kind that is none of these.
    """
    if isinstance(prompt, str):
        ids = _need(tokenizer).encode(prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DflaxError(
            f"a prompt must be text, a list of token ids or a list of chat messages, not {type(prompt).__name__}"
        )
    elif prompt and isinstance(prompt[0], Mapping):
        ids = _need(tokenizer).encode(render_chat(_need(tokenizer), prompt, enable_thinking), add_special_tokens=False)
    else:
        ids = [_id(token) for token in prompt]
    if not ids:
        raise DflaxError("the prompt is empty; a model needs at least one token to continue")
    if vocab_size is not None and (bad := next((i for i in ids if not 0 <= i < vocab_size), None)) is not None:
        raise DflaxError(f"token id {bad} of the prompt is outside the vocabulary of {vocab_size}")
    return ids


def encode_all(
    tokenizer: Tokenizer | None,
    prompts: Any,
    vocab_size: int | None = None,
    enable_thinking: bool | None = None,
) -> list[list[int]]:
    """Every prompt of a list; an error says which one (counted from 0) is at fault."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise DflaxError("prompts must be a list of at least one prompt")
    if isinstance(prompts[0], (int, Mapping)):
        raise DflaxError("prompts must be a list of prompts; put this single prompt in a list")
    out = []
    for number, prompt in enumerate(prompts):
        try:
            out.append(encode(tokenizer, prompt, vocab_size, enable_thinking))
        except DflaxError as error:
            raise DflaxError(f"prompt {number}: {error}") from error
    return out


def stop_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The model's own end tokens: those of config.json, generation_config.json and the tokenizer together, sorted.

    They differ in practice: Qwen3's config.json names one, its generation_config.json two. DflaxError for what is no id.
    """
    ids = {
        *Keys(config).tokens("eos_token_id"),
        *Keys(generation_config, "generation_config.json: ").tokens("eos_token_id"),
    }
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
"""What LLaDA, Dream and LLaDA-MoE write when their turn is over; their configs name the end of the text alone."""


def turn_end_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids of the tokens of `END_OF_TURN` that a tokenizer has."""
    if tokenizer is None:
        return ()
    vocabulary = tokenizer.get_vocab()
    return tuple(vocabulary[token] for token in END_OF_TURN if token in vocabulary)


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Tokens -> text without special tokens."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """Text while tokens arrive: the pieces add up to `decode` of all tokens, and none holds half of a character.

    A token may end in the middle of a UTF-8 character; that part waits for the rest. Only the tokens since the last whole piece
    are decoded again, after those of that piece (a SentencePiece decoder drops the space of the first token it sees).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens whose text went out whole
        self._pending: list[int] = []  # tokens after them
        self._sent = 0  # characters of the pending tokens' text that went out

    def push(self, tokens: Iterable[int]) -> str:
        """Takes new tokens, returns the text that is now certain (may be empty)."""
        self._pending += tokens
        fresh = self._fresh()
        # Replacements at the end may still become characters: one in byte-level decoders, a run of any length in those that fall
        # back to bytes, where one missing byte spoils the whole run.
        whole = fresh.rstrip(REPLACEMENT)
        piece = whole[self._sent :]
        if whole == fresh:
            self._context = self._pending if fresh else self._context + self._pending
            self._pending, self._sent = [], 0
        else:
            self._sent = max(self._sent, len(whole))
        return piece

    def flush(self) -> str:
        """What is still held back, as the end of the text has come; a broken character shows as U+FFFD."""
        piece = self._fresh()[self._sent :]
        self._context, self._pending, self._sent = self._context + self._pending, [], 0
        return piece

    def _fresh(self) -> str:
        """Text of the pending tokens; one replacement while they spoil the context's last bytes too but may yet mend."""
        known = decode(self._tokenizer, self._context)
        both = decode(self._tokenizer, self._context + self._pending)
        spoiled = not both.startswith(known) and both.endswith(REPLACEMENT)
        return REPLACEMENT if spoiled else both[len(known) :]


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise DflaxError("the model has no tokenizer; give prompts as lists of token ids")
    return tokenizer


def _id(token: object) -> int:
    if isinstance(token, SupportsIndex) and not isinstance(token, bool):  # numpy integers too
        return operator.index(token)
    raise DflaxError(f"a prompt of token ids holds {token!r}, which is no integer")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
