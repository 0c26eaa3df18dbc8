"""Whole loops with the Pallas kernels in them, against the recorded runs: interpreted on a CPU, compiled on a GPU where there is one."""

from functools import partial

import jax
import numpy as np
import pytest

import dflax
from dflax import policies
from dflax.infer import denoise, speculative
from dflax.kernels_pallas.block_attention import api, gpu, tpu
from tests.golden import load_case

on_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="there is no GPU, or JAX does not see it (make test-gpu)"
)


def by(quick):
    """Interpreted kernels take long to compile: one platform for every day, the others are slow."""
    marks = lambda platform: () if platform == quick else pytest.mark.slow
    values = [pytest.param(platform, marks=marks(platform)) for platform in ("tpu", "gpu")]
    return pytest.mark.parametrize("interpreted", values, indirect=True)


@pytest.fixture
def interpreted(request, monkeypatch):
    """Every attention of every loop by this platform's kernel; counts how often it was traced."""
    forward = {"tpu": tpu.forward, "gpu": gpu.forward}[request.param]
    traced = []

    def by_kernel(plain, kernel, arrays, where):
        traced.append(arrays[0].shape)
        return kernel(partial(forward, interpret=True))(arrays, where)

    monkeypatch.setattr(api, "_by_platform", by_kernel)
    forget()
    yield traced
    forget()


def forget():
    """The loops that were traced with other attention."""
    speculative.program.cache_clear()
    denoise.program.cache_clear()


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


@by("gpu")
def test_speculation_by_kernels(interpreted):
    speculated(8, 1)
    assert {shape[2] for shape in interpreted} >= {8, 32}  # blocks, and a chunk of the prompt


@by("tpu")
def test_denoising_by_kernels(interpreted):
    denoised("dual")
    assert {shape[2] for shape in interpreted} >= {8}


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
