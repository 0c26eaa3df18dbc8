"""The tiny pair and its ablations, in miniature: every part is written, resumable, and what is reported is what was measured."""

import dataclasses
import json

import pytest

import dflax
from dflax import configs
from dflax.errors import DflaxError
from dflax.train import ablations, language, metrics, stories, tiny
from dflax.train.trainer import TrainConfig


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target that has learned nothing, and its drafter, by the one command."""
    out = tmp_path_factory.mktemp("tiny")
    shape = {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1, "problems_per_step": 4}
    recipe = tiny.TinyRecipe(
        out=str(out),
        responses=6,
        batch=3,
        test_problems=3,
        timed_problems=1,
        language=language.LanguageRecipe(**shape, eval_problems=0, train=TrainConfig(steps=2)),
        drafter=small_drafter(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot", lambda *paths: None)
        return tiny.train_tiny(recipe)


def small_drafter():
    return dataclasses.replace(
        tiny.drafter_preset(),
        layers=1,
        target_layer_ids=(0, 1),
        rows_per_step=1,
        eval_prompts=0,
        train=TrainConfig(steps=1),
    )


def test_the_command_leaves_two_models_their_cards_and_the_figures(pair):
    out = pair
    target, drafter = dflax.load(out / "arith"), dflax.load(out / "arith-dflash")
    result = json.loads((out / "result.json").read_text())
    assert result["identical_to_plain"] is True
    assert 1.0 <= result["acceptance_length"] <= 8.0
    assert set(result["minutes"]) == {"target", "responses", "drafter", "evaluation"}
    prompt = stories.generate(0, 0, "test").prompt
    plain = dflax.generate(target, [prompt], max_new_tokens=12)
    assert dflax.speculate(target, drafter, [prompt], max_new_tokens=12).tokens == plain.tokens
    assert f"{result['acceptance_length']:.2f}" in (out / "arith-dflash" / "README.md").read_text()
    assert "python -m dflax train tiny" in (out / "arith" / "README.md").read_text()
    assert len((out / "responses.jsonl.gz").read_bytes()) > 0
    tiny.write_responses(target, out / "responses.jsonl.gz", 6, 3, seed=0)  # kept as they are
    with pytest.raises(DflaxError, match=r"responses.json was made with other settings \(responses\)"):
        tiny.write_responses(target, out / "responses.jsonl.gz", 7, 3, seed=0)


def test_ablations_skip_what_is_done_refuse_other_settings_and_name_what_was_not_run(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "plot", lambda *paths: None)
    config = ablations.AblationConfig(
        target=str(pair / "arith"), responses=6, batch=3, test_problems=2, timed_problems=1, out=str(tmp_path / "runs"),
        table=str(tmp_path / "table.md"), only=("no-decay",), drafter=small_drafter(),
    )  # fmt: skip
    ablations.run(config)
    found = (tmp_path / "runs" / "no-decay.json").read_text()
    measured = json.loads(found)["measured"]["8"]
    page = (tmp_path / "table.md").read_text()
    assert f"{measured['speed_up']:.2f}x / {measured['acceptance_length']:.2f}" in page
    assert "2.1x / 4.2" in page
    assert "Not run yet: base, fused," in page
    monkeypatch.setattr(ablations, "_one", lambda *arguments: pytest.fail("trained again"))
    ablations.run(config)
    assert (tmp_path / "runs" / "no-decay.json").read_text() == found
    with pytest.raises(DflaxError, match="responses"):
        ablations.run(dataclasses.replace(config, responses=7))


def test_every_run_changes_one_thing_of_the_base():
    config = configs.build(ablations.AblationConfig, configs.load("arith-ablations"), "arith-ablations")
    base = dataclasses.asdict(ablations.recipe(config, "base"))
    for name in ablations.RUNS:
        changed = dataclasses.asdict(ablations.recipe(config, name))
        different = {key for key in base if base[key] != changed[key]} - {"train"}
        assert len(different) == (name != "base"), name
    for _, _, rows in ablations.TABLE:
        assert all(name in ablations.RUNS for _, name, _, _ in rows if name)
    with pytest.raises(DflaxError, match="unknown runs"):
        dataclasses.replace(config, only=("nothing",))


def test_bad_values_are_refused():
    with pytest.raises(DflaxError, match="responses is 0"):
        tiny.TinyRecipe(responses=0)
