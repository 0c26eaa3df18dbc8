"""A model in memory and as a folder: the way out and in again, whole or not at all, and what tells weights apart."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dflax
from dflax.errors import DflaxError
from dflax.models import params
from dflax.train import stories
from tests.golden import load_case
from tests.infer.tiny import random_model, target_config


@pytest.fixture
def model():
    words = stories.tokenizer()
    return random_model(target_config(vocab_size=len(words)), 1, tokenizer=words, stop_token_ids=(2, 7, 9))


def test_a_saved_model_stops_where_it_stopped(model, tmp_path, monkeypatch):
    """Tokens that neither config.json nor the tokenizer names, as Qwen3 has, are in generation_config.json."""
    model.save(tmp_path / "model")
    again = dflax.load(tmp_path / "model")
    assert again.stop_token_ids == (2, 7, 9)
    assert again.fingerprint == model.fingerprint
    again.save(tmp_path / "model")  # over itself
    assert dflax.load(tmp_path / "model").stop_token_ids == (2, 7, 9)
    monkeypatch.setattr("dflax.text.END_OF_TURN", ("▁Then",))
    turns = dataclasses.replace(model, stop_token_ids=(2, model.tokenizer.get_vocab()["▁Then"]))
    turns.save(tmp_path / "turns")  # no diffusion model: nobody adds that token when it is read
    assert dflax.load(tmp_path / "turns").stop_token_ids == turns.stop_token_ids
    plain = dataclasses.replace(model, stop_token_ids=(model.tokenizer.eos_token_id,))
    plain.save(tmp_path / "plain")
    assert not (tmp_path / "plain" / "generation_config.json").exists()


def test_a_tokenizer_that_cannot_be_written_leaves_no_folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "save_pretrained", lambda folder: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_fingerprint_tells_weights_apart():
    folder = load_case("dflash_generate").folder / "target"
    one = dflax.load(folder)
    assert one.fingerprint == dflax.load(folder).fingerprint
    leaves = params.flatten(one.module)
    leaves["norm.weight"] = leaves["norm.weight"].at[0].add(jnp.float32(1e-3))
    other = dataclasses.replace(one, module=params.fill(one.module, leaves))
    assert other.fingerprint != one.fingerprint
    for change in (lambda x: -x, lambda x: x[::-1]):  # negated, moved
        leaves = params.flatten(one.module)
        name = next(name for name in leaves if name.endswith("q_proj.weight"))
        leaves[name] = change(leaves[name])
        assert dataclasses.replace(one, module=params.fill(one.module, leaves)).fingerprint != one.fingerprint


def test_the_inverse_of_a_draft_vocabulary_is_not_needed(tmp_path):
    """Speculators' drafters hold t2d beside d2t."""
    from safetensors.numpy import load_file, save_file

    from tests.infer.tiny import VOCAB, drafter_config

    config = drafter_config(target_config(), draft_vocab_size=3)
    drafter = random_model(config, 1, draft_ids=np.array([1, 2, 5], np.int32))
    drafter.save(tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(file) | {"t2d": np.isin(np.arange(VOCAB), [1, 2, 5])}
    save_file(tensors, file)
    assert dflax.load(tmp_path / "drafter").draft_ids.tolist() == [1, 2, 5]
    for wrong in (np.arange(2), np.array([0.5, 1, 2])):  # too few, no numbers of tokens
        save_file(tensors | {"d2t": wrong}, file)
        with pytest.raises(DflaxError, match="'d2t' must name 3 different ids of a vocabulary of 7"):
            dflax.load(tmp_path / "drafter")
