"""Run by test_vocabulary.py on 8 virtual devices: a mesh changes where numbers are made, not the numbers."""

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from dflax import sharding
from dflax.config import ModelConfig, MoEConfig, RopeConfig
from dflax.infer.sampling import filtered_logprobs
from dflax.models import params
from dflax.models.decoder import Decoder
from dflax.models.layers import matmul
from dflax.models.moe import MoE
from dflax.models.vocabulary import lookup
from dflax.train.aot import drafter_step
from dflax.train.diffusion import DiffusionObjective, diffusion_loss
from dflax.train.drafter import Objective, frozen_head_loss
from dflax.train.features import _most_likely
from dflax.train.passes import prepared
from dflax.train.recipe import DrafterRecipe
from dflax.train.step import TrainConfig

MESHES = ("data=2,fsdp=2,tensor=2", "fsdp=8")  # the first has everything; in the second nobody shares rows
QWEN3_VOCABULARY = 151936


def scores(table, head, rows, ids, shares):
    """Everything that is done with a vocabulary's tables in training."""

    def loss(rows):
        logits_of = lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())))
        ce, best = frozen_head_loss(logits_of, rows, head, ids, shares, chunk=3)
        return jnp.sum(ce * jnp.arange(1, len(ce) + 1)), (ce, best)

    (_, (ce, best)), gradient = jax.value_and_grad(loss, has_aux=True)(rows)
    return lookup(table, ids), ce, best, gradient, _most_likely(rows.reshape(8, -1, rows.shape[1]), head, 3)


def the_tables() -> None:
    chance = np.random.default_rng(0)
    V, E, R = 48, 16, 32
    table, head, rows = (chance.normal(size=shape).astype(np.float32) for shape in ((V, E), (V, E), (R, E)))
    ids = chance.integers(0, V, (R, 2)).astype(np.int32)
    shares = chance.random((R, 2)).astype(np.float32)
    want = jax.jit(scores)(table, head, rows, ids, shares)
    for text in MESHES:
        mesh = sharding.make_mesh(text)
        put = lambda x, axes, mesh=mesh: jax.device_put(x, NamedSharding(mesh, sharding.spec(axes, x.shape, mesh)[0]))
        tables = (put(x, ("vocab", "embed")) for x in (table, head))
        got = jax.jit(scores)(*tables, *(put(x, ("batch", None)) for x in (rows, ids, shares)))
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=text)


def a_trained_model() -> None:
    """Loss and gradients of a diffusion model, whose tables are trained, with layers computed again."""
    config = ModelConfig(
        family="llada", vocab_size=48, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=4,
        head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), tie_word_embeddings=False, max_positions=64, bidirectional=True,
        mask_token_id=47,
    )  # fmt: skip
    graph = Decoder(config, rngs=nnx.Rngs(0))
    weights = params.flatten(graph)
    chance = np.random.default_rng(0)
    batch = {"tokens": chance.integers(0, 47, (8, 12)), "prompt_len": np.full(8, 4), "length": np.full(8, 12)}
    batch = {name: array.astype(np.int32) for name, array in batch.items()}

    @partial(jax.jit, static_argnames="remat")
    def run(weights, batch, remat):
        model = lambda weights: prepared(params.fill(graph, weights), remat=remat)
        loss = lambda weights: diffusion_loss(
            model(weights), jax.random.key(0), **batch, answer_columns=8, config=DiffusionObjective(chunk=5)
        )
        return jax.value_and_grad(loss, has_aux=True)(weights)

    want = run(weights, batch, remat=False)
    mesh = sharding.make_mesh(MESHES[0])
    places, dropped = sharding.tree_shardings(weights, mesh, sharding.axes_of(weights))
    assert not dropped
    got = run(jax.device_put(weights, places), sharding.place_batch(batch, mesh), remat=True)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def experts() -> None:
    """A mixture's result and gradients; what devices send each other are results, never the rows of others."""
    config = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=24, norm_topk_prob=True)
    graph = MoE(16, config, rngs=nnx.Rngs(0))
    weights = params.flatten(graph)
    x = np.random.default_rng(0).normal(size=(8, 6, 16)).astype(np.float32)

    @jax.jit
    def run(weights, x):
        loss = lambda weights, x: (lambda y: (jnp.sum(jnp.sin(y)), y))(params.fill(graph, weights)(x))
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    want = run(weights, x)
    for text in ("data=2,fsdp=2,tensor=2", "fsdp=8", "data=2,tensor=4"):
        mesh = sharding.make_mesh(text)
        named = sharding.axes_of({f"mlp.{path}": leaf for path, leaf in weights.items()})
        named = {path.removeprefix("mlp."): axes for path, axes in named.items()}
        places = sharding.tree_shardings(weights, mesh, named)[0]
        placed = jax.device_put(weights, places), sharding.place_batch(x, mesh)
        got = run(*placed)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=text)
        text = jax.jit(lambda weights, x: params.fill(graph, weights)(x)).lower(*placed).compile().as_text()
        assert text is not None
        shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", text)
        assert not [dims for dims in shapes if str(8 * 6) in dims.split(",") or str(8 * 6 * 2) in dims.split(",")], (
            shapes
        )


