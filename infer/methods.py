"""Ways to denoise, as they are written on a command line, and sweeps of their numbers.

    plain                                   one token per step
    threshold:0.8,0.9                       two methods: values of the policy's one number
    credit:0.9:weight=0.5,0.7               further knobs by name; several lists give every combination
    tspd  tspd@0.3,0.5  tspd:FOLDER@0.5     a learned policy: ":" names its folder, "@" its numbers
    threshold:0.9+ce  tspd+ce:z=1,1.28      a look-ahead in front, with the constants of the folder
    threshold:0.9+ce:default                with those that were never fitted

A knob is a field of the policy or of the look-ahead. Two more stand for what has no single field: `schedule:2` writes two tokens per step,
`prophet:0.5` scales Prophet's three bounds. What a sweep has in common is its family: "threshold", "tspd+ce".
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from dflax import controllers
from dflax.errors import DflaxError
from dflax.infer.extrapolation import ConfidenceExtrapolation
from dflax.infer.policies import Policy, Schedule
from dflax.infer.policy_names import KNOB, LEARNED, POLICIES

MAIN = {**KNOB, "schedule": "tokens", "prophet": "scale"}
"""The knob that values without a name are of."""

FIXED = ("weights", "config", "rule")
"""Fields that the name of a policy settles."""


@dataclass(frozen=True)
class Method:
    """A policy, what stands in front of it, and what it is called in tables."""

    label: str
    family: str
    """What the methods of one sweep have in common."""
    policy: Policy
    ahead: ConfidenceExtrapolation | None = None
    tokens_per_step: int = 1
    """Of the schedule."""

    def steps(self, gen_length: int, block_length: int) -> int:
        """Of the schedule, for the whole answer."""
        return gen_length // block_length * -(-block_length // self.tokens_per_step)

    @property
    def identity(self) -> str:
        """Tells methods of one label apart whose weights or constants differ."""
        leaves, form = jax.tree.flatten((self.policy, self.ahead))
        told = hashlib.sha256(f"{form} {self.tokens_per_step}".encode())
        for leaf in leaves:
            told.update(np.asarray(leaf).tobytes())
        return told.hexdigest()[:16]


PLAIN = Method("plain", "plain", Schedule())


def parse(written: Sequence[str], home: str) -> list[Method]:
    """Plain decoding and the methods that are written, each label once.

    Args:
      home: folder or name where controllers, filters and constants are that no method names another folder for.

    Raises:
      DflaxError: naming the method and what is wrong with it.
    """
    found = {PLAIN.label: PLAIN}
    for one in written:
        found |= {method.label: method for method in _parse(one, home)}
    return list(found.values())


def _parse(written: str, home: str) -> Iterator[Method]:
    where = f"method {written!r}"
    parts = re.fullmatch(r"(?P<name>[^:@+]*)(?P<rest>.*?)(?P<ce>\+ce([:@].*)?)?", written, re.DOTALL)
    assert parts is not None  # every text has this form
    name, rest, ce = parts["name"], parts["rest"], parts["ce"]
    if name == "plain":
        if rest or ce:
            raise DflaxError(f"{where}: plain decoding takes nothing behind it; schedule:1+ce has a look-ahead")
        yield PLAIN
        return
    if name not in POLICIES | LEARNED:
        raise DflaxError(f"{where}: there is no policy {name!r}; there are plain, {', '.join(POLICIES | LEARNED)}")
    folder = ""
    if name in LEARNED and rest.startswith(":"):
        folder, at, numbers = rest[1:].partition("@")
        rest = at + numbers
        if not folder:
            raise DflaxError(
                f"{where}: behind the ':' of a learned policy comes its folder; its numbers come behind '@'"
            )
    try:
        policy = LEARNED[name].load(folder or home) if name in LEARNED else POLICIES[name]()
        knobs = _knobs(rest, name, MAIN.get(name), _values(policy, name))
        ahead, ahead_knobs, default = None, {}, False
        if ce is not None:
            if not policy.reads_confidence:
                raise DflaxError(f"a look-ahead acts by the confidence, which {name} does not read")
            bare = re.sub(r"[:@]default(?=[:@]|$)", "", ce.removeprefix("+ce"))
            default = f"+ce{bare}" != ce
            ahead = ConfidenceExtrapolation() if default else controllers.load_extrapolation(folder or home)
            ahead_knobs = _knobs(bare, "the look-ahead", None, dataclasses.asdict(ahead))
        base = name + (f":{folder}" if folder else "")
        look = "" if ce is None else "+ce:default" if default else "+ce"
        for values, ahead_values in itertools.product(_combinations(knobs), list(_combinations(ahead_knobs))):
            label = base + _written(values, MAIN.get(name), "@" if name in LEARNED else ":")
            yield _method(
                label + look + _written(ahead_values, None, ":"), base + look, policy, ahead, values, ahead_values
            )
    except DflaxError as error:
        raise DflaxError(f"{where}: {error}") from error


def _method(
    label: str, family: str, policy: Any, ahead: ConfidenceExtrapolation | None, values: Mapping[str, Any],
    ahead_values: Mapping[str, Any],
) -> Method:  # fmt: skip
    tokens, scale = values.get("tokens", 1), values.get("scale", 1.0)
    if tokens < 1:
        raise DflaxError(f"tokens is {tokens}; it must be at least 1")
    policy = replace(policy, **{name: value for name, value in values.items() if name not in ("tokens", "scale")})
    if scale != 1:
        policy = replace(policy, **{name: getattr(policy, name) * scale for name in ("early", "middle", "late")})
    policy.check()
    if ahead is not None:
        ahead = replace(ahead, **ahead_values)
        ahead.check()
    return Method(label, family, policy, ahead, tokens)


def _values(policy: Any, name: str) -> dict[str, Any]:
    """The knobs of a policy with what they are set to."""
    fields = [field.name for field in dataclasses.fields(policy) if field.name not in FIXED]
    ours = {"schedule": {"tokens": 1}, "prophet": {"scale": 1.0}}.get(name, {})
    return {field: getattr(policy, field) for field in fields} | ours


def _knobs(written: str, owner: str, main: str | None, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """ ":0.8,0.9:weight=0.7" -> the values of every knob that is named, and of the main one in any case."""
    found: dict[str, list[Any]] = {} if main is None else {main: [values[main]]}
    seen = set()
    for part in re.split("[:@]", written)[1:]:
        knob, equals, listed = part.rpartition("=")
        knob = knob if equals else main
        if knob is None:
            raise DflaxError(f"{part!r} belongs to no knob; write one of {', '.join(values)} before it, as in z=1.28")
        if knob not in values:
            raise DflaxError(f"{owner} has no knob {knob!r}; it has {', '.join(values)}")
        if knob in seen:
            raise DflaxError(f"{knob} is given twice; list its values with commas")
        seen.add(knob)
        found[knob] = [_value(knob, text, values[knob]) for text in listed.split(",")]
    return found


def _value(knob: str, text: str, like: Any) -> Any:
    """`text` as a value of the same kind."""
    if isinstance(like, str):
        return text
    if isinstance(like, bool):
        if text not in ("true", "false"):
            raise DflaxError(f"{knob} is {text!r}; it must be true or false")
        return text == "true"
    try:
        return type(like)(text)
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise DflaxError(f"{knob} is {text!r}; it must be {kind}, or several with commas between them") from None


def _combinations(knobs: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values()))


def _written(values: Mapping[str, Any], main: str | None, before: str) -> str:
    """As a method is written."""
    text = lambda value: str(value).lower() if isinstance(value, bool | str) else f"{value:g}"
    return "".join(before + ("" if knob == main else f"{knob}=") + text(value) for knob, value in values.items())
