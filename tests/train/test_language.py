"""Training a tiny target: what a batch holds, what the loss counts, and that training writes a model that loads and resumes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax import configs
from dflax.errors import DflaxError
from dflax.train import language as L
from dflax.train import metrics, stories
from dflax.train.trainer import TrainConfig

SMALL = {"hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 1, "problems_per_step": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return stories.tokenizer()


def small(out, **changes):
    train = TrainConfig(steps=4, learning_rate=1e-2, log_every=1, checkpoint_every=2, out=str(out))
    return L.LanguageRecipe(**SMALL, eval_problems=0, train=train, **changes)


def test_a_batch_is_a_pure_function_of_its_step_and_loses_no_token(tokenizer):
    batches = L.ProblemBatches(8, 224, seed=3)
    first, again, other = batches.batch_at(5), batches.batch_at(5), batches.batch_at(6)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], other["tokens"])
    drawn = [stories.generate(3, 40 + i, "train") for i in range(8)]
    answers = sum(len(tokenizer.encode(p.answer_text, add_special_tokens=False)) + 1 for p in drawn)
    assert first["loss_mask"].sum() == answers
    assert np.sum(first["tokens"] == tokenizer.eos_token_id) == 8
    for row in range(4):
        starts = sorted(set(first["ctx_start"][row, first["loss_mask"][row]].tolist()))
        assert len(starts) == 2
        assert starts[0] == 0
        assert all(first["tokens"][row, start] == tokenizer.bos_token_id for start in starts)


def test_every_training_problem_fits_the_budget_and_two_fit_a_row(tokenizer):
    made = L.documents(stories.stories(0, "train", 300), tokenizer)
    assert max(int(d.loss_mask.sum()) for d in made) <= L.BUDGET
    assert L.pair_up(made, L.LanguageRecipe.length).loss_mask.sum() == sum(d.loss_mask.sum() for d in made)


def test_the_loss_counts_answers_and_questions_by_weight_and_crosses_no_document(tokenizer):
    batch = L.ProblemBatches(2, 224, seed=0).batch_at(0)
    config = L.model_config(L.LanguageRecipe(**SMALL), tokenizer)
    model = L.fresh(config, 0)

    def loss(weight, tokens=None):
        changed = {**batch, "tokens": batch["tokens"] if tokens is None else tokens}
        return L.next_token_loss(model, **{k: jnp.asarray(v) for k, v in changed.items()}, question_weight=weight)

    value, found = loss(0.0)
    same = batch["ctx_start"][:, 1:] == batch["ctx_start"][:, :-1]
    response = batch["loss_mask"][:, 1:] & same
    logits = model.logits(model.packed(jnp.asarray(batch["tokens"]), jnp.asarray(batch["ctx_start"])).hidden)
    ce = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:, :-1], batch["tokens"][:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(value, ce[response].mean(), rtol=1e-5)
    assert found["tokens"] == same.sum()
    weight = np.where(response, 1.0, np.where(same, 0.5, 0.0))
    np.testing.assert_allclose(loss(0.5)[0], (weight * ce).sum() / weight.sum(), rtol=1e-5)
    # The first document's question changes nothing in the second document, whose loss alone is left here.
    second = batch["ctx_start"] > 0
    batch["loss_mask"] = batch["loss_mask"] & second
    other = batch["tokens"].copy()
    other[0, 3] = (other[0, 3] + 1) % config.vocab_size
    assert not second[0, 3]
    np.testing.assert_allclose(loss(0.0)[0], loss(0.0, other)[0], rtol=1e-6)


def test_trains_resumes_and_writes_a_model_that_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "plot", lambda *paths: None)
    folder = L.train_language(small(tmp_path))
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert L.train_language(small(tmp_path)) == folder  # nothing is left to do
    model = dflax.load(folder)
    assert model.stop_token_ids == (stories.tokenizer().eos_token_id,)
    drawn = list(stories.stories(0, "test", 2))
    assert len(L.answer(model, drawn).texts) == 2
    with pytest.raises(DflaxError, match="question_weight"):
        L.train_language(small(tmp_path, question_weight=0.7))


def test_the_preset_is_a_recipe_and_bad_values_are_refused():
    preset = configs.build(L.LanguageRecipe, configs.load("arith"), "arith")
    assert preset.hidden_size % preset.heads == 0
    for wrong in ({"problems_per_step": 5}, {"question_weight": 2.0}, {"heads": 5}):
        with pytest.raises(DflaxError, match=next(iter(wrong))):
            dataclasses.replace(preset, **wrong)
