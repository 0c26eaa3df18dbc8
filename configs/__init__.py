"""TOML presets, one per published setting and per tiny one, and how a preset becomes the dataclass of a command."""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from dflax.errors import DflaxError

T = TypeVar("T")


def names() -> list[str]:
    """Names of all presets, sorted."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load(name: str) -> dict[str, Any]:
    """The values of a preset; DflaxError lists the names if there is none of this name."""
    if name not in names():
        raise DflaxError(f"there is no preset {name!r}; presets are {', '.join(names()) or '(none)'}")
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def published(model: str) -> dict[str, Any] | None:
    """The config.json of a model on the hub that a preset is for, as published: its shape, known without a network. Else None."""
    known = json.loads(resources.files(__name__).joinpath("models.json").read_text(encoding="utf-8"))
    found = known.get(model)
    return known[found] if isinstance(found, str) else found  # a string: the same shape as that model


def build(kind: type[T], values: Mapping[str, Any], where: str, missing: Any = dataclasses.MISSING) -> T:
    """A dataclass from a dictionary, every key and type checked.

    Args:
      kind: the dataclass; fields that are dataclasses themselves take tables.
      values: what a preset says; other fields keep their defaults.
      where: named in errors, such as "preset smollm2".
      missing: if given, other values are still to come: fields without a value or default get this, and __post_init__ checks nothing.

    Raises:
      DflaxError: naming the key, its value and what would be right.
    """
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind)) if field.init}
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in fields:
            raise DflaxError(f"{where}: unknown key {key!r}; keys are {', '.join(fields)}")
    given = {key: _convert(value, hints[key], f"{where}: {key}", missing) for key, value in values.items()}
    for name, field in fields.items():
        if name in given:
            continue
        if field.default is not dataclasses.MISSING:
            given[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            given[name] = field.default_factory()
        elif missing is dataclasses.MISSING:
            raise DflaxError(f"{where}: {name!r} is missing; it must be {_words(hints[name])}")
        else:
            given[name] = missing
    if missing is dataclasses.MISSING:
        return kind(**given)
    unchecked = object.__new__(kind)
    for name, value in given.items():
        object.__setattr__(unchecked, name, value)  # the dataclass is frozen
    return unchecked


def _convert(value: Any, hint: Any, where: str, missing: Any) -> Any:
    """`value` as the type `hint` wants it (TOML has lists, not tuples, and no paths)."""
    for choice in _choices(hint):
        origin, inner = typing.get_origin(choice), typing.get_args(choice)
        if choice is Any:
            return value
        if dataclasses.is_dataclass(choice) and isinstance(value, Mapping):
            return build(typing.cast(type, choice), value, where, missing)
        if origin is Literal and any(value == item and type(value) is type(item) for item in inner):
            return value
        if origin in (tuple, list) and isinstance(value, list | tuple):
            items = inner[:1] * len(value) if origin is list or inner[1:] == (...,) else inner
            if len(items) == len(value):
                return origin(
                    _convert(v, item, f"{where}[{i}]", missing)
                    for i, (v, item) in enumerate(zip(value, items, strict=True))
                )
        if choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if choice is Path and isinstance(value, str):
            return Path(value)
        if isinstance(choice, type) and isinstance(value, choice) and isinstance(value, bool) <= (choice is bool):
            return value
    raise DflaxError(f"{where} is {value!r}; it must be {_words(hint)}")


def _choices(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _words(hint: Any) -> str:
    """A type in words."""
    plain = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        Path: "a path",
        type(None): "left out",
    }
    parts = []
    for choice in _choices(hint):
        origin, inner = typing.get_origin(choice), typing.get_args(choice)
        if origin is Literal:
            parts += [repr(item) for item in inner]
        elif origin in (tuple, list):
            parts.append(f"a list ({', '.join(_words(item) for item in inner if item is not ...)})")
        elif dataclasses.is_dataclass(choice):
            parts.append(f"a table ({', '.join(field.name for field in dataclasses.fields(choice))})")
        else:
            parts.append(plain.get(choice, str(choice)))
    return " or ".join(parts)
