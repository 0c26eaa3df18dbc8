"""Problems: checking, and a tokenizer that gives every text back."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from dflax.train import problems as P
from dflax.train import stories as S


@pytest.fixture(scope="module")
def problem():
    return S.generate(0, 3, "train")


def test_check_can_fail(problem):
    assert problem.check(problem.answer_text)
    assert not problem.check(problem.answer_text + "0")
    assert not problem.check("I do not know")
    assert not problem.check(f"#### {problem.value} #### {problem.value + 1}")


@pytest.mark.parametrize(
    ("a", "sign", "b", "result"), [(7, "/", 2, None), (8, "/", 2, 4), (3, "-", 5, -2), (3, "*", 5, 15), (3, "+", 5, 8)]
)
def test_compute(a, sign, b, result):
    assert P.compute(a, sign, b) == result


def test_one_in_eight_tuples_of_numbers_is_held_out_in_any_order():
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    assert 0.1 < sum(map(P.is_held_out, pairs)) / len(pairs) < 0.15
    assert all(P.is_held_out((a, b)) == P.is_held_out((b, a)) for a, b in pairs)


def test_a_prompt_and_its_answer_may_be_encoded_apart(problem):
    tokenizer = S.tokenizer()
    text = f"{problem.prompt} {problem.answer_text}"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    parts = (
        tokenizer(t, add_special_tokens=i == 0)["input_ids"]
        for i, t in enumerate((problem.prompt, problem.answer_text))
    )
    assert [i for part in parts for i in part] == ids


def test_tokenizer_is_saved_and_loaded(tmp_path, problem):
    tokenizer = S.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(problem.prompt)["input_ids"] == tokenizer(problem.prompt)["input_ids"]
    assert loaded.decode(loaded(problem.prompt)["input_ids"], skip_special_tokens=True) == problem.prompt
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.mask_token_id) == (0, 1, 2, 3)


def test_help_begins_with_our_own_line():
    """`dflax demo` brings the problems along; transformers must not say on its import that torch is missing."""
    script = "import sys; from dflax.cli import main; sys.exit(main(['demo', '--help']))"
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert done.stdout.startswith("usage: dflax demo "), done.stdout[:200]
