"""Policies by the names that command lines use, the number of each that is tuned, and how a policy is made from both."""

from typing import Literal

from dflax import policies
from dflax.errors import DflaxError

POLICIES = {
    "schedule": policies.Schedule,
    "random": lambda: policies.Schedule("random"),
    "entropy": lambda **kw: policies.Schedule("entropy", **kw),
    "maskgit_plus": lambda **kw: policies.Schedule("maskgit_plus", **kw),
    "topk_margin": lambda **kw: policies.Schedule("topk_margin", **kw),
    "origin": lambda: policies.Schedule("origin"),
    "threshold": policies.Threshold,
    "factor": policies.Factor,
    "frechet": policies.Frechet,
    "credit": policies.Credit,
    "prophet": policies.Prophet,
}
"""By the name used on the command line; "tspd" and "learn2pd" come from a folder."""

LEARNED = {"tspd": policies.TSPD, "learn2pd": policies.Learn2PD}

KNOB = {
    "threshold": "threshold", "credit": "threshold", "factor": "factor", "frechet": "margin", "entropy": "alg_temp",
    "maskgit_plus": "alg_temp", "topk_margin": "alg_temp", "tspd": "threshold", "learn2pd": "threshold",
}  # fmt: skip
"""What --value sets, where a policy has one number that is tuned."""

PolicyName = Literal[
    "schedule", "random", "entropy", "maskgit_plus", "topk_margin", "origin", "threshold", "factor", "frechet", "credit",
    "prophet", "tspd", "learn2pd",
]  # fmt: skip


def build_policy(name: str, value: float | None = None, controller: str | None = None) -> policies.Policy:
    """A policy by its name on the command line, with its one number and, if it is learned, where its weights are."""
    if value is not None and name not in KNOB:
        raise DflaxError(f"policy {name} has no number to tune; --value is for {', '.join(KNOB)}")
    if (name in LEARNED) != (controller is not None):
        raise DflaxError(
            f"policy {name} needs --controller, a folder of trained weights"
            if name in LEARNED
            else f"policy {name} is not learned; --controller is for {', '.join(LEARNED)}"
        )
    knob = {} if value is None else {KNOB[name]: value}
    return LEARNED[name].load(controller, **knob) if name in LEARNED else POLICIES[name](**knob)
