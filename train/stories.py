"""Arithmetic word problems, endless and seeded: a chain of events, worked out one by one in freely worded sentences.

    Q: Ann has 34 pens. Ann buys 4 boxes of 8 pens. Ann gives Tom half. How many pens does Ann have now? A:
    The boxes hold 4 * 8 = 32 pens. Then Ann owns 34 + 32 = 66 things. So 66 / 2 = 33 pens are left. #### 33

Two things make the answer hard to write in one go. Every step needs the result of the step before it. And the wording is free: where a
sentence has synonyms, all of the same length, one is drawn for itself, so that a model which knows the task well is still sure of no more
than the weight of the likeliest. Wrong digits and free words look alike to a rule that asks for confidence only.

A skeleton is what happens in which order, and what is asked. Test problems have skeletons and numbers that training never shows; their
sentences, one by one, it does. Training and validation differ in the numbers alone.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dflax.errors import DflaxError
from dflax.text import Tokenizer
from dflax.train import problems
from dflax.train.problems import CONTAINERS, ITEMS, LARGE, NAMES, SMALL, SPLITS, Problem, compute, is_held_out

LONGEST_PROMPT = 48
"""Tokens of a prompt, the first one (<bos>) included."""
LONGEST_ANSWER = 63
"""Tokens of an answer, without its end token."""
STEPS = (4, 5)
"""How many computations an answer takes."""
AMOUNTS = range(10, 100)
"""What somebody has: always two digits. Else a model that writes in any order has to guess how long a result will be before it computes it,
for where the words behind it stand depends on that."""

WEIGHTS = {2: (6, 4), 3: (5, 3, 2), 4: (4, 3, 2, 1)}
"""Of synonyms, by their number."""


@dataclass(frozen=True)
class Sentence:
    """What a story says, and how the answer works it out.

    Slots: N, M, K names; I objects; C containers; x, y small numbers; b a large one; t what N has, u what N has afterwards, p a product.
    Every step holds one equation, which is computed; `(a|b)` are synonyms, `@` in them the objects.
    """

    question: str
    steps: tuple[str, ...]

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """Numbers that the question names, in its order."""
        return tuple(re.findall(r"\{([bxy])\}", self.question))

    @cached_property
    def equations(self) -> tuple[tuple[str, str, str, str], ...]:
        """(left, sign, right, name) of every step; a side is a slot or a digit."""
        return tuple(EQUATION.findall(step)[0] for step in self.steps)


EQUALS = "(=|is|makes)"
"""How the sign in a step may be worded."""
EQUATION = re.compile(r"\{?(\w)\}? ([-+*/]) \{?(\w)\}? = \{(\w)\}")
CHOICE = re.compile(r"\(([^()]+)\)")

ADD = "(Then|So|Now|Next) {N} (has|owns|holds) {t} + {p} = {u} (@|things)."
TAKE = "(So|Then|Now|Next) {t} - {p} = {u} (@|things) (are|stay|remain) (left|over)."
HOLD = "(The|All|Those) {C} (hold|contain) {x} * {y} = {p} (@|things)."
START = "{N} has {a} {I}."
OTHER = "{K} has {b} {I}."

EVENTS = (
    Sentence("{N} buys {x} {C} of {y} {I}.", (HOLD, ADD)),
    Sentence(
        "{N} makes {x} {I} each day for {y} days.", ("In {y} days {N} (makes|gets) {x} * {y} = {p} (@|things).", ADD)
    ),
    Sentence(
        "{x} friends give {N} {y} {I} each.", ("(The|All|Those) friends (give|bring) {x} * {y} = {p} (@|things).", ADD)
    ),
    Sentence(
        "{N} loses {x} {I} each day for {y} days.", ("In {y} days {N} (loses|drops) {x} * {y} = {p} (@|things).", TAKE)
    ),
    Sentence("{N} gives {M} {x} {C} of {y} {I}.", (HOLD, TAKE)),
    Sentence("{N} finds {b} {I}.", (ADD.replace("{p}", "{b}"),)),
    Sentence("{M} gives {N} {b} {I}.", (ADD.replace("{p}", "{b}"),)),
    Sentence("{N} gives {M} {b} {I}.", (TAKE.replace("{p}", "{b}"),)),
    Sentence("{N} loses {b} {I}.", (TAKE.replace("{p}", "{b}"),)),
    Sentence("{N} sells {x} {I}.", (TAKE.replace("{p}", "{x}"),)),
    Sentence(
        "{N} gives {M} half.",
        ("(So|Then|Now|Next) {t} / 2 = {u} (@|things) (are|stay|remain) (left|over).",),
    ),
)

# The last two compare with what K had from the start.
QUESTIONS = (
    Sentence("How many {I} does {N} have now?", ()),
    Sentence(
        "How many more {I} does {N} have than {K}?", ("{N} (has|owns|holds) {t} - {k} = {u} more (@|things) than {K}.",)
    ),
    Sentence(
        "How many {I} do {N} and {K} have in all?",
        ("(Both|They) (have|own|hold) {t} + {k} = {u} (@|things) in (all|total).",),
    ),
)


@dataclass(frozen=True)
class Skeleton:
    """Indices into EVENTS, in their order, and into QUESTIONS."""

    events: tuple[int, ...]
    question: int

    @property
    def sentences(self) -> tuple[Sentence, ...]:
        return (*(EVENTS[event] for event in self.events), QUESTIONS[self.question])

    @property
    def opening(self) -> tuple[str, ...]:
        return (START, OTHER) if self.question else (START,)


@lru_cache(maxsize=1)
def skeletons() -> tuple[Skeleton, ...]:
    """All stories of two to four different events whose answers take as many steps as `STEPS` says and have room for their numbers."""
    orders = itertools.chain(*(itertools.permutations(range(len(EVENTS)), count) for count in (2, 3, 4)))
    every = (Skeleton(order, question) for order in orders for question in range(len(QUESTIONS)))
    return tuple(s for s in every if sum(len(part.steps) for part in s.sentences) in STEPS and _has_room(s))


def _has_room(skeleton: Skeleton) -> bool:
    """Whether the story fits if all but the small numbers have two digits."""
    usual = {**dict.fromkeys("atubkp", 10), **dict.fromkeys("xy", 1), **dict.fromkeys("NMKIC", "word")}
    question = " ".join([*skeleton.opening, *(part.question for part in skeleton.sentences)])
    answer = " ".join(CHOICE.sub("word", step) for part in skeleton.sentences for step in part.steps)
    return _fits(question.format(**usual), f"{answer} #### {{u}}".format(**usual))


def _fits(question: str, answer: str) -> bool:
    return count_tokens(f"Q: {question} A:") < LONGEST_PROMPT and count_tokens(answer) <= LONGEST_ANSWER


def count_tokens(text: str) -> int:
    """Tokens of a text, without <bos>: words, digits, signs."""
    return len(re.findall(r"\d|[A-Za-z]+|####|[^\sA-Za-z\d]", text))


@lru_cache(maxsize=2)
def of_split(held_out: bool) -> tuple[int, ...]:
    """Indices of the skeletons of training and validation, or of those kept for tests: one in eight, by hash."""
    hashed = (hashlib.sha256(repr(s).encode()).digest()[0] % 8 == 0 for s in skeletons())
    return tuple(i for i, kept in enumerate(hashed) if kept == held_out)


def generate(seed: int, index: int, split: str) -> Problem:
    """Problem `index` of a split, a pure function of its arguments; its `template` is the number of its skeleton.

    train: training skeletons; validation: the same with numbers never seen in training; test: neither the skeleton nor the numbers are.
    """
    if split not in SPLITS:
        raise DflaxError(f"split is {split!r}; it is one of {', '.join(SPLITS)}")
    chance = random.Random(f"stories/{seed}/{split}/{index}")
    while True:
        number = chance.choice(of_split(split == "test"))
        skeleton = skeletons()[number]
        worked = _work(skeleton, chance)
        if worked is None or is_held_out(worked.numbers) != (split != "train"):
            continue
        question, answer = _tell(skeleton, worked, chance)
        if _fits(question, answer):
            return Problem(question, answer, worked.value, number, worked.numbers)


def stories(seed: int, split: str, count: int, start: int = 0) -> Iterator[Problem]:
    """Problems start .. start + count - 1 of a split."""
    return (generate(seed, start + index, split) for index in range(count))


@dataclass(frozen=True)
class _Worked:
    values: tuple[dict[str, int], ...]  # of every sentence of the skeleton, by slot
    numbers: tuple[int, ...]  # of the question, in its order
    value: int


def _work(skeleton: Skeleton, chance: random.Random) -> _Worked | None:
    """Numbers for a story; None where somebody would have too much, too little or no whole number."""
    first = {"t": chance.choice(LARGE), "k": chance.choice(LARGE)}
    amount, numbers, every = first["t"], [*first.values()][: len(skeleton.opening)], []
    for sentence in skeleton.sentences:
        values = {**first, "t": amount}
        for slot in sentence.slots:
            values[slot] = chance.choice(LARGE if slot == "b" else SMALL)
            numbers.append(values[slot])
        for left, sign, right, name in sentence.equations:
            a, b = (int(side) if side.isdigit() else values[side] for side in (left, right))
            result = compute(a, sign, b)
            if result is None or (name == "u" and result not in AMOUNTS):
                return None
            values[name] = result
        amount = values.get("u", amount)
        every.append(values)
    return _Worked(tuple(every), tuple(numbers), amount)


def _tell(skeleton: Skeleton, worked: _Worked, chance: random.Random) -> tuple[str, str]:
    """Question and answer in words."""
    words = dict(zip("NMK", chance.sample(NAMES, 3), strict=True)) | {"I": chance.choice(ITEMS)}
    opening = {"a": worked.values[0]["t"], "b": worked.values[0]["k"]}
    said, steps = [line.format(**words, **opening) for line in skeleton.opening], []
    for sentence, values in zip(skeleton.sentences, worked.values, strict=True):
        fields = {**words, **values, "C": chance.choice(CONTAINERS)}
        said.append(sentence.question.format(**fields))
        steps += [_worded(step, chance).format(**fields) for step in sentence.steps]
    return " ".join(said), f"{' '.join(steps)} #### {worked.value}"


def _worded(step: str, chance: random.Random) -> str:
    """One of the synonyms in every place."""

    def pick(match: re.Match) -> str:
        options = match[1].split("|")
        return chance.choices(options, WEIGHTS[len(options)])[0].replace("@", "{I}")

    return CHOICE.sub(pick, step.replace("=", EQUALS))


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Special tokens, digits, signs, then the words of all stories in alphabetical order."""
    sentences = (START, OTHER, EQUALS, *(s for part in (*EVENTS, *QUESTIONS) for s in (part.question, *part.steps)))
    return problems.closed_vocabulary(" ".join(sentences))


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """The tokenizer of stories."""
    return problems.word_tokenizer(vocabulary())
