"""Models of a few thousand random weights for tests of the loop: so few tokens that even random drafts are often accepted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflax.config import DrafterConfig, ModelConfig, MoEConfig, RopeConfig
from dflax.model import Model, build
from dflax.models import params

VOCAB = 7
TARGET_SEED, DRAFTER_SEED = 1, 105


def target_config(family: str = "qwen3", **changes: Any) -> ModelConfig:
    """Two layers of width 16; changes: fields of ModelConfig."""
    moe = MoEConfig(num_experts=3, experts_per_token=2, intermediate_size=8, norm_topk_prob=True)
    config = ModelConfig(
        family=family, vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, rms_norm_eps=1e-6, rope=RopeConfig(theta=100.0), tie_word_embeddings=False, max_positions=1024,
        qkv_bias=family == "qwen2", qk_norm=family.startswith("qwen3"), moe=moe if family == "qwen3_moe" else None,
        moe_layers=(True, True) if family == "qwen3_moe" else (),
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def drafter_config(target: ModelConfig, **changes: Any) -> DrafterConfig:
    """One layer, block size 4, taps on both target layers; changes: fields of DrafterConfig."""
    config = DrafterConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=24, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-6, rope=RopeConfig(theta=100.0), block_size=4, mask_token_id=0,
        target_layer_ids=(0, 1), num_target_layers=target.num_layers,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def random_model(config: ModelConfig | DrafterConfig, seed: int = 0, dtype: str = "float32", **fields: Any) -> Model:
    """Matrices of unit gain, so that the tokens depend on the whole context. fields: of Model."""
    rng = np.random.default_rng(seed)
    abstract = params.abstract(lambda rngs: build(config, rngs))

    def leaf(shape: tuple[int, ...]) -> jax.Array:
        values = (
            rng.normal(size=shape) / np.sqrt(shape[-1]) * 1.5 if len(shape) > 1 else 1 + 0.1 * rng.normal(size=shape)
        )
        return jnp.asarray(values, dtype)

    leaves = {name: leaf(shape.shape) for name, shape in params.flatten(abstract).items()}
    module = params.fill(abstract, leaves)
    assert isinstance(module, nnx.Module)
    return Model(config, module, **fields)


def pair(seed: int = 0, **drafter: Any) -> tuple[Model, Model]:
    """A target and a drafter that fits it; seed 0 gives a lively text and acceptance lengths around 1.4."""
    target = target_config()
    return random_model(target, TARGET_SEED + seed), random_model(
        drafter_config(target, **drafter), DRAFTER_SEED + seed
    )
