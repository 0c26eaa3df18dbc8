"""The tests can fail: each named fault is put into the running code, and a named test must then turn red.

A fault is a change of the source text of one function, compiled in its own module and put in its place while the test runs.
"""

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from dflax.infer import denoise, speculative
from dflax.infer.canvas import Cache


@dataclass(frozen=True)
class Fault:
    """In `module`, function `name` ("Class.method" too, or imported), the text `old` (exactly once) becomes `new`; `test` must notice."""

    module: str
    name: str
    old: str
    new: str
    test: str
    arguments: tuple[Any, ...] = ()


OP = "dflax.kernels_pallas.block_attention"
REFERENCE = f"{OP}.reference"
PUBLIC = "tests.kernels_pallas.test_public:test_output_and_gradients_by_kernels"
FAULTS = {
    "an anchor sees its own feature": Fault(
        REFERENCE, "visible_context", "(column < ctx_len[..., None])", "(column <= ctx_len[..., None])",
        "tests.models.test_drafter:test_what_stands_at_or_after_the_anchor_changes_nothing",
    ),
    "the window is one token wider": Fault(
        REFERENCE, "visible_context", "live[..., None, :] & (distance < window)", "live[..., None, :] & (distance <= window)",
        "tests.models.test_drafter:test_sliding_layers", ("noncausal",),
    ),
    "the hidden part of the block is not masked": Fault(
        REFERENCE, "visible_block", "sees & (slot[:, None] >= slot) if", "sees if",
        "tests.models.test_decoder:test_logits_and_layer_outputs", ("target_qwen3",),
    ),
    "labels are shifted by one": Fault(
        "dflax.train.drafter", "supervision", "anchors[..., None] + slot", "anchors[..., None] + slot - 1",
        "tests.train.test_drafter:test_labels_and_supervision",
    ),
    "a block learns from the next document": Fault(
        "dflax.train.drafter", "supervision", "& same & take(rows.loss_mask)", "& take(rows.loss_mask)",
        "tests.train.test_drafter:test_a_block_never_learns_from_the_next_document",
    ),
    "a block sees the document packed before its own": Fault(
        "dflax.train.drafter", "block_hidden", "start = _take(rows.ctx_start, anchors)", "start = jnp.zeros_like(anchors)",
        "tests.train.test_drafter:test_a_packed_document_is_learned_as_alone", ("dflash",),
    ),
    "a fused drafter's context sees the document packed before its own": Fault(
        "dflax.models.drafter", "Drafter.context", " & (positions[:, None] >= ctx_start[..., None])", "",
        "tests.train.test_drafter:test_a_packed_document_is_learned_as_alone", ("dflash_fused",),
    ),
    "a diffusion model's prompt is noised": Fault(
        "dflax.train.diffusion", "answer_region", "(column >= prompt_len[:, None]) & ", "",
        "tests.train.test_diffusion:test_prompts_and_what_lies_behind_a_row_are_never_hidden",
    ),
    "hidden tokens are not weighed by 1 / t": Fault(
        "dflax.train.diffusion", "weigh", "noised.weight * ce", "(noised.weight > 0) * ce",
        "tests.train.test_diffusion:test_the_weights_by_hand", ("elbo", "sequence"),
    ),
    "rolling noise moves over half of the region": Fault(
        "dflax.train.diffusion", "rolling", "(1 - t) * span", "(1 - t / 2) * span",
        "tests.train.test_diffusion:test_the_mean_over_rolling_noise_is_a_bound", (1.0,),
    ),
    "the residual is left out of rejection": Fault(
        "dflax.infer.accept", "reject", "jnp.exp(target) - jnp.exp(drafted)", "jnp.exp(target)",
        "tests.infer.test_accept:test_recorded_rejections", (5,),
    ),
    "a stale column of the cache becomes visible": Fault(
        "dflax.cache", "KVCache.commit", ".advance(n)", ".advance(n + 1)",
        "tests.models.test_decoder:test_prefill_in_chunks_then_one_token_at_a_time", ("target_qwen3",),
    ),
    "the wrong layer is tapped": Fault(
        "dflax.models.features", "FeatureTap.__call__", "self._kept[layer] = x", "self._kept[layer] = self._kept.get(layer - 1, x)",
        "tests.models.test_decoder:test_logits_and_layer_outputs", ("target_llama",),
    ),
    "context keys are rotated one position too far": Fault(
        "dflax.models.drafter", "Drafter.context", "positions = cache.length[:, None] +", "positions = cache.length[:, None] + 1 +",
        "tests.models.test_drafter:test_three_rounds",
    ),
    "the low frequencies of llama3 scaling are not rescaled": Fault(
        "dflax.models.layers", "rope_frequencies", "(1 - smooth) * inverse / config.factor", "(1 - smooth) * inverse",
        "tests.models.test_decoder:test_logits_and_layer_outputs", ("target_llama",),
    ),
    "the context is normed by the layer": Fault(
        "dflax.models.drafter", "Drafter.fuse", "self.hidden_norm(self.fc(features))", "self.fc(features)",
        "tests.models.test_drafter:test_three_rounds",
    ),
    "kept router probabilities are not renormalised": Fault(
        "dflax.models.moe", "_of_experts", "weights /= weights.sum(-1, keepdims=True)", "pass",
        "tests.models.test_decoder:test_logits_and_layer_outputs", ("target_qwen3_moe",),
    ),
    "a look-ahead ignores what is fixed to the left": Fault(
        "dflax.infer.extrapolation", "ConfidenceExtrapolation.safe_horizon", " & (h <= self.potential_horizon(coverage))", "",
        "tests.infer.test_extrapolation:test_horizon_is_the_largest_safe_one_and_none_at_the_coverage_threshold",
    ),
    "labels of traces come from another step": Fault(
        "dflax.train.traces", "agreement", "token == final", "np.roll(token, 1, axis=2) == final",
        "tests.train.test_traces:test_labels_and_coverage_belong_to_their_step",
    ),
    "the moving average feeds on forecasts": Fault(
        "dflax.models.controller", "Trail.features", "smoothing * raw", "smoothing * confidence",
        "tests.models.test_controller:test_features_by_hand",
    ),
    "a short pass sees its own stale keys": Fault(
        "dflax.infer.denoise", "short_pass", "hole = jnp.stack([first, first + n], axis=1)", "hole = jnp.stack([first, first], axis=1)",
        "tests.infer.test_denoise_properties:test_a_short_pass_just_after_the_full_one_equals_it", ("plain", "dual", 0.0),
    ),
    "a short pass does not see drafts": Fault(
        "dflax.infer.denoise", "short_pass", "visible(state, _mask(model))", "state.tokens",
        "tests.infer.test_denoise_properties:test_a_short_pass_just_after_the_full_one_equals_it", ("plain", "dual", 0.0),
    ),
    "a row is cut by passes that its neighbours need": Fault(
        "dflax.infer.denoise", "finish", "p = jnp.where(active, p, -1.0)", "pass",
        "tests.infer.test_denoise_properties:test_a_row_that_waits_at_its_blocks_edge_is_not_cut",
        ("plain", Cache("prefix", suffix_lengths=1)),
    ),
    "a full pass does not refresh the cache": Fault(
        "dflax.infer.denoise", "full_step", "replace(state, cache=cache, cached_length", "replace(state, cached_length",
        "tests.infer.test_denoise:test_one_run_with_a_dual_cache",
    ),
    "logits of a shifted model are left where they are": Fault(
        "dflax.infer.denoise", "_view", "shift = int(model.config.shifted_logits)", "shift = 0",
        "tests.infer.test_denoise:test_one_run_of_a_shifted_model",
    ),
    "a kernel's walk ends one tile too early": Fault(
        f"{OP}.fold", "tiles_walk", "-(-end // columns)", "end // columns",
        "tests.kernels_pallas.test_kernels:test_split_context", ("ragged end of the cache", 150),
    ),
    "a kernel's walk ends at the hole": Fault(
        f"{OP}.fold", "tiles_walk", "after = end - again", "after = jnp.zeros_like(end)",
        "tests.kernels_pallas.test_walk:test_windows_and_holes_cost_nothing_inside",
    ),
    "the last query tile does not visit its keys": Fault(
        f"{OP}.fold", "visitors", "[..., ::-1, :], -2) - first, 0)", "[..., ::-1, :], -2) - first - 1, 0)",
        PUBLIC, ("gpu", -1),
    ),
    "a kernel's gradient forgets that weights add up to one": Fault(
        f"{OP}.tile", "weights", "p * (gradient - delta)", "p * gradient", PUBLIC, ("gpu", -1),
    ),
    "a kernel's gradient lands in another layer": Fault(
        f"{OP}.api", "_into_stack", "[(fixed, shape[0] - 1 - fixed, 0)]", "[(shape[0] - 1 - fixed, fixed, 0)]", PUBLIC, ("gpu", -1),
    ),
}  # fmt: skip


