"""Arithmetic word problems with worked steps: a text source that needs no download, endless, and exactly checkable.

A problem is a template with names, objects and numbers filled in. Its answer works the steps out one by one and ends in `#### value`:

    Q: Ann has 12 pens. Ann buys 3 boxes of 4 pens. How many pens does Ann have? A:
    The boxes hold 3 * 4 = 12 pens. Ann has 12 + 12 = 24 pens. #### 24

Numbers stay small (products of the times table, sums of up to three digits), so that a model of under a million parameters can learn to be
right. What is trained on and what is tested on differ in the numbers (by a hash of the numbers of a problem) and in the templates.
The vocabulary is fixed and has at most 128 tokens: words, digits, signs.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflax.errors import DflaxError
from dflax.train.problem_templates import HELD_OUT, TRAINING, Template

SPLITS = ("train", "validation", "test")

NAMES = ("Ann", "Ben", "Eva", "Gus", "Kim", "Leo", "Mia", "Tom")
ITEMS = ("pens", "cards", "coins", "books", "apples", "eggs", "cakes", "shells", "stamps", "beads", "nuts", "toys")
CONTAINERS = ("boxes", "bags", "packs", "jars", "trays", "rows")

TEMPLATES = TRAINING + HELD_OUT
TRAINING_TEMPLATES = len(TRAINING)

# Small numbers (x, y, z, w) are factors, divisors and days; large ones (a, b, c) are added, subtracted and shared out.
SMALL = range(2, 10)
LARGE = range(10, 61)
LARGEST = 999


@dataclass(frozen=True)
class Problem:
    question: str
    answer_text: str
    value: int
    template: int  # index into TEMPLATES
    numbers: tuple[int, ...]  # of the question, in the order of their slots' names

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


def steps_are_right(text: str) -> bool:
    """Whether every `a op b = c` in the text holds, and there is at least one."""
    found = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text)
    return bool(found) and all(compute(int(a), sign, int(b)) == int(c) for a, sign, b, c in found)


def generate(seed: int, index: int, split: str) -> Problem:
    """Problem `index` of a split: a pure function of its arguments.

    train: the training templates; validation: the same templates with numbers never seen in training; test: neither the template nor the
    numbers are seen in training.
    """
    if split not in SPLITS:
        raise DflaxError(f"split is {split!r}; it is one of {', '.join(SPLITS)}")
    chance = random.Random(f"{seed}/{split}/{index}")
    templates = range(TRAINING_TEMPLATES, len(TEMPLATES)) if split == "test" else range(TRAINING_TEMPLATES)
    number = chance.choices(templates, [len(TEMPLATES[i].steps) - 1 for i in templates])[0]  # longer ones more often
    template = TEMPLATES[number]
    slots = sorted(set(re.findall(r"\{([a-z])\}", template.question)))
    while True:
        numbers = tuple(chance.choice(SMALL if slot in "wxyz" else LARGE) for slot in slots)
        values = _work(template, dict(zip(slots, numbers, strict=True)))
        if values is not None and is_held_out(numbers) == (split != "train"):
            break
    words = dict(zip(("N", "M"), chance.sample(NAMES, 2), strict=True))
    words |= dict(zip(("I", "J"), chance.sample(ITEMS, 2), strict=True))
    words |= dict(zip(("C", "D"), chance.sample(CONTAINERS, 2), strict=True))
    fields = {**words, **values}
    answer = " ".join(_fill(step, fields, values) for step in template.steps)
    value = values[_programs(template)[-1][0]]
    return Problem(template.question.format(**fields), f"{answer} #### {value}", value, number, numbers)


def problems(seed: int, split: str, count: int) -> Iterator[Problem]:
    """The first `count` problems of a split."""
    return (generate(seed, index, split) for index in range(count))


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """Whether problems with these numbers are kept out of training: one in eight tuples, by hash."""
    return hashlib.sha256(repr(sorted(numbers)).encode()).digest()[0] % 8 == 0


def compute(a: int, sign: str, b: int) -> int | None:
    """a sign b, None where a division leaves a rest."""
    if sign == "/":
        return a // b if b and a % b == 0 else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


@lru_cache
def _programs(template: Template) -> list[tuple[str, str, str, str]]:
    """(name, left, sign, right) of every step."""
    return re.findall(r"\[(\w) = (\w+) ([-+*/]) (\w+)\]", " ".join(template.steps))


def _work(template: Template, values: dict[str, int]) -> dict[str, int] | None:
    """All values of the computation, None if a number would be too large, negative or no whole number."""
    values = dict(values)
    for name, left, sign, right in _programs(template):
        a, b = (int(x) if x.isdigit() else values[x] for x in (left, right))
        if sign == "*" and (min(a, b) > 9 or max(a, b) > 12):
            return None
        result = compute(a, sign, b)
        if result is None or not 2 <= result <= LARGEST or (sign == "/" and result > 12):
            return None
        values[name] = result
    return values


def _fill(step: str, fields: dict[str, str | int], values: dict[str, int]) -> str:
    def worked(match: re.Match) -> str:
        name, left, sign, right = match.groups()
        a, b = (x if x.isdigit() else values[x] for x in (left, right))
        return f"{a} {sign} {b} = {values[name]}"

    return re.sub(r"\[(\w) = (\w+) ([-+*/]) (\w+)\]", worked, step).format(**fields)


_PIECES = r"[.,?:]|▁[^▁.,?:]+"
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<unk>")


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Special tokens, digits, signs, then the words of all templates in alphabetical order."""
    return closed_vocabulary(" ".join(" ".join((template.question, *template.steps)) for template in TEMPLATES))


def closed_vocabulary(templates: str) -> tuple[str, ...]:
    """Special tokens, digits, signs, and every word that templates of this text can give."""
    digits = [f"▁{digit}" for digit in range(10)]
    signs = [".", ",", "?", ":", "▁####", *(f"▁{sign}" for sign in "+-*/=")]
    text = re.sub(r"\[.*?\]|\{.\}", " ", templates)
    words = {*re.findall(r"[A-Za-z]+", text), "Q", "A", *NAMES, *ITEMS, *CONTAINERS}
    return (*_SPECIAL, *digits, *signs, *(f"▁{word}" for word in sorted(words)))


def tokenizer() -> PreTrainedTokenizerFast:
    """The fixed word-level tokenizer: a token is a word, a digit or a sign; encoding puts <bos> first, decoding gives the text back."""
    return word_tokenizer(vocabulary())


def word_tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """The tokenizer of a closed vocabulary."""
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
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        unk_token="<unk>",
        model_max_length=256,
    )
