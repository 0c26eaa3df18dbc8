"""Whole programs in real shapes for chips that are not here: what is updated in place, copied, sent, and whether it fits."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from dflax import abstract, configs
from dflax.cache import KVCache
from dflax.infer import aot
from dflax.infer.collectives import ARRAY, COLLECTIVE
from dflax.infer.compile_command import effort
from dflax.infer.policies import Threshold
from dflax.sharding import make_mesh
from dflax.train.aot import configs_of, drafter_step
from dflax.train.recipe import DrafterRecipe
from tests.aot.conftest import devices
from tests.aot.test_kernels import KERNEL

pytestmark = pytest.mark.aot

COPIES = "copy|copy-start|transpose|convert|dynamic-slice|all-gather|all-to-all|concatenate"


@pytest.fixture(autouse=True)
def least_effort():
    """As `dflax compile --quick`: a sixth of the time. (Some kernels by themselves need the usual one to fit.)"""
    effort(least=True)
    yield
    effort(least=False)


def recipe(**changes):
    """The published setting for Qwen3-8B."""
    values = configs.load("qwen3-8b-dflash")
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


def check_fits(chip, memory, arguments):
    """arguments: what the program should be given, so that nothing is whole on a device that should be cut."""
    assert memory.argument_size_in_bytes < 1.02 * held(arguments)  # TPUs pad
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    assert peak < chip.memory


@pytest.mark.parametrize(("name", "axes"), [("v6e:2x2", "tensor=4"), ("h100", "")])
def test_speculation_of_qwen3_8b(name, axes):
    found, rows, columns = devices(name), 8, 16384
    mesh = make_mesh(axes, found.devices)
    configs = configs_of(recipe())[:2]
    compiled = aot.speculative_loop(*configs, mesh, rows, columns, 16, "bfloat16")
    text, memory = compiled.as_text(), compiled.memory_analysis()
    caches = [cache(config, mesh, rows, columns) for config in configs]
    assert text.count(KERNEL[found.chip.platform]) == sum(config.num_layers for config in configs)
    assert memory.alias_size_in_bytes >= held(caches)
    assert [copied(text, one) for one in caches] == [([], []), ([], [])]
    logits = 4 * rows * 16 * configs[0].vocab_size
    assert (
        memory.temp_size_in_bytes < 12 * logits + held(caches[1]) / configs[1].num_layers
    )  # with their sort for top-p; no layer
    assert not gathered(text, configs[0].vocab_size)
    check_fits(found.chip, memory, [caches, [abstract.leaves(config, mesh, "bfloat16") for config in configs]])


def test_denoising_of_llada_8b_with_a_dual_cache():
    found, rows, columns = devices("h100"), 1, 4096
    mesh = make_mesh("", found.devices)
    model = abstract.config_of("GSAI-ML/LLaDA-8B-Base")
    compiled = aot.denoising_loop(model, mesh, rows, columns, 256, 32, "dual", Threshold(), None, "bfloat16")
    text, memory, kept = compiled.as_text(), compiled.memory_analysis(), cache(model, mesh, rows, columns)
    assert text.count(KERNEL["cuda"]) >= model.num_layers  # of short passes
    assert memory.alias_size_in_bytes >= held(kept)
    of_caches, of_layers = copied(text, kept)
    assert not of_caches
    assert set(of_layers) <= {"copy"}  # a full pass turns the keys that it has just made
    assert len(of_layers) <= model.num_layers
    assert memory.temp_size_in_bytes < held(kept)
    check_fits(found.chip, memory, [kept, abstract.leaves(model, mesh, "bfloat16")])


@pytest.mark.parametrize(("name", "rows"), [("v5p:4x4x4", 64), ("v5e:4x4", 32)])
def test_drafter_training_of_qwen3_8b(name, rows):
    """Rows of 3072 tokens, 512 anchors, block 16."""
    found = devices(name)
    mesh = make_mesh("fsdp=-1", found.devices)
    setting = recipe(rows_per_step=rows)
    assert (setting.length, setting.objective.anchors, setting.block_size, setting.layers) == (3072, 512, 16, 5)
    compiled = drafter_step(setting, mesh)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    target, drafter, _ = configs_of(setting)
    masters = abstract.parameters(drafter, mesh, "float32")
    moved = [masters] * 3  # with two moments
    assert memory.alias_size_in_bytes >= held(moved)
    assert not gathered(text, target.vocab_size)
    check_fits(found.chip, memory, [moved, abstract.leaves(target, mesh, "bfloat16")])
