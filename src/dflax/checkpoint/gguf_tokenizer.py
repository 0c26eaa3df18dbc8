"""The tokenizer inside a GGUF file, built with `tokenizers` from vocabulary, merges and the name of the pre-tokenizer.

transformers reads GGUF tokenizers too, but only with torch installed. Byte-level BPE (tokenizer.ggml.model = gpt2) is supported for
the pre-tokenizers below; the patterns are those of the models' own tokenizer.json.
"""

import os
from typing import Any

from dflax.checkpoint.gguf_file import GGUFFile, open_gguf
from dflax.errors import DflaxError
from dflax.text import Tokenizer, quiet_transformers

# GPT-4's pattern with digits one by one (Qwen) or in threes (Llama 3).
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE = ("gpt-2", "smollm", "qwen2", "llama-bpe")
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types; 1 is normal


def tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The file's tokenizer with its special tokens and chat template, as transformers wraps a fast one."""
    return build(open_gguf(path))


def build(file: GGUFFile) -> Tokenizer:
    """The same for a file that is open already."""
    wrap = quiet_transformers().PreTrainedTokenizerFast

    metadata = file.metadata
    tokens = _need(file, "tokens")

    def named(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise DflaxError(f"{file.path}: {key}_token_id {index} is outside the vocabulary of {len(tokens)}")
        return None if index is None else tokens[index]

    fast = wrap(
        tokenizer_object=_tokenizer(file),
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        model_max_length=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    return fast


def _tokenizer(file: GGUFFile) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    metadata = file.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise DflaxError(f"{file.path}: tokenizer.ggml.model is {model!r}; dflax supports 'gpt2' (byte-level BPE)")
    if pre not in PRE:
        raise DflaxError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; dflax supports {', '.join(PRE)}")
    tokens, merges = _need(file, "tokens"), _need(file, "merges")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        # Llama 3 takes a word that is a token as it is, without asking the merges.
        out = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises plain Exception
        raise DflaxError(f"{file.path}: vocabulary and merges do not make a BPE tokenizer ({error})") from error
    out.pre_tokenizer = _pre_tokenizer(pre)
    out.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        out.normalizer = normalizers.NFC()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    out.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    defined = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    out.add_tokens([AddedToken(t, normalized=False) for t in defined])
    out.post_processor = _post_processor(metadata, tokens, pre)
    return out


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = WORDS.replace("DIGITS", r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}")
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(metadata: dict[str, Any], tokens: list[str], pre: str) -> Any:
    """Puts the begin token first where the file asks for it (Llama 3 does when the file is silent)."""
    from tokenizers import processors

    byte_level = processors.ByteLevel(trim_offsets=False)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return byte_level
    begin = tokens[bos]
    template = processors.TemplateProcessing(
        single=[begin, "$A"], pair=[begin, "$A", begin, "$B"], special_tokens=[(begin, bos)]
    )
    return processors.Sequence([byte_level, template])


def _need(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise DflaxError(f"{file.path} has no tokenizer.ggml.{key}; the file carries no tokenizer that dflax can build")
    return value
