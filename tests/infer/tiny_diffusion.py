"""A diffusion model of a few thousand random weights; so few tokens that it is often sure of one, and often of its mask token."""

from typing import Any

from dflax.model import Model
from tests.infer.tiny import random_model, target_config

MASK, TOKENS = 6, range(6)


def diffusion_model(shifted: bool = False, seed: int = 3, **fields: Any) -> Model:
    """Two layers of width 16, vocabulary of 7; shifted: logits as Dream's."""
    family = "Dream" if shifted else "llada"
    config = target_config(family, bidirectional=True, shifted_logits=shifted, mask_token_id=MASK, qkv_bias=shifted)
    return random_model(config, seed, **fields)
