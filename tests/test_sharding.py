"""Meshes from text, specs from the table, and training on several devices."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from dflax import sharding
from dflax.errors import DflaxError

TRAIN_ON_EIGHT = """
import contextlib, io, tempfile
import jax, jax.numpy as jnp, numpy as np
from dflax import sharding
from dflax.train.trainer import TrainConfig, fit

class Data:
    steps_per_epoch = 10
    def batch_at(self, step):
        return {"x": np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32), "shift": np.float32(0.1)}

def loss_fn(params, batch, key, frozen):
    y = jnp.tanh(batch["x"] @ params["a"]) @ params["b"] + batch["shift"]
    return jnp.mean((y - batch["x"] @ frozen["target"]) ** 2), {}

r = np.random.default_rng(0)
params = {"a": r.normal(size=(8, 12)).astype(np.float32), "b": r.normal(size=(12, 6)).astype(np.float32)}
frozen = {"target": r.normal(size=(8, 6)).astype(np.float32)}

def run(text, steps, out, **options):
    config = TrainConfig(steps=steps, schedule="constant", warmup_fraction=0.0, learning_rate=0.01, mesh=text, out=out)
    return fit(params, loss_fn, Data(), config, frozen=frozen, **options)

class Lazy:  # rows that are read where they are asked for: each device's own
    shape, dtype, ndim, asked = (16, 3), np.dtype(np.float32), 2, []
    def __getitem__(self, at):
        self.asked.append(at[0])
        return np.arange(48, dtype=np.float32).reshape(16, 3)[at]

placed = sharding.place_batch({"x": Lazy()}, sharding.make_mesh("data=2,fsdp=4"))["x"]
assert np.asarray(placed)[:, 1].tolist() == list(range(1, 48, 3))
assert {rows.stop - rows.start for rows in Lazy.asked} == {2}, Lazy.asked

one = run("", 6, tempfile.mkdtemp())
with contextlib.redirect_stderr(io.StringIO()) as said:  # parts of four rows on eight devices
    parts = TrainConfig(steps=2, schedule="constant", accumulation=4, mesh="data=2,fsdp=4", out=tempfile.mkdtemp())
    fit(params, loss_fn, Data(), parts, frozen=frozen)
assert said.getvalue().count("batch of size 4 is replicated: data*fsdp = 8 does not divide it") == 1, said.getvalue()
folder = tempfile.mkdtemp()
run("data=2,fsdp=4", 3, folder)
many = run("data=2,fsdp=4", 6, folder)  # restored onto the mesh
fewer = sharding.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
named = {"a": ("embed", "feed_forward"), "b": ("feed_forward", "embed")}
few = run("data=2,fsdp=4", 9, folder, mesh=fewer, axes=named)  # a checkpoint of eight devices on four, otherwise cut
assert few["a"].addressable_shards[0].data.shape == (4, 6), few["a"].sharding
assert few["b"].addressable_shards[0].data.shape == (6, 3), few["b"].sharding
nine = run("", 9, tempfile.mkdtemp())
assert len(many["a"].sharding.device_set) == 8, many["a"].sharding
assert many["a"].addressable_shards[0].data.shape == (8, 3), many["a"].sharding
for k in one:
    np.testing.assert_allclose(one[k], many[k], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nine[k], few[k], rtol=1e-5, atol=1e-6)
print("equal")
"""


def mesh_of(**sizes):
    """A mesh of these sizes without devices, which is all that specs look at."""
    full = {name: sizes.get(name, 1) for name in sharding.MESH_AXES}
    return jax.sharding.AbstractMesh(tuple(full.values()), tuple(full))


def test_empty_text_is_one_device():
    mesh = sharding.make_mesh("")
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sharding.make_mesh("data=-1").size == len(jax.devices())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "unknown axis 'model'"),
        ("data", "data=NUMBER"),
        ("data=0", "positive"),
        ("data=3,fsdp=5", "does not make"),
    ],
)
def test_impossible_meshes(text, message):
    with pytest.raises(DflaxError, match=message):
        sharding.make_mesh(text)


def test_axes_that_do_not_divide_are_replicated_and_reported():
    mesh = mesh_of(fsdp=4, tensor=2)
    assert sharding.spec(("vocab", "embed"), (10, 8), mesh) == (PartitionSpec("tensor", "fsdp"), [])
    found, report = sharding.spec(("vocab", "embed"), (9, 8), mesh)
    assert found == PartitionSpec(None, "fsdp")
    assert report == ["vocab of size 9 is replicated: tensor = 2 does not divide it"]
    assert sharding.spec(("batch", None), (8, 3), mesh_of(data=2, fsdp=4))[0] == PartitionSpec(("data", "fsdp"), None)
    assert sharding.fsdp_spec((6, 8), mesh) == (PartitionSpec(None, "fsdp"), [])
    assert sharding.fsdp_spec((5, 7), mesh)[1]
    with pytest.raises(DflaxError, match="unknown logical axis 'width'"):
        sharding.spec(("width",), (4,), mesh)


def test_the_rows_of_a_batch_are_cut_or_that_they_are_not_is_said():
    assert sharding.batch_spec((8, 3), mesh_of(data=2, fsdp=4)) == (PartitionSpec(("data", "fsdp"), None), [])
    assert sharding.batch_spec((), mesh_of(data=2)) == (PartitionSpec(), [])
    found, report = sharding.batch_spec((32, 3), mesh_of(fsdp=64))
    assert found == PartitionSpec(None, None)
    assert report == ["batch of size 32 is replicated: fsdp = 64 does not divide it"]


def test_heads_and_rows_that_a_mesh_does_not_divide_are_said(caplog):
    """The projections have features enough to be cut through half heads, so their shapes do not tell."""
    shapes = {"layers.0.self_attn.k_proj.weight": (8 * 128, 4096), "norm.weight": (4096,)}
    assert sharding.not_cut(mesh_of(fsdp=2, tensor=8), shapes, kv_heads=8) == []
    said = "kv_heads of size 8 is replicated: tensor = 16 does not divide it; every device has the whole cache"
    assert [line.startswith(said) for line in sharding.not_cut(mesh_of(tensor=16), shapes, kv_heads=8)] == [True]
    for rows in (6, 7, 7):
        sharding.report_rows(rows, mesh_of(data=2))
    sharding.report_rows(7, None)
    assert caplog.messages == ["mesh: batch of size 7 is replicated: data = 2 does not divide it"]


def test_training_on_eight_devices_equals_one():
    command = [sys.executable, "-c", TRAIN_ON_EIGHT]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