def limited_sampling() -> None:
    """Top-k and top-p over a cut vocabulary: the numbers of one device, and nobody gathers rows or a head."""
    chance = np.random.default_rng(0)
    B, T, E, V = 8, 3, 16, 96
    hidden, head = chance.normal(size=(B, T, E)).astype(np.float32), chance.normal(size=(V, E)).astype(np.float32)
    temperature = np.array([0, 1, 0.7, 1, 1.3, 1, 0.5, 1], np.float32)
    top_k, top_p = (
        np.array([5, 0, 9, 0, 3, 0, 0, 7], np.int32),
        np.array([0.5, 1, 1, 0.6, 0.9, 0.3, 0.95, 0.8], np.float32),
    )

    def run(hidden, head, *settings):
        return filtered_logprobs(matmul(hidden, head), *(jnp.broadcast_to(x[:, None], (B, T)) for x in settings))

    want = jax.jit(run)(hidden, head, temperature, top_k, top_p)
    for text in ("tensor=8", "data=2,tensor=4", *MESHES):
        mesh = sharding.make_mesh(text)
        put = lambda x, axes, mesh=mesh: jax.device_put(x, NamedSharding(mesh, sharding.spec(axes, x.shape, mesh)[0]))
        settings = (put(x, ("batch",)) for x in (temperature, top_k, top_p))
        placed = put(hidden, ("batch", None, None)), put(head, ("vocab", "embed")), *settings
        compiled = jax.jit(run).lower(*placed).compile()
        np.testing.assert_allclose(want, compiled(*placed), rtol=1e-5, atol=1e-5, err_msg=text)
        gathers = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather", compiled.as_text() or "")
        if "fsdp" not in text:  # there the head's columns are gathered, as they are to score at all
            assert not [dims for dims in gathers if str(V) in dims.split(",")], (text, gathers)


def what_is_sent(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """Kind and shape of what the devices send each other in a training step with the vocabulary of Qwen3."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": QWEN3_VOCABULARY, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    recipe = DrafterRecipe(
        target=str(folder), data=("-",), dtype="bfloat16", compute="bfloat16", remat=True, mask_token_id=151669, layers=1,
        target_layer_ids=(0,), block_size=4, length=16, rows_per_step=8, objective=Objective(anchors=4, chunk=4),
        train=TrainConfig(steps=10, mesh=text),
    )  # fmt: skip
    program = drafter_step(recipe, sharding.make_mesh(text)).as_text()
    assert program is not None
    found = re.findall(
        r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program
    )
    return {
        (kind, tuple(int(n) for n in dims.split(",") if n))
        for shapes, kind in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
    }


def nothing_of_the_vocabulary_is_gathered() -> None:
    text = "data=2,fsdp=2,tensor=2"
    sent = what_is_sent(text)
    parts = {QWEN3_VOCABULARY // n for n in (1, 2, 4, 8)}
    of_vocabulary = {(kind, shape) for kind, shape in sent if parts & set(shape)}
    # The head alone changes places, from columns to rows: an even exchange of half of what a device has of it.
    assert {kind for kind, _ in of_vocabulary} == {"all-to-all"}, of_vocabulary
    assert max(np.prod(shape) for _, shape in of_vocabulary) <= QWEN3_VOCABULARY * 32 // 8, of_vocabulary
    # And a layer's weights are gathered where they are used, not the rows that go through it.
    assert ("all-gather", (16, 32)) in sent, sent
    assert not any(kind == "all-gather" and np.prod(shape) >= 8 * 16 * 32 for kind, shape in sent), sent


if __name__ == "__main__":
    {
        "numbers": lambda: (the_tables(), a_trained_model(), experts(), limited_sampling()),
        "sent": nothing_of_the_vocabulary_is_gathered,
    }[sys.argv[1]]()
    print("equal")
