"""A diffusion model of a few thousand random weights; so few tokens that it is often sure of one, and often of its mask token."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflax
from dflax.infer.tasks import final_number
from dflax.model import Model
from dflax.train import problems
from tests.infer.tiny import random_model, target_config

MASK, TOKENS = 6, range(6)


def diffusion_model(shifted: bool = False, seed: int = 3, **fields: Any) -> Model:
    """Two layers of width 16, vocabulary of 7; shifted: logits as Dream's."""
    family = "Dream" if shifted else "llada"
    config = target_config(family, bidirectional=True, shifted_logits=shifted, mask_token_id=MASK, qkv_bias=shifted)
    return random_model(config, seed, **fields)


SIGNS = ("<pad>", "<bos>", "<eos>", "<mask>", "<unk>", *(f"▁{digit}" for digit in range(10)), ".", "▁####")


def counting_model(
    folder: Path, prompts: Sequence[Sequence[int]], gen_length: int, block_length: int, right: int
) -> None:
    """Saves a random model that writes digits, and problems.jsonl, of which plain decoding answers the first `right` rightly."""
    config = target_config(
        "llada", vocab_size=len(SIGNS), head_dim=4, bidirectional=True, mask_token_id=3, eos_token_ids=(2,)
    )
    random_model(config, 3, tokenizer=problems.word_tokenizer(SIGNS)).save(folder)
    texts = dflax.denoise(dflax.load(folder), prompts, gen_length, block_length).texts
    assert texts is not None
    rows = []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        number = final_number(text)
        assert number is not None
        answer = f"{number:.0f}" if i < right else f"#### -{number + 1:.0f}"
        rows.append({"prompt_tokens": prompt, "answer": answer})
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
