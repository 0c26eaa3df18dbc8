"""A config.json being read, and where a checkpoint keeps a parameter: what the tables of families are written with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dflax.errors import DflaxError

# Keys that describe provenance, training, or how another library runs the model.
IRRELEVANT = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id classifier_dropout decoder_start_token_id dtype
    embd_pdrop finetuning_task id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id
    max_window_layers model_type num_target_layers output_router_logits pad_token_id pretraining_tp resid_pdrop
    router_aux_loss_coef router_jitter_noise tokenizer_class torch_dtype transformers.js_config
    transformers_version use_cache unk_token_id""".split()
)

NUMBERS = {int: "a whole number above 0", float: "a number above 0"}


class Keys:
    """A config.json being read: a value of a wrong type is refused by its key's name, and so is a key that nobody asked for.

    where: what stands before a key in errors.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json: "):
        self.raw = raw
        self.where = where
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Of any type: whoever asks checks it."""
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type = int) -> Any:
        """A number above 0, whole unless `kind` is float."""
        value = self.number(key, None, kind)
        if value is None:
            raise DflaxError(f"config.json has no {key!r}; it must be {NUMBERS[kind]}")
        return value

    def number(self, key: str, default: Any, kind: type = int) -> Any:
        """As `need`, with a default where the key is absent."""
        value = self.get(key)
        if value is None:
            return default
        return value if type(value) in (int, kind) and 0 < value < math.inf else self.refuse(key, NUMBERS[kind])

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 0."""
        value = self.get(key, default)
        return value if _is_count(value) else self.refuse(key, "a whole number of at least 0")

    def flag(self, key: str, default: Any = False) -> Any:
        """true or false."""
        value = self.get(key, default)
        return value if value is default or isinstance(value, bool) else self.refuse(key, "true or false")

    def table(self, key: str) -> Mapping[str, Any]:
        """An object; {} where the key is absent."""
        value = self.get(key, {})
        return value if isinstance(value, Mapping) else self.refuse(key, "an object")

    def names(self, key: str) -> list[str] | None:
        """A list of texts."""
        value = self.get(key)
        right = value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))
        return value if right else self.refuse(key, "a list of names")

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers of at least 0; [] where the key is absent."""
        value = self.get(key, [])
        right = isinstance(value, list) and all(map(_is_count, value))
        return value if right else self.refuse(key, "a list of whole numbers of at least 0")

    def token(self, key: str) -> int | None:
        """A token id."""
        value = self.get(key)
        return value if value is None or _is_count(value) else self.refuse(key, "a token id")

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids of a key that holds one or a list."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        return tuple(ids) if all(map(_is_count, ids)) else self.refuse(key, "a token id or a list of token ids")

    def refuse(self, key: str, right: str) -> NoReturn:
        raise DflaxError(f"{self.where}{key} is {self.raw.get(key)!r}; it must be {right}")

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would change the computation in a way we do not implement."""
        value = self.raw.get(key)
        self.used.add(key)
        same = lambda a: value == a and isinstance(value, bool) == isinstance(a, bool)  # True is not 1 here
        if value is not None and not any(map(same, allowed)):
            expected = " or ".join(repr(a) for a in allowed)
            raise DflaxError(f"{self.where}{key} is {value!r}; dflax supports {expected}")

    def must(self, key: str, *allowed: Any) -> None:
        """As `only`, where leaving the key out would mean something that we do not implement."""
        if self.raw.get(key) is None:
            raise DflaxError(f"config.json has no {key!r}; dflax supports {' or '.join(repr(a) for a in allowed)}")
        self.only(key, *allowed)

    def mask_token_id(self) -> int | None:
        """Of a diffusion model; None where the file does not tell (`dflax.load` takes it then)."""
        value, size = self.get("mask_token_id"), self.raw.get("vocab_size")
        if value is not None and not (_is_count(value) and isinstance(size, int) and value < size):
            raise DflaxError(f"config.json: mask_token_id {value!r} is outside the vocabulary of {size}")
        return value

    def ignore(self, *names: str) -> None:
        """Keys that change nothing in this family."""
        self.used.update(names)

    def refuse_unknown(self) -> None:
        unknown = sorted(k for k in self.raw if k not in self.used | IRRELEVANT and self.raw[k] is not None)
        if unknown:
            raise DflaxError(f"config.json has keys that dflax does not know and will not ignore: {', '.join(unknown)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class TensorRule:
    """Where a parameter lives in a checkpoint: one tensor, or one per expert, stacked on a new first axis."""

    names: tuple[str, ...]
    stacked: bool = False
