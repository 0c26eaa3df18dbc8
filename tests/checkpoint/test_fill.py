"""From a source to device arrays: values, dtypes, shardings, the parts that are read, and every misfit in one error."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dflax.checkpoint import fill, named
from dflax.errors import DflaxError
from dflax.families import TensorRule

RULES = {
    "embed.weight": TensorRule(("model.embed.weight",)),
    "experts.up.weight": TensorRule(tuple(f"model.experts.{e}.up.weight" for e in range(4)), stacked=True),
}
SHAPES = {"embed.weight": (8, 6), "experts.up.weight": (4, 3, 2)}


class Memory:
    """A source over a dictionary that notes what was asked for."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        part = self.tensors[name][index]
        self.asked.append((name, part.shape))
        return part

    def close(self) -> None:
        pass


@pytest.fixture
def tensors():
    rng = np.random.default_rng(1)
    out = {"model.embed.weight": rng.standard_normal((8, 6)).astype(np.float32)}
    return out | {f"model.experts.{e}.up.weight": rng.standard_normal((3, 2)).astype(np.float32) for e in range(4)}


def stacked(tensors):
    return np.stack([tensors[name] for name in RULES["experts.up.weight"].names])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_and_dtype(tensors, dtype, stored):
    tensors = {name: t.astype(stored) for name, t in tensors.items()}
    leaves = fill(SHAPES, RULES, Memory(tensors), dtype)
    assert {k: v.shape for k, v in leaves.items()} == SHAPES
    assert all(leaf.dtype == dtype for leaf in leaves.values())
    np.testing.assert_array_equal(leaves["embed.weight"], tensors["model.embed.weight"].astype(dtype))
    np.testing.assert_array_equal(leaves["experts.up.weight"], stacked(tensors).astype(dtype))


def test_named_is_the_way_back(tensors):
    back = named(fill(SHAPES, RULES, Memory(tensors)), RULES)
    assert back.keys() == tensors.keys()
    for name in tensors:
        np.testing.assert_array_equal(back[name], tensors[name])


def test_sharded_leaves_equal_whole_ones(tensors):
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    leaves = fill(SHAPES, RULES, Memory(tensors), sharding=lambda path: NamedSharding(mesh, PartitionSpec("fsdp")))
    np.testing.assert_array_equal(leaves["embed.weight"], tensors["model.embed.weight"])
    np.testing.assert_array_equal(leaves["experts.up.weight"], stacked(tensors))
    assert leaves["embed.weight"].sharding.spec == PartitionSpec("fsdp")


def test_a_shard_reads_only_its_part(tensors, monkeypatch):
    """What a device of four would ask for, without four devices: the callback is called with its slice."""
    source = Memory(tensors)
    rows = slice(2, 4)
    made = {}

    def only_third_device(shape, sharding, callback):
        made[shape] = callback((rows, *(slice(None) for _ in shape[1:])))
        return jax.numpy.zeros(shape)

    monkeypatch.setattr(jax, "make_array_from_callback", only_third_device)
    fill(SHAPES, RULES, source, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(made[8, 6], tensors["model.embed.weight"][rows])
    np.testing.assert_array_equal(made[4, 3, 2], stacked(tensors)[rows])
    wanted = [
        ("model.embed.weight", (2, 6)),
        ("model.experts.2.up.weight", (3, 2)),
        ("model.experts.3.up.weight", (3, 2)),
    ]
    assert source.asked == wanted


def test_prefix_may_be_there_or_not(tensors):
    bare = {name.removeprefix("model."): t for name, t in tensors.items()}
    np.testing.assert_array_equal(fill(SHAPES, RULES, Memory(bare))["embed.weight"], bare["embed.weight"])
    rules = {"embed.weight": TensorRule(("embed.weight",))}
    prefixed = {"model.embed.weight": tensors["model.embed.weight"]}
    fill({"embed.weight": (8, 6)}, rules, Memory(prefixed))


def test_every_misfit_is_in_one_error(tensors):
    tensors["model.embedding.weight"] = tensors.pop("model.embed.weight")
    tensors["surplus"] = np.zeros(1, np.float32)
    tensors["model.experts.1.up.weight"] = np.zeros((2, 3), np.float32)
    del tensors["model.experts.3.up.weight"]
    with pytest.raises(DflaxError) as caught:
        fill(SHAPES, RULES, Memory(tensors))
    text = str(caught.value)
    assert "missing model.embed.weight, model.experts.3.up.weight (is it model.embedding.weight?)" in text
    assert "unexpected model.embedding.weight, surplus" in text
    assert "model.experts.1.up.weight has shape [2, 3], the config asks for [3, 2]" in text
    assert "\n" not in text


def test_ignored_tensors_may_be_there(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    tensors["lm_head.weight"] = np.zeros(2, np.float32)
    with pytest.raises(DflaxError, match=r"unexpected lm_head\.weight$"):
        fill(SHAPES, RULES, Memory(tensors))
    fill(SHAPES, RULES, Memory(tensors), ignore=("lm_head.weight",))


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tensors, kind, value):
    tensors = {name: t.astype(kind) for name, t in tensors.items()}
    tensors["model.experts.2.up.weight"][0, 1] = value
    with pytest.raises(DflaxError, match=r"not finite .* in model\.experts\.2\.up\.weight;"):
        fill(SHAPES, RULES, Memory(tensors))
    fill(SHAPES, RULES, Memory(tensors), check_finite=False)


def test_parameter_without_a_rule_is_named(tensors):
    with pytest.raises(DflaxError, match=r"no tensor name is known for the parameters other\.weight"):
        fill({"other.weight": (1,)}, RULES, Memory(tensors))


def test_integers_are_no_weights(tensors):
    tensors["model.embed.weight"] = np.zeros((8, 6), np.int64)
    with pytest.raises(DflaxError, match=r"model\.embed\.weight holds int64"):
        fill(SHAPES, RULES, Memory(tensors))
