"""What an arithmetic word problem is: question, worked answer, how it is checked, which numbers are kept for tests, and its tokens.

    Q: Ann has 34 pens. Ann buys 4 boxes of 8 pens. How many pens does Ann have now? A:
    The boxes hold 4 * 8 = 32 pens. Then Ann owns 34 + 32 = 66 pens. #### 66

Numbers stay small (products of the times table, sums of up to three digits), so that a model of under a million parameters can learn to be
right. The vocabulary is closed: words, digits, signs, at most 128 tokens. `dflax.train.stories` makes the problems.
"""

import hashlib
import re
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflax.text import Tokenizer as AnyTokenizer
from dflax.text import quiet_transformers

SPLITS = ("train", "validation", "test")

NAMES = ("Ann", "Ben", "Eva", "Gus", "Kim", "Leo", "Mia", "Tom")
ITEMS = ("pens", "cards", "coins", "books", "apples", "eggs", "cakes", "shells", "stamps", "beads", "nuts", "toys")
CONTAINERS = ("boxes", "bags", "packs", "jars", "trays", "rows")

# Small numbers are factors and days; large ones are what there is at first, found, given and lost.
SMALL = range(2, 10)
LARGE = range(10, 61)


@dataclass(frozen=True)
class Problem:
    question: str
    answer_text: str
    value: int
    template: int
    """Number of what it was made from, by which splits are told apart."""
    numbers: tuple[int, ...]
    """Of the question, in its order."""

    @property
    def prompt(self) -> str:
        """What a model is given; `answer_text` follows after a space."""
        return f"Q: {self.question} A:"

    def check(self, text: str) -> bool:
        """Whether `text` ends in the right value; see `final_value`."""
        return final_value(text) == self.value


def final_value(text: str) -> int | None:
    """The number after the last `####`, None if there is none."""
    found = re.findall(r"####\s*(\d+)", text)
    return int(found[-1]) if found else None


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """Whether problems with these numbers are kept out of training: one in eight tuples, by hash."""
    return hashlib.sha256(repr(sorted(numbers)).encode()).digest()[0] % 8 == 0


def compute(a: int, sign: str, b: int) -> int | None:
    """a sign b, None where a division leaves a rest."""
    if sign == "/":
        return a // b if b and a % b == 0 else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


_PIECES = r"[.,?:]|▁[^▁.,?:]+"
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<unk>")


def closed_vocabulary(templates: str) -> tuple[str, ...]:
    """Special tokens, digits, signs, and every word that templates of this text can give."""
    digits = [f"▁{digit}" for digit in range(10)]
    signs = [".", ",", "?", ":", "▁####", *(f"▁{sign}" for sign in "+-*/=")]
    text = re.sub(r"\[.*?\]|\{.\}", " ", templates)
    words = {*re.findall(r"[A-Za-z]+", text), "Q", "A", *NAMES, *ITEMS, *CONTAINERS}
    return (*_SPECIAL, *digits, *signs, *(f"▁{word}" for word in sorted(words)))


def word_tokenizer(tokens: tuple[str, ...]) -> AnyTokenizer:
    """The tokenizer of a closed vocabulary: encoding puts <bos> first, decoding gives the text back."""
    ids = {token: index for index, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    # "124" is three tokens: the digits are parted before and joined again after, for no two numbers ever stand side by side.
    inner.normalizer = normalizers.Replace(Regex(r"(?<=\d)(?=\d)"), " ")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        ]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)"), ""),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    return quiet_transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
        model_max_length=256,
    )
