"""Whole programs in real shapes for chips that are not here: what is updated in place, what is copied, what is sent, and whether it fits.

Targets have fewer layers here, which shows the same: a further layer adds its own weights and cache, and nothing else. What is said to fit
has all of them. For speculation the vocabulary is cut too: XLA for TPU takes minutes to compile the sampler's sort of 151,936 logits.
`dflax compile --table` compiles all in full.
"""

import json
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dflax import abstract, configs
from dflax.cache import KVCache
from dflax.infer import aot
from dflax.infer.collectives import ARRAY, COLLECTIVE
from dflax.infer.policies import Threshold
from dflax.sharding import make_mesh
from dflax.train.aot import configs_of, drafter_step
from dflax.train.recipe import DrafterRecipe
from tests.aot.conftest import devices
from tests.aot.test_kernels import KERNEL

pytestmark = pytest.mark.aot

LAYERS, VOCABULARY = 6, 16384
COPIES = "copy|copy-start|transpose|convert|dynamic-slice|all-gather|all-to-all|concatenate"


def recipe(folder, target=None, **changes):
    """The published setting for Qwen3-8B; target: keys of its config.json that are others."""
    values = configs.load("qwen3-8b-dflash")
    if target is not None:
        (folder / "config.json").write_text(json.dumps(configs.published("Qwen/Qwen3-8B") | target))
        values["target"] = str(folder)
    return configs.build(DrafterRecipe, {"data": ["-"], **values, **changes}, "preset qwen3-8b-dflash")


def held(tree):
    """Bytes on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache(config, mesh, rows, columns):
    empty = jax.eval_shape(lambda: KVCache.empty(config, rows, columns, jnp.bfloat16))
    return abstract.loop_state(empty, mesh, rows)


def gathered(text, size):
    """All-gathers of arrays that have a dimension of this size."""
    found = [match for match in COLLECTIVE.finditer(text) if match["kind"] == "all-gather"]
    shapes = [dims.split(",") for match in found for _, dims in ARRAY.findall(match["shape"])]
    return [shape for shape in shapes if str(size) in shape]


def copied(text, cache):
    """Operators that make another array of the shape of a whole cache, and those that make one of a layer of it."""
    whole = cache.k.sharding.shard_shape(cache.k.shape)
    found = lambda *shapes: re.findall(
        rf"= bf16\[(?:{'|'.join(','.join(map(str, shape)) for shape in shapes)})\]\S* ({COPIES})\(", text
    )
    return found(whole), found((1, *whole[1:]), whole[1:])


@pytest.mark.parametrize(("name", "axes"), [("v6e:2x2", "tensor=4"), ("h100", "")])
def test_speculation_of_qwen3_8b(name, axes, tmp_path):
    found, rows, columns = devices(name), 8, 16384
    mesh = make_mesh(axes, found.devices)
    cut = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "eos_token_id": 1}
    target, drafter, _ = configs_of(recipe(tmp_path, cut, layers=1, mask_token_id=3))
    compiled = aot.speculative_loop(target, drafter, mesh, rows, columns, 16, "bfloat16")
    text, memory = compiled.as_text(), compiled.memory_analysis()
    caches = [cache(config, mesh, rows, columns) for config in (target, drafter)]
    assert text.count(KERNEL[found.chip.platform]) == LAYERS + 1
    assert memory.alias_size_in_bytes >= held(caches)
    assert [copied(text, one) for one in caches] == [([], []), ([], [])]
    assert memory.temp_size_in_bytes < held(caches[1])  # one layer
    assert not gathered(text, VOCABULARY)
    whole = configs_of(recipe(tmp_path))[:2]
    weights = [abstract.leaves(config, mesh, "bfloat16") for config in whole]
    everything = held([weights, [cache(config, mesh, rows, columns) for config in whole]])
    assert everything + memory.temp_size_in_bytes < found.chip.memory


def test_denoising_of_llada_8b_with_a_dual_cache():
    found, rows, columns = devices("h100"), 1, 4096
    mesh = make_mesh("", found.devices)
    whole = abstract.config_of("GSAI-ML/LLaDA-8B-Base")
    model = replace(whole, num_layers=LAYERS)
    compiled = aot.denoising_loop(model, mesh, rows, columns, 256, 32, "dual", Threshold(), None, "bfloat16")
    text, memory, kept = compiled.as_text(), compiled.memory_analysis(), cache(model, mesh, rows, columns)
    assert text.count(KERNEL["cuda"]) >= LAYERS  # of short passes
    assert memory.alias_size_in_bytes >= held(kept)
    of_caches, of_layers = copied(text, kept)
    assert not of_caches
    assert set(of_layers) <= {"copy"}  # a full pass turns the keys that it has just made
    assert len(of_layers) <= LAYERS
    assert memory.temp_size_in_bytes < held(kept)
    everything = held([abstract.leaves(whole, mesh, "bfloat16"), cache(whole, mesh, rows, columns)])
    assert everything + memory.temp_size_in_bytes < found.chip.memory


@pytest.mark.parametrize(("name", "rows"), [("v5p:4x4x4", 64), ("v5e:4x4", 32)])
def test_drafter_training_of_qwen3_8b(name, rows, tmp_path):
    """Rows of 3072 tokens, 512 anchors, block 16; the drafter and its vocabulary whole."""
    found = devices(name)
    mesh = make_mesh("fsdp=-1", found.devices)
    cut = recipe(tmp_path, {"num_hidden_layers": LAYERS}, rows_per_step=rows)
    assert (cut.length, cut.objective.anchors, cut.block_size, cut.layers) == (3072, 512, 16, 5)
    compiled = drafter_step(cut, mesh)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    target, drafter, _ = configs_of(recipe(tmp_path))
    masters = held(abstract.parameters(drafter, mesh, "float32"))
    assert memory.alias_size_in_bytes >= 3 * masters  # with two moments
    assert not gathered(text, target.vocab_size)
    weights = held(abstract.leaves(target, mesh, "bfloat16"))
    assert 3 * masters + weights + memory.temp_size_in_bytes < found.chip.memory
