"""Decoding over eight virtual devices: the same tokens as on one, and a share of weights and caches on each."""

import dataclasses
import json

import pytest

from tests.devices import on_devices
from tests.infer.eight_devices import MESHES
from tests.infer.tiny import drafter_config, random_model, target_config


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    target = target_config("qwen3")
    random_model(target, 0).save(folder / "target")
    drafter = drafter_config(target)
    drafter = dataclasses.replace(drafter, causal=(False,) * drafter.num_layers, num_kv_heads=2)
    random_model(drafter, 1).save(folder / "drafter")
    denoised = {"bidirectional": True, "mask_token_id": 6, "head_dim": 4}
    random_model(target_config("llada", **denoised), 3).save(folder / "diffusion")
    random_model(target_config("Dream", shifted_logits=True, qkv_bias=True, **denoised), 3).save(folder / "dream")
    mixture = target_config("qwen3_moe")
    assert mixture.moe is not None
    mixture = dataclasses.replace(mixture, moe=dataclasses.replace(mixture.moe, num_experts=4))
    random_model(mixture, 4).save(folder / "mixture")
    done = on_devices(8, "tests.infer.eight_devices", folder)
    for line in (  # nothing is left whole in silence
        "vocab of size 7 is replicated: tensor = 2 does not divide it",
        "kv_heads of size 2 is replicated: tensor = 4 does not divide it; every device has the whole cache",
    ):
        assert line in done.stderr, line
    assert done.stderr.count("batch of size 3 is replicated: data = 2 does not divide it") == 1
    assert done.stderr.count("kv_heads of") == done.stderr.count("batch of") == 1, done.stderr
    return json.loads(done.stdout)


def test_a_mixture_and_dream_write_the_same_too(found):
    for what in ("mixture", "dream"):
        assert found[list(MESHES)[-1]][what] == found[""][what], what


def test_what_a_mesh_does_not_divide_is_whole_and_changes_nothing(found):
    assert found["uneven"] == {"plain": found[""]["plain"][:3], "cache": 1}


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
def test_every_mesh_writes_what_one_device_writes(found, mesh):
    for what in ("fingerprint", "tokens", "plain", "lengths", "answers", "nfe"):
        assert found[mesh][what] == found[""][what], what
    assert found[""]["tokens"] == found[""]["plain"]


def test_the_collectives_of_a_real_program_are_counted(found):
    assert found["collectives"] == {"all-reduce": [1, 16]}
    assert found["in loops"] == {"all-reduce": [3 * 5 + 1, 16 * 4 * 4 * 8]}


def test_weights_and_caches_are_cut_and_not_copied(found):
    """Heads, feed-forward and vocabulary over tensor (the vocabulary of 7 is not divisible), widths over fsdp, rows over data and fsdp."""
    assert found[""]["weights"] == 1
    for mesh, part in {"": 1, "tensor=2": 1 / 2, "data=2,fsdp=2,tensor=2": 1 / 8}.items():
        assert [found[mesh][what] for what in ("cache", "draft cache", "canvas")] == [part] * 3
    assert 1 / 2 <= found["tensor=2"]["weights"] < 0.6
    assert 1 / 4 <= found["data=2,fsdp=2,tensor=2"]["weights"] < 0.3
