"""Who gets committed in a step of `dflax.denoise`: the policies by name. What they are is told in `dflax.infer.policies`."""

from dflax.infer.learned import TSPD, Learn2PD
from dflax.infer.policies import Credit, Factor, Frechet, Policy, Prophet, Schedule, Threshold

__all__ = ["TSPD", "Credit", "Factor", "Frechet", "Learn2PD", "Policy", "Prophet", "Schedule", "Threshold"]