def forget_programs() -> None:
    """Compiled programs hold the code that they were traced from."""
    speculative.program.cache_clear()
    denoise.program.cache_clear()
    jax.clear_caches()


def mutated(fault: Fault, original: Any, name: str) -> Any:
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(fault.old) == 1, f"{fault.module}.{fault.name} no longer holds {fault.old!r} once"
    scope = dict(original.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source.replace(fault.old, fault.new), fault.name, "exec"),
        scope,
    )
    return scope[name]


def named_test(fault: Fault) -> Any:
    module, name = fault.test.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_its_test_red(name, monkeypatch):
    fault = FAULTS[name]
    holder: Any = importlib.import_module(fault.module)
    *outer, last = fault.name.split(".")
    for part in outer:
        holder = getattr(holder, part)
    test = named_test(fault)
    forget_programs()
    test(*fault.arguments)
    original = inspect.unwrap(inspect.getattr_static(holder, last))
    wrong = mutated(fault, original, last)
    monkeypatch.setattr(holder, last, wrong)
    module = importlib.import_module(fault.test.split(":")[0])
    for alias, value in list(vars(module).items()):  # the test's own names for the function, jitted ones too
        if callable(value) and inspect.unwrap(value) is original:
            monkeypatch.setattr(module, alias, wrong)
    forget_programs()
    with pytest.raises(AssertionError):
        test(*fault.arguments)
    monkeypatch.undo()
    forget_programs()
