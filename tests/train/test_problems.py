"""The problem generator: right answers, disjoint splits, a closed vocabulary."""

import re

import pytest
from transformers import AutoTokenizer

from dflax.errors import DflaxError
from dflax.train import problems as P

SPLITS = P.SPLITS


@pytest.fixture(scope="module")
def drawn():
    return {split: list(P.problems(7, split, 400)) for split in SPLITS}


@pytest.fixture(scope="module")
def tokenizer():
    return P.tokenizer()


def test_answers_are_worked_out_and_right(drawn):
    for split in SPLITS:
        for problem in drawn[split]:
            assert P.steps_are_right(problem.answer_text), problem
            assert problem.check(problem.answer_text)
            assert 2 <= problem.answer_text.count("=") <= 4
            assert not re.search(r"[{}\[\]]", problem.prompt + problem.answer_text)


def test_every_number_of_the_question_is_used(drawn):
    for problem in drawn["train"] + drawn["test"]:
        for number in re.findall(r"\d+", problem.question):
            assert number in re.findall(r"\d+", problem.answer_text), problem


def test_check_can_fail(drawn):
    problem = drawn["train"][0]
    assert not problem.check(problem.answer_text + "0")
    assert not problem.check("I do not know")
    assert not problem.check(f"#### {problem.value} #### {problem.value + 1}")
    assert not P.steps_are_right("2 * 3 = 7.")
    assert not P.steps_are_right("no step at all")


def test_splits_share_no_numbers_and_test_no_template():
    drawn = {split: list(P.problems(0, split, 600)) for split in SPLITS}
    numbers = {split: {tuple(sorted(p.numbers)) for p in drawn[split]} for split in SPLITS}
    assert not numbers["train"] & (numbers["validation"] | numbers["test"])
    used = {split: {p.template for p in drawn[split]} for split in SPLITS}
    assert used["train"] == used["validation"] == set(range(P.TRAINING_TEMPLATES))
    assert used["test"] == set(range(P.TRAINING_TEMPLATES, len(P.TEMPLATES)))
    assert P.TRAINING_TEMPLATES >= 40
    assert len({t.theme for t in P.TEMPLATES}) >= 6
    assert len({t.question for t in P.TEMPLATES}) == len(P.TEMPLATES)


def test_a_pure_function_of_its_arguments():
    assert P.generate(1, 5, "train") == P.generate(1, 5, "train")
    assert P.generate(1, 5, "train") != P.generate(1, 6, "train")
    assert P.generate(1, 5, "train") != P.generate(2, 5, "train")
    with pytest.raises(DflaxError, match="split"):
        P.generate(0, 0, "dev")  # a wrong word


def test_vocabulary_is_closed_and_text_survives(drawn, tokenizer):
    assert len(P.vocabulary()) == len(set(P.vocabulary())) <= 128
    for problem in drawn["train"] + drawn["test"]:
        text = f"{problem.prompt} {problem.answer_text}"
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        parts = (
            tokenizer(problem.prompt)["input_ids"]
            + tokenizer(problem.answer_text, add_special_tokens=False)["input_ids"]
        )
        assert parts == ids  # a prompt and its answer may be encoded apart


def test_words_of_the_held_out_templates_are_trained_on(drawn, tokenizer):
    def words(problems):
        return {i for p in problems for i in tokenizer(f"{p.prompt} {p.answer_text}")["input_ids"]}

    assert words(drawn["test"]) <= words(drawn["train"])


def test_lengths(drawn, tokenizer):
    lengths = sorted(len(tokenizer(p.answer_text, add_special_tokens=False)["input_ids"]) for p in drawn["train"])
    assert 35 <= lengths[len(lengths) // 2] <= 50
    assert lengths[int(len(lengths) * 0.9)] >= 55
    assert lengths[-1] <= 90


def test_tokenizer_is_saved_and_loaded(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = P.generate(0, 3, "train").prompt
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.mask_token_id) == (0, 1, 2, 3)
