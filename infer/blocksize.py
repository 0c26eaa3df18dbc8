"""Which block size to run next, when the user asks for "auto": pure functions on the host, between calls of the compiled loop.

A larger block may commit more tokens a round and costs more a round. The DFlash paper (arXiv 2602.06036) shows that a
drafter works well at block sizes below the one it was trained with, and suggests dynamic block-size scheduling: smaller
blocks where verification is bound by compute or drafts are poor. The rule here maximises tokens per second:

    (1 + sum_{i < K} S_i) / cost(K)        S_i = P(drafts 1 .. i of a block are all accepted), cost = seconds a round
    takes
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul


@dataclass(frozen=True)
class Scheduler:
    """Chooses among compiled block sizes from what earlier rounds did. `observe` returns a new scheduler; nothing is mutated.

    Acceptance is kept by slot as P(draft i accepted | draft i - 1 accepted), whose running products are S_i. Evidence
    fades by half every `half_life` rounds, and each slot leans on the slot before it with the weight of
    `prior_rounds` rounds. So slots beyond the size in use are extrapolated geometrically: first from their own last
    estimate, and as that fades from the slots in use.
    """

    sizes: tuple[int, ...]
    """Block sizes K that are compiled (anchor and K - 1 drafts), ascending."""
    prior: float = 0.7
    """P(draft accepted | the one before accepted) before anything was seen."""
    prior_rounds: float = 4.0
    """How many rounds the expectation of a slot weighs against what was seen there."""
    half_life: float = 256.0
    """Rounds (of one response each) after which what was seen weighs half; the rounds of one observation weigh alike."""
    cost_memory: float = 0.5
    """Weight of the old cost when a size is timed again."""
    hysteresis: float = 0.03
    """By how much another size must promise to be faster than the one in use."""
    current: int | None = None
    """The size observed last."""
    seconds: tuple[float | None, ...] = ()
    """Seconds a round takes at each size; None where never timed."""
    reached: tuple[float, ...] = ()
    """Per slot 1 .. max(sizes) - 1: faded count of rounds whose drafts before the slot were all accepted."""
    accepted: tuple[float, ...] = ()
    """Per slot: faded count of those rounds that accepted the slot too."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes is {self.sizes}: give ascending block sizes of at least 1")
        if not (0 < self.prior < 1 and self.prior_rounds > 0 and self.half_life > 0):
            raise ValueError("prior must lie between 0 and 1, prior_rounds and half_life above 0")
        if not (0 <= self.cost_memory < 1 and self.hysteresis >= 0):
            raise ValueError("cost_memory must be at least 0 and below 1, hysteresis at least 0")
        slots = self.sizes[-1] - 1
        for name, empty in (
            ("seconds", (None,) * len(self.sizes)),
            ("reached", (0.0,) * slots),
            ("accepted", (0.0,) * slots),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, empty)  # the frozen dataclass is still being built

    def observe(self, size: int, acceptance_lengths: Sequence[int], seconds: float) -> "Scheduler":
        """What a run at one size showed.

        Args:
          size: block size used, one of `sizes`. acceptance_lengths: tokens each round of each response committed, 1
          .. size, not cut at a stop token or budget. seconds: seconds per round, compilation left out.

        Raises:
          ValueError: an unknown size, a length outside 1 .. size, or a time that is not above 0.
        """
        if size not in self.sizes:
            raise ValueError(f"block size {size} is not one of {self.sizes}")
        if any(not 1 <= length <= size for length in acceptance_lengths):
            raise ValueError(f"acceptance lengths at block size {size} must lie in 1 .. {size}")
        if not seconds > 0:
            raise ValueError(f"seconds per round is {seconds}: it must be above 0")
        fade = 0.5 ** (len(acceptance_lengths) / self.half_life)
        reached, accepted = [fade * count for count in self.reached], [fade * count for count in self.accepted]
        for slot in range(1, size):
            reached[slot - 1] += sum(length >= slot for length in acceptance_lengths)
            accepted[slot - 1] += sum(length > slot for length in acceptance_lengths)
        at = self.sizes.index(size)
        old = self.seconds[at]
        timed = seconds if old is None else self.cost_memory * old + (1 - self.cost_memory) * seconds
        return replace(
            self,
            current=size,
            seconds=(*self.seconds[:at], timed, *self.seconds[at + 1 :]),
            reached=tuple(reached),
            accepted=tuple(accepted),
        )

    def survival(self) -> tuple[float, ...]:
        """S_1 .. S_{max(sizes) - 1}: how probably a block's first i drafts are all accepted."""
        conditional, expected = [], self.prior
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            expected = (accepted + self.prior_rounds * expected) / (reached + self.prior_rounds)
            conditional.append(expected)
        return tuple(accumulate(conditional, mul))

    def speed(self, size: int) -> float | None:
        """Expected tokens per second and response at a size; None if it was never timed."""
        seconds = self.seconds[self.sizes.index(size)]
        return None if seconds is None else (1 + sum(self.survival()[: size - 1])) / seconds

    def choose(self) -> int:
        """The size to run next: each size once, the largest first (it shows the most slots), then the fastest one.

        The size in use is kept unless another promises more than `hysteresis` above it.
        """
        speeds = {size: self.speed(size) for size in self.sizes}
        untimed = [size for size, speed in speeds.items() if speed is None]
        if untimed:
            return untimed[-1]
        known = {size: speed for size, speed in speeds.items() if speed is not None}
        best = max(known, key=known.__getitem__)
        if self.current is not None and known[best] <= (1 + self.hysteresis) * known[self.current]:
            return self.current
        return best
