"""Stories: right answers, disjoint splits, a closed vocabulary, free words of one length, and room in the canvas."""

import re

import pytest

from dflax.errors import DflaxError
from dflax.train import problems as P
from dflax.train import stories as S

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) (?:=|is|makes) (\d+)")


@pytest.fixture(scope="module")
def drawn():
    return {split: list(S.stories(7, split, 300)) for split in P.SPLITS}


def test_answers_are_worked_out_and_right(drawn):
    for problem in drawn["train"] + drawn["test"]:
        steps = STEP.findall(problem.answer_text)
        assert len(steps) in S.STEPS
        assert len(steps) == len(re.findall(r"[-+*/]", problem.answer_text))
        assert all(P.compute(int(a), sign, int(b)) == int(c) for a, sign, b, c in steps), problem
        assert problem.check(problem.answer_text)
        assert not re.search(r"[{}()|@]", problem.prompt + problem.answer_text)
        stated = re.findall(r"\d+", problem.question)
        assert [int(n) for n in stated] == list(problem.numbers)
        assert set(stated) <= set(re.findall(r"\d+", problem.answer_text)), problem


def test_every_step_starts_from_what_the_one_before_it_left(drawn):
    for problem in drawn["train"]:
        amount = problem.numbers[0]
        for left, sign, right, result in STEP.findall(problem.answer_text):
            if sign != "*":
                assert int(left) == amount, problem
                amount = P.compute(int(left), sign, int(right))
                assert amount == int(result)
                assert amount in S.AMOUNTS
        assert amount == problem.value


def test_splits_share_no_numbers_and_test_no_skeleton(drawn):
    train, test = S.of_split(False), S.of_split(True)
    assert not set(train) & set(test)
    assert len(train) + len(test) == len(S.skeletons())
    numbers = {split: {tuple(sorted(p.numbers)) for p in drawn[split]} for split in P.SPLITS}
    assert not numbers["train"] & (numbers["validation"] | numbers["test"])
    assert {p.template for p in drawn["test"]} <= set(test)
    assert {p.template for p in drawn["train"] + drawn["validation"]} <= set(train)
    assert {event for i in test for event in S.skeletons()[i].events} == set(range(len(S.EVENTS)))


def test_vocabulary_is_closed_lengths_are_counted_and_fit(drawn):
    tokenizer = S.tokenizer()
    assert len(S.vocabulary()) == len(set(S.vocabulary())) <= 128
    lengths = []
    for problem in drawn["train"] + drawn["test"]:
        prompt = tokenizer(problem.prompt)["input_ids"]
        answer = tokenizer(problem.answer_text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in prompt + answer
        assert len(prompt) == S.count_tokens(problem.prompt) + 1 <= S.LONGEST_PROMPT
        assert len(answer) == S.count_tokens(problem.answer_text) <= S.LONGEST_ANSWER
        assert tokenizer.decode(answer) == problem.answer_text
        lengths.append(len(answer))
    assert sorted(lengths)[len(lengths) // 2] > 50


def test_synonyms_are_drawn_by_weight_and_have_one_length(drawn):
    sentences = [S.EQUALS, *(step for part in (*S.EVENTS, *S.QUESTIONS) for step in part.steps)]
    for options in (match[1].split("|") for step in sentences for match in S.CHOICE.finditer(step)):
        assert {S.count_tokens(option.replace("@", "pens")) for option in options} == {1}
    text = " ".join(p.answer_text for p in drawn["train"])
    for words, share in ((("left", "over"), 0.6), (("are", "stay", "remain"), 0.5), (("=", "is"), 0.5 / 0.8)):
        count = {word: text.count(f" {word}") for word in words}
        assert abs(count[words[0]] / sum(count.values()) - share) < 0.1, count


def test_a_pure_function_of_its_arguments():
    assert S.generate(1, 5, "train") == S.generate(1, 5, "train")
    assert S.generate(1, 5, "train") != S.generate(1, 6, "train")
    assert S.generate(1, 5, "train") != S.generate(2, 5, "train")
    assert next(S.stories(1, "train", 1, start=5)) == S.generate(1, 5, "train")
    with pytest.raises(DflaxError, match="split"):
        S.generate(0, 0, "dev")  # a wrong word
