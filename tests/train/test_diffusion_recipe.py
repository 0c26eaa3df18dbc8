"""`dflax train diffusion`: from stories, and from files on top of a model, to a folder that loads and answers; exact resume; presets."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import dflax
from dflax import configs
from dflax.errors import DflaxError
from dflax.models import params
from dflax.train import diffusion_recipe as R
from dflax.train import metrics, stories
from dflax.train.diffusion import DiffusionObjective
from dflax.train.trainer import Stopped, TrainConfig

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "layers": 1,
    "heads": 2,
    "rows_per_step": 4,
    "bound_rows": 4,
    "bound_samples": 2,
}
PRESETS = ("arith-llada", "llada-8b-sft", "dream-7b-sft", "llada-moe-sft")


def small(out, steps=4, **changes):
    train = TrainConfig(steps=steps, learning_rate=1e-2, log_every=1, checkpoint_every=2, out=str(out))
    return R.DiffusionRecipe(**(SMALL | {"eval_problems": 2, "train": train} | changes))


@pytest.fixture(scope="module", autouse=True)
def no_plots():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return R.train_diffusion(small(out)), out


def test_trains_on_stories_and_writes_a_model_that_answers(trained):
    folder, out = trained
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    found = next(row for row in rows if "eval/bound" in row)
    assert set(found) > {"eval/validation_exact_match", "eval/test_exact_match"}
    assert 3 < found["eval/bound"] < 4.5  # a model that has learnt nothing has ln 102 = 4.6
    model = dflax.load(folder)
    assert model.config.bidirectional
    assert model.config.mask_token_id == stories.tokenizer().mask_token_id
    assert model.stop_token_ids == (stories.tokenizer().eos_token_id,)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llada"
    assert model.tokenizer.mask_token_id == model.config.mask_token_id


def test_a_share_of_the_rows_learns_next_tokens_and_the_others_hidden_ones(trained):
    folder, _ = trained
    model = dflax.load(folder)
    leaves, key = params.flatten(model.module), jax.random.key(1)
    batch = R.StoryBatches(4, 112, 64, 0).batch_at(0)
    loss = lambda share: jax.jit(
        R.make_loss(small("x", objective=DiffusionObjective(next_token_share=share)), model.module)
    )
    whole, found = loss(0.5)(leaves, batch, key)
    part = lambda rows: {name: array[rows] for name, array in batch.items()}
    (follows, _), (hidden, _) = loss(1.0)(leaves, part(slice(2)), key), loss(0.0)(leaves, part(slice(2, 4)), key)
    np.testing.assert_allclose([found["next_token_loss"], found["diffusion_loss"]], [follows, hidden], rtol=1e-5)
    np.testing.assert_allclose(whole, (follows + hidden) / 2, rtol=1e-5)
    assert found["tokens"] == batch["length"].sum()


def test_a_stopped_run_goes_on_as_if_it_had_not_been(trained, tmp_path, monkeypatch):
    folder, _ = trained
    draw = R.StoryBatches.batch_at

    def interrupted(self, step):
        if step == 3:
            raise Stopped("enough")
        return draw(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(R.StoryBatches, "batch_at", interrupted)
        with pytest.raises(Stopped):
            R.train_diffusion(small(tmp_path))
    resumed = R.train_diffusion(small(tmp_path))
    want, got = (params.flatten(dflax.load(path).module) for path in (folder, resumed))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    with pytest.raises(DflaxError, match="a run with length = 112"):
        R.train_diffusion(small(tmp_path, gen_length=96, length=144))


def test_goes_on_from_a_model_with_answers_and_with_text_from_files(trained, tmp_path):
    folder, _ = trained
    drawn = list(stories.stories(0, "train", 12))
    answers, texts = tmp_path / "answers.jsonl", tmp_path / "texts.jsonl"
    answers.write_text("".join(json.dumps({"prompt": p.prompt, "response": p.answer_text}) + "\n" for p in drawn))
    texts.write_text("".join(json.dumps({"text": f"{p.prompt} {p.answer_text}"}) + "\n" for p in drawn))
    common = {"model": str(folder), "held_out": 0.3, "steps": 2}
    for name, changes in {
        "sft": {"data": (str(answers),), "gen_length": 0},
        "text": {"data": (str(texts),), "mode": "pretrain", "gen_length": 0, "cut_share": 0.5, "compute": "bfloat16"},
    }.items():
        made = dflax.load(R.train_diffusion(small(tmp_path / name, **common, **changes)))
        assert made.config == dflax.load(folder).config
        rows = metrics.read(tmp_path / name / "metrics.jsonl")
        bound = next(row["eval/bound"] for row in rows if "eval/bound" in row)
        assert np.isfinite(bound)
        assert "eval/test_exact_match" not in rows[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": ("x.jsonl",)}, "model is empty"),
        ({"mode": "pretrain"}, "data is empty"),
        ({"gen_length": 32}, "gen_length is 32"),
        ({"model": "some/folder", "gen_length": 0}, "name data"),
        ({"length": 100}, "length 100"),
        ({"gen_length": 72, "length": 128}, "multiple of block_length 32"),
        ({"hidden_size": 18, "heads": 4}, "hidden_size is 18"),
        ({"rows_per_step": 0}, "rows_per_step is 0"),
    ],
)
def test_impossible_recipes(tmp_path, change, says):
    with pytest.raises(DflaxError, match=says):
        small(tmp_path, **change)


def test_pretraining_learns_from_the_whole_row():
    text = {"model": "some/folder", "data": ("texts",), "length": 112}
    assert R.DiffusionRecipe(**text, mode="pretrain").answer_columns == 112
    assert R.DiffusionRecipe(**text, gen_length=0).answer_columns == 112
    assert R.DiffusionRecipe(**text).answer_columns == 64


def test_presets_are_recipes():
    for name in PRESETS:
        data = {} if name == "arith-llada" else {"data": ["answers.jsonl"]}  # what else a user has to name
        preset = configs.build(R.DiffusionRecipe, configs.load(name) | data, name)
        assert preset.objective.weights == "elbo"
    shipped = configs.build(R.DiffusionRecipe, configs.load("arith-llada"), "arith-llada")
    size = params.count(R.fresh(R.model_config(shipped), 0))
    assert 0.5e6 <= size <= 2e6
    assert shipped.length <= 128
    assert dataclasses.replace(shipped, objective=DiffusionObjective()).objective.blockwise == 0
