"""Whole loops with the Pallas kernels in them, against the recorded runs: interpreted on a CPU, compiled on a GPU where there is one."""

import jax
import numpy as np
import pytest

import dflax
from dflax import policies
from dflax.infer import denoise, speculative
from tests.golden import load_case
from tests.infer import test_denoise
from tests.kernels_pallas.interpreted import interpreted
from tests.models import test_drafter
from tests.train import test_drafter as test_training

on_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="there is no GPU, or JAX does not see it (make test-gpu)"
)


def by(quick=None):
    """Interpreted kernels take long to compile: one platform for every day, the others are slow."""
    marks = lambda platform: () if platform == quick else pytest.mark.slow
    values = [pytest.param(platform, marks=marks(platform)) for platform in ("tpu", "gpu")]
    return pytest.mark.parametrize("kernels", values, indirect=True)


@pytest.fixture
def kernels(request):
    """Every attention by this platform's kernels; the shapes of queries that were traced."""
    forget()
    with interpreted(request.param) as traced:
        yield traced
    forget()


def forget():
    """What was traced with other attention."""
    speculative.program.cache_clear()
    denoise.program.cache_clear()
    test_drafter.block_of.clear_cache()


def speculated(block_size, prompt):
    """A run of the loop as recorded: tokens and acceptance lengths."""
    case = load_case("dflash_generate")
    target, drafter = (dflax.load(case.folder / name) for name in ("target", "drafter_fitted"))
    ids = case.expected["prompts"][prompt].tolist()
    out = dflax.speculate(target, drafter, [ids], 40, block_size=block_size, stop_token_ids=[])
    assert ids + out.tokens[0] == case.expected[f"p{prompt}_greedy_ids"].tolist()
    lengths = case.expected[f"fitted_p{prompt}_b{block_size}_newer_acceptance_lengths"]
    assert out.acceptance_lengths == [lengths.tolist()]


def denoised(kind):
    """The same of a diffusion model: tokens, and the pass that wrote each."""
    case = load_case("llada_fast")
    prompts = case.expected["prompt"].tolist()
    cache = dflax.Cache(kind, suffix_lengths=2, count_empty_pass=kind != "none")
    model = dflax.load(case.folder / "model")
    out = dflax.denoise(model, prompts, 32, 8, 32, policies.Threshold(0.45), cache)
    run = f"fast_{kind}_threshold_0.45"
    assert prompts[0] + out.tokens[0] == np.atleast_2d(case.expected[f"{run}_output_ids"])[0].tolist()
    np.testing.assert_array_equal(out.commit_steps[0], case.expected[f"{run}_commit_step"])


def dream(cache):
    """The window of a model with shifted logits begins one token before the block. Nobody recorded these runs."""
    case, model = test_denoise.once("dream")
    out = dflax.denoise(model, case.expected["prompts"][:1].tolist(), 24, 8, 24, policies.Threshold(0.5), cache)
    return out.tokens, out.commit_steps


@by("gpu")
def test_speculation_by_kernels(kernels):
    speculated(8, 1)
    assert {shape[2] for shape in kernels} >= {8, 32}  # blocks, and a chunk of the prompt


@by("tpu")
def test_denoising_by_kernels(kernels):
    denoised("dual")
    assert {shape[2] for shape in kernels} >= {8}


RECORDED = {
    "drafter with sliding layers": lambda: test_drafter.test_sliding_layers("noncausal"),
    "causal drafter with sliding layers": lambda: test_drafter.test_sliding_layers("causal"),
    "prefix cache": lambda: denoised("prefix"),
    "Dream with a cache, as published": lambda: test_denoise.test_the_cached_loops_of_dream_as_published("dual_threshold_bl8_s24_0.5"),
    "experts": lambda: test_denoise.test_the_sampler_of_llada_moe("gen0"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
@by()
def test_other_recorded_runs_by_kernels(kernels, name):
    RECORDED[name]()
    assert kernels


@pytest.mark.parametrize("cache", [dflax.Cache("prefix", suffix_lengths=1), "dual"], ids=["prefix", "dual"])
@pytest.mark.parametrize("platform", [pytest.param(platform, marks=pytest.mark.slow) for platform in ("tpu", "gpu")])
def test_a_shifted_model_by_kernels(platform, cache):
    forget()
    expected = dream(cache)
    forget()
    with interpreted(platform) as kernels:
        assert dream(cache) == expected
    assert {shape[2] for shape in kernels} >= ({9} if cache == "dual" else {25})
    forget()


@pytest.mark.parametrize("layers", ["full", "sliding"])
@by()
def test_training_by_kernels(kernels, layers):
    """The loss, its accuracy and its gradients."""
    test_training.test_loss_accuracy_and_gradients(layers, "dflash_gamma")
    assert len(kernels) % 2 == 0
    assert kernels  # forward and backward


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize("block_size", [8, 5])
def test_speculation_on_a_gpu(block_size, prompt):
    speculated(block_size, prompt)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "prefix", "dual"])
def test_denoising_on_a_gpu(kind):
    denoised(kind)
