"""Rows for a diffusion model: prompts, padded answers, running text."""

import numpy as np
import pytest

from dflax.errors import DflaxError
from dflax.train import canvases as C
from dflax.train import stories
from dflax.train.data import Document, Located


def document(prompt, answer):
    tokens = [*prompt, *answer]
    mask = [False] * len(prompt) + [True] * len(answer)
    return Document(np.asarray(tokens, np.int32), np.asarray(mask, bool))


def test_answers_are_padded_with_end_tokens_to_their_region_or_the_row():
    made = C.canvases([[5, 6], [7]], [[8, 9], [4, 4, 4, 4, 4, 4]], 8, 4, end=2)
    np.testing.assert_array_equal(made["tokens"], [[5, 6, 8, 9, 2, 2, 2, 2], [7, 4, 4, 4, 4, 2, 2, 2]])
    np.testing.assert_array_equal(made["prompt_len"], [2, 1])
    np.testing.assert_array_equal(made["length"], [6, 5])
    made = C.canvases([[5, 6]], [[8, 9]], 8, 0, end=2)
    np.testing.assert_array_equal(made["tokens"], [[5, 6, 8, 9, 2, 2, 2, 2]])
    np.testing.assert_array_equal(made["length"], [8])


def test_a_batch_of_stories_is_a_pure_function_of_its_step():
    batches = C.StoryBatches(4, 112, 64, seed=1)
    first, again, other = batches.batch_at(3), batches.batch_at(3), batches.batch_at(4)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], other["tokens"])
    tokenizer = stories.tokenizer()
    for row, problem in enumerate(stories.stories(1, "train", 4, start=12)):
        start, stop = first["prompt_len"][row], first["length"][row]
        assert stop - start == 64
        assert tokenizer.decode(first["tokens"][row, 1:start]) == problem.prompt
        answer = first["tokens"][row, start:stop]
        assert tokenizer.decode(answer, skip_special_tokens=True) == problem.answer_text
        end = int(np.argmax(answer == tokenizer.eos_token_id))
        assert end > 0
        assert (answer[end:] == tokenizer.eos_token_id).all()


def test_every_response_is_an_answer_and_what_does_not_fit_is_said(capsys):
    turns = Document(np.array([6, 7, 5, 8, 2]), np.array([False, True, False, True, True]))
    made = C.answer_rows([turns, document([1] * 9, [3]), document([4], [1, 2, 3, 4, 5, 6])], 8, 4, end=2)
    np.testing.assert_array_equal(
        made["tokens"], [[6, 7, 2, 2, 2, 2, 2, 2], [6, 7, 5, 8, 2, 2, 2, 2], [4, 1, 2, 3, 4, 2, 2, 2]]
    )
    np.testing.assert_array_equal(made["prompt_len"], [1, 3, 1])
    np.testing.assert_array_equal(made["length"], [5, 7, 5])
    assert capsys.readouterr().out == "of 4 answers 1 are left out for long prompts, 1 are cut\n"
    with pytest.raises(DflaxError, match=r"rows of 8 tokens \(1 were dropped\)"):
        C.answer_rows([document([1] * 9, [3])], 8, 4, end=2)


def test_text_is_joined_and_cut_and_some_rows_are_short():
    tokenizer = stories.tokenizer()
    rows = [Located(f"f:{i}", {"text": "Ann has 12 pens."}) for i in range(30)]
    made = C.text_rows(rows, tokenizer, 10)
    one = [*tokenizer.encode("Ann has 12 pens."), tokenizer.eos_token_id]
    joined = one * 30
    np.testing.assert_array_equal(made["tokens"].reshape(-1), joined[: made["tokens"].size])
    assert made["tokens"].size > len(joined) - 10
    batches = C.TextBatches(made, 8, seed=0, cut_share=0.5)
    lengths = np.concatenate([batches.batch_at(step)["length"] for step in range(20)])
    assert 0.3 < (lengths < 10).mean() < 0.6
    assert lengths.min() >= 1
    assert (C.TextBatches(made, 8, seed=0, cut_share=0.0).batch_at(0)["length"] == 10).all()
    np.testing.assert_array_equal(batches.batch_at(7)["length"], lengths[56:64])
    with pytest.raises(DflaxError, match="f:9: key 'text'"):
        C.text_rows([Located("f:9", {"prompt": "x"})], tokenizer, 10)
    with pytest.raises(DflaxError, match="a row takes 99"):
        C.text_rows(rows[:1], tokenizer, 99)
