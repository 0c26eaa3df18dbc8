"""Every model of the mission by its published config and tensor table: an abstract load fills every parameter, with nothing left over."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from dflax import configs, families
from dflax.checkpoint import match
from dflax.errors import DflaxError
from dflax.models import decoder, drafter, params
from golden import GOLDENS

FILES = sorted((GOLDENS.parent / "fixtures" / "official").glob("*.json"))


def expand(table: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """{"layers.{0..1}.w": [2]} -> {"layers.0.w": (2,), "layers.1.w": (2,)}."""
    out = {}
    for pattern, shape in table.items():
        parts = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
        ranges = [range(int(a), int(b) + 1) for a, b in zip(parts[1::3], parts[2::3], strict=True)]
        for numbers in itertools.product(*ranges):
            pieces = itertools.zip_longest(parts[::3], map(str, numbers), fillvalue="")
            out["".join(itertools.chain(*pieces))] = tuple(shape)
    return out


class Table:
    """A source that knows shapes only."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes

    def names(self) -> list[str]:
        return sorted(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        raise AssertionError("an abstract load reads no weights")

    def close(self) -> None:
        pass


@pytest.fixture(params=FILES, ids=lambda path: path.stem, scope="module")
def model(request):
    official = json.loads(request.param.read_text())
    return official, expand(official["tensors"])


@pytest.fixture(scope="module")
def parameters(model):
    """Rules, and shapes of the abstract module's parameters (built once per model: it takes seconds)."""
    raw = configs.published(model[0]["model"])
    if families.is_drafter(raw):
        config = families.parse_drafter(raw)
        module = params.abstract(lambda rngs: drafter.Drafter(config, rngs=rngs))
    else:
        config = families.parse(raw)
        module = params.abstract(lambda rngs: decoder.Decoder(config, rngs=rngs))
    return {path: leaf.shape for path, leaf in params.flatten(module).items()}, families.tensor_rules(config)


def test_the_fixture_has_the_published_totals(model):
    official, table = model
    assert len(table) == official["tensors_in_file"]
    assert sum(map(math.prod, table.values())) == official["parameters_in_file"]


def test_an_abstract_load_fills_every_parameter(model, parameters):
    official, table = model
    shapes, rules = parameters
    places = match(shapes, rules, Table(table))
    assert places.keys() == shapes.keys()
    assert sorted(itertools.chain(*places.values())) == sorted(table)  # each tensor is used, and once
    assert sum(map(math.prod, shapes.values())) == official["parameters_in_file"]


def test_one_tensor_less_or_more_or_turned_is_an_error(model, parameters):
    table = model[1]
    name = next(n for n, shape in table.items() if ".1." in n and len(shape) == 2 and shape[0] != shape[1])
    less = {n: shape for n, shape in table.items() if n != name}
    with pytest.raises(DflaxError, match=f"missing {re.escape(name)}"):
        match(*parameters, Table(less))
    with pytest.raises(DflaxError, match=r"unexpected layers\.0\.extra$"):
        match(*parameters, Table(table | {"layers.0.extra": (1,)}))
    with pytest.raises(DflaxError, match=f"{re.escape(name)} has shape"):
        match(*parameters, Table(table | {name: table[name][::-1]}))


def test_the_config_survives_the_way_out_and_back(model):
    raw = configs.published(model[0]["model"])
    parse = families.parse_drafter if families.is_drafter(raw) else families.parse
    out = families.to_hf(parse(raw))
    assert parse(out) == parse(raw)
    # PyTorch code that the official folder holds beside the weights, ours names by its repository.
    places = {name: place.partition("--") for name, place in out.get("auto_map", {}).items()}
    assert {name: module for name, (_, _, module) in places.items()} == raw.get("auto_map", {})
    assert all(configs.published(home) for home, _, _ in places.values())
