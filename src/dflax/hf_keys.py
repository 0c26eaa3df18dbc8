"""A config.json being read, and where a checkpoint keeps a parameter: what the tables of families are written with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflax.errors import DflaxError

# Keys that describe provenance, training, or how another library runs the model.
IRRELEVANT = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id classifier_dropout decoder_start_token_id dtype
    embd_pdrop finetuning_task id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id
    max_window_layers model_type num_target_layers output_router_logits pad_token_id pretraining_tp resid_pdrop
    router_aux_loss_coef router_jitter_noise tokenizer_class torch_dtype transformers.js_config
    transformers_version use_cache unk_token_id""".split()
)


class Keys:
    """A config.json being read: remembers which keys were used, so that the rest can be refused."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.get(key)
        if value is None:
            raise DflaxError(f"config.json has no {key!r}; it must be a {kind.__name__}")
        return self._checked(key, value, kind)

    def number(self, key: str, default: Any, kind: type = int) -> Any:
        """As `need`, with a default where the key is absent."""
        value = self.get(key)
        return default if value is None else self._checked(key, value, kind)

    @staticmethod
    def _checked(key: str, value: Any, kind: type) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise DflaxError(f"config.json: {key} is {value!r}; it must be a {kind.__name__}")
        if kind in (int, float) and value <= 0:
            raise DflaxError(f"config.json: {key} is {value!r}; it must be positive")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would change the computation in a way we do not implement."""
        value = self.raw.get(key)
        self.used.add(key)
        same = lambda a: value == a and isinstance(value, bool) == isinstance(a, bool)  # True is not 1 here
        if value is not None and not any(map(same, allowed)):
            expected = " or ".join(repr(a) for a in allowed)
            raise DflaxError(f"config.json: {key} is {value!r}; dflax supports {expected}")

    def must(self, key: str, *allowed: Any) -> None:
        """As `only`, where leaving the key out would mean something that we do not implement."""
        if self.raw.get(key) is None:
            raise DflaxError(f"config.json has no {key!r}; dflax supports {' or '.join(repr(a) for a in allowed)}")
        self.only(key, *allowed)

    def mask_token_id(self) -> int | None:
        """Of a diffusion model; None where the file does not tell (`dflax.load` takes it then)."""
        value, size = self.get("mask_token_id"), self.raw.get("vocab_size")
        if value is not None and not (isinstance(value, int) and isinstance(size, int) and 0 <= value < size):
            raise DflaxError(f"config.json: mask_token_id {value!r} is outside the vocabulary of {size}")
        return value

    def ignore(self, *names: str) -> None:
        """Keys that change nothing in this family."""
        self.used.update(names)

    def refuse_unknown(self) -> None:
        unknown = sorted(k for k in self.raw if k not in self.used | IRRELEVANT and self.raw[k] is not None)
        if unknown:
            raise DflaxError(f"config.json has keys that dflax does not know and will not ignore: {', '.join(unknown)}")


@dataclass(frozen=True)
class TensorRule:
    """Where a parameter lives in a checkpoint: one tensor, or one per expert, stacked on a new first axis."""

    names: tuple[str, ...]
    stacked: bool = False
