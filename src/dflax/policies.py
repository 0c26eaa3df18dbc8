"""Who gets committed in a step of `dflax.denoise`: the policies by name. What they are is told in `dflax.infer.policies`."""

from dflax.infer.policies import Credit, Factor, Frechet, Policy, Prophet, Schedule, Threshold

__all__ = ["Credit", "Factor", "Frechet", "Policy", "Prophet", "Schedule", "Threshold"]
