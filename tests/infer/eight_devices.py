"""Run by test_mesh.py in a process with eight CPU devices: what every mesh writes, and where weights and caches lie, as JSON."""

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import dflax
from dflax.infer.collectives import collectives
from dflax.infer.diffuse import prepare
from dflax.infer.generate import _session

MESHES = {"": 1, "tensor=2": 2, "data=2,fsdp=2,tensor=2": 8}
UNEVEN = "data=2,tensor=4"  # divides neither three rows nor two key/value heads
MODELS = ("target", "drafter", "diffusion", "mixture", "dream")
PROMPTS = [[1, 2, 3], [4, 5], [5, 1, 2, 3, 4, 5, 1], [2]]
NEW = 12


def on(folder: str, mesh: str) -> dflax.Model:
    devices = jax.devices()[: MESHES.get(mesh)]
    return dflax.load(folder, mesh=dflax.make_mesh(mesh, devices) if mesh else None)


def share(arrays: list[jax.Array]) -> float:
    """The largest part of these arrays' bytes that one device holds."""
    held: dict[jax.Device, int] = {}
    for array in arrays:
        for piece in array.addressable_shards:
            held[piece.device] = held.get(piece.device, 0) + piece.data.nbytes
    return max(held.values()) / sum(array.nbytes for array in arrays)


def sum_over_two() -> dict[str, tuple[int, int]]:
    """What `dflax compile` counts in a program that must add up the parts of two devices."""
    mesh = dflax.make_mesh("tensor=2", jax.devices()[:2])
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "tensor"), ()))
    x = jax.ShapeDtypeStruct((4, 64), np.float32, sharding=cut)
    text = jax.jit(lambda x: x.sum(1), out_shardings=whole).lower(x).compile().as_text()
    assert text is not None
    return collectives(text)


def sums_in_loops() -> dict[str, tuple[int, int]]:
    """The same where three passes over five layers are compiled as loops, and a further loop ends when it likes."""
    mesh = dflax.make_mesh("tensor=2", jax.devices()[:2])
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, None, "tensor"), ()))

    def passes(weights, x, turns):
        layer = lambda x, w: (jax.numpy.tanh(x @ w) @ w.T, None)
        x = jax.lax.scan(lambda x, _: (jax.lax.scan(layer, x, weights)[0], None), x, None, length=3)[0]
        more = lambda carry: (carry[0] + 1, layer(carry[1], weights[0])[0])
        return jax.lax.while_loop(lambda carry: carry[0] < turns, more, (0, x))[1]

    shapes = [((5, 8, 6), np.float32, cut), ((4, 8), np.float32, whole), ((), np.int32, whole)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype, place in shapes]
    text = jax.jit(passes, out_shardings=whole).lower(*arguments).compile().as_text()
    assert text is not None
    return collectives(text)


def on_uneven(folder: str) -> dict[str, Any]:
    """What is replicated is said (by the log), and changes nothing."""
    target, prompts = on(folder, UNEVEN), PROMPTS[:3]
    session = _session(target, None, prompts, NEW, 0.0, None, None, 0, [], None, None)
    session.prefill()
    cache = session.state.cache
    return {
        "plain": dflax.generate(target, prompts, NEW, temperature=[0.0, 0.0, 0.8]).tokens,
        "cache": share([cache.k, cache.v]),
    }


def main(folder: str) -> None:
    found: dict[str, Any] = {"collectives": sum_over_two(), "in loops": sums_in_loops()}
    for mesh in MESHES:
        target, drafter, diffusion, mixture, dream = (on(f"{folder}/{name}", mesh) for name in MODELS)
        out = dflax.speculate(target, drafter, PROMPTS, NEW, temperature=[0.0, 0.0, 0.8, 0.8])
        answers = dflax.denoise(diffusion, PROMPTS, gen_length=16, block_length=8, cache="dual")
        session = _session(target, drafter, PROMPTS, NEW, 0.0, None, None, 0, [], None, None)
        session.prefill()
        session.advance(drafter.config.block_size, 2)
        canvas = prepare(diffusion, PROMPTS, gen_length=16, block_length=8, cache="dual")
        canvas.advance(2)
        cache, draft_cache, canvas_cache = session.state.cache, session.state.draft_cache, canvas.state.cache
        found[mesh] = {
            "fingerprint": target.fingerprint,
            "tokens": out.tokens,
            "plain": dflax.generate(target, PROMPTS, NEW, temperature=[0.0, 0.0, 0.8, 0.8]).tokens,
            "lengths": out.acceptance_lengths,
            "answers": answers.tokens,
            "nfe": answers.nfe,
            "weights": share([leaf for leaf in target.leaves if leaf.ndim > 1]),
            "cache": share([cache.k, cache.v]),
            "draft cache": share([draft_cache.k, draft_cache.v]),
            "canvas": share([canvas_cache.k, canvas_cache.v]),
        }
        if mesh != "tensor=2":
            found[mesh]["mixture"] = dflax.generate(mixture, PROMPTS, NEW).tokens
            found[mesh]["dream"] = dflax.denoise(dream, PROMPTS, gen_length=16, block_length=8, cache="dual").tokens
    found["uneven"] = on_uneven(f"{folder}/target")
    json.dump(found, sys.stdout, default=np.ndarray.tolist)


if __name__ == "__main__":
    main(*sys.argv[1:])
