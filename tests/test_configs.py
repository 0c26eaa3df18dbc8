"""Presets: what is there, and how wrong ones are refused."""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from dflax import cli, configs
from dflax.errors import DflaxError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    labels: Literal["hard", "soft"] = "hard"


@dataclass(frozen=True)
class Outer:
    target: str
    layers: int = 2
    taps: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    limit: int | None = None
    out: Path = Path("runs")
    soft: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.target == "":
            raise DflaxError("target is empty")


DATA = {"data": ["mine.jsonl"]}
PRESETS = {
    "arith": ("train language", {}),
    "arith-dflash": ("train drafter", {}),
    "llama-3.1-8b-dflash": ("train drafter", DATA),
    "qwen3-4b-dflash": ("train drafter", DATA),
    "qwen3-8b-dflash": ("train drafter", DATA),
    "qwen3-coder-30b-a3b-dflash": ("train drafter", DATA),
    "smollm2-135m-dflash": ("train drafter", DATA),
    "arith-ablations": ("train ablations", {}),
    "arith-llada": ("train diffusion", {}),
    "dream-7b-sft": ("train diffusion", DATA),
    "llada-8b-sft": ("train diffusion", DATA),
    "llada-moe-sft": ("train diffusion", DATA),
    "arith-llada-controller": ("train controller", {}),
    "dream-7b-controller": ("train controller", DATA),
    "llada-8b-controller": ("train controller", DATA),
    "llada-moe-controller": ("train controller", DATA),
    "arith-llada-ablations": ("train controller-ablations", {}),
    "arith-llada-bench": ("bench diffusion", {}),
    "arith-llada-choices": ("bench diffusion", {}),
    "arith-llada-speed": ("bench diffusion", {}),
    "dream-7b-bench": ("bench diffusion", {}),
    "llada-8b-bench": ("bench diffusion", {}),
    "llada-moe-bench": ("bench diffusion", {}),
}
"""The command that takes a preset, and what its user has to say besides."""


def test_every_preset_has_its_command():
    assert sorted(PRESETS) == configs.names()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_what_its_command_takes(name):
    command, given = PRESETS[name]
    known = cli.COMMANDS[command]
    assert known.presets
    kind = getattr(importlib.import_module(known.module), known.config)
    values = configs.load(name)
    configs.build(kind, given | values, f"preset {name}")
    if given:  # the preset leaves it to the user, who is told
        with pytest.raises(DflaxError, match="data"):
            configs.build(kind, values, f"preset {name}")
    misspelt = {f"{key}x": value for key, value in list(values.items())[:1]}
    with pytest.raises(DflaxError, match="unknown key"):
        configs.build(kind, given | values | misspelt, f"preset {name}")


def test_unknown_preset():
    with pytest.raises(DflaxError, match=r"no preset 'nonsense'; presets are .*"):
        configs.load("nonsense")


def test_build_converts_what_toml_cannot_say():
    values = {"target": "t", "taps": [1, 2], "pair": [3, "b"], "out": "x/y", "inner": {"rate": 1, "labels": "soft"}}
    built = configs.build(Outer, values, "preset p")
    assert built == Outer("t", taps=(1, 2), pair=(3, "b"), out=Path("x/y"), inner=Inner(1.0, "soft"))
    assert type(built.inner.rate) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": "t", "layer": 3}, r"preset p: unknown key 'layer'; keys are target, layers, "),
        ({"target": "t", "inner": {"rat": 3}}, r"preset p: inner: unknown key 'rat'; keys are rate, labels$"),
        ({"target": "t", "layers": "3"}, r"preset p: layers is '3'; it must be a whole number$"),
        ({"target": "t", "layers": 3.0}, r"layers is 3.0; it must be a whole number$"),
        ({"target": "t", "layers": True}, r"layers is True; it must be a whole number$"),
        ({"target": "t", "soft": 1}, r"soft is 1; it must be true or false$"),
        ({"target": "t", "limit": "no"}, r"limit is 'no'; it must be a whole number or left out$"),
        ({"target": "t", "taps": [1, "x"]}, r"taps\[1\] is 'x'; it must be a whole number$"),
        ({"target": "t", "pair": [1]}, r"pair is \[1\]; it must be a list \(a whole number, text\)$"),
        ({"target": "t", "inner": {"labels": "kl"}}, r"inner: labels is 'kl'; it must be 'hard' or 'soft'$"),
        ({"target": "t", "inner": 3}, r"inner is 3; it must be a table \(rate, labels\)$"),
        ({"layers": 3}, r"preset p: 'target' is missing; it must be text$"),
        ({"target": ""}, r"target is empty"),
    ],
)
def test_build_refuses(values, message):
    with pytest.raises(DflaxError, match=message):
        configs.build(Outer, values, "preset p")


def test_what_flags_may_still_fill_in_is_not_checked_yet():
    marker = object()
    built = configs.build(Outer, {"layers": 3}, "preset p", missing=marker)
    assert (built.target, built.layers, built.inner) == (marker, 3, Inner())
    assert configs.build(Outer, {"target": ""}, "preset p", missing=marker).target == ""
