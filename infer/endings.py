"""Where an answer ends: what the denoising loop makes of end-of-text tokens."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from dflax.errors import DflaxError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EndOfText:
    """What end tokens do to a row. Everything is off unless `denoise` is given one of these: the whole region is denoised then.

    Truncation drops what lies behind an end token for good; the position itself stays, and may still be masked. As published
    (Learn2PD's EoTP): truncate, anywhere, floor 0, in_order False.
    """

    tokens: tuple[int, ...] | None = field(default=None, metadata={"static": True})
    """The end tokens; None: the model's own."""
    stop: bool = field(default=True, metadata={"static": True})
    """A row is done when everything before a written end token is written: nothing that follows is asked for."""
    truncate: bool = field(default=False, metadata={"static": True})
    """Cut at a written end token even if something before it is masked, and at a predicted one that satisfies the next fields."""
    committed: bool = field(default=True, metadata={"static": True})
    """Whether truncation cuts at the earliest end token that the step has written before it looks at predicted ones."""
    floor: Any = 0.9
    """float: probability that a predicted end token needs."""
    in_order: bool = field(default=True, metadata={"static": True})
    """A predicted end token counts only where everything before it is written."""
    anywhere: bool = field(default=False, metadata={"static": True})
    """Look for predicted end tokens in all rows that the pass computed, not in the active block only."""
    forbid: bool = field(default=False, metadata={"static": True})
    """End tokens are never chosen (LLaDA's logits_eos_inf)."""
    delay: bool = field(default=False, metadata={"static": True})
    """End tokens have confidence 0, so that they are written last (LLaDA's confidence_eos_eot_inf)."""

    def check(self) -> None:
        """Raises DflaxError for a value that cannot be meant."""
        if isinstance(self.floor, bool) or not isinstance(self.floor, (int, float)) or not 0 <= self.floor <= 1:
            raise DflaxError(f"floor of the end of text is {self.floor!r}; it must be a number from 0 to 1")
        if self.tokens is not None and not isinstance(self.tokens, (tuple, list)):
            raise DflaxError(
                f"tokens of the end of text is {self.tokens!r}; it must be a tuple of token ids, such as (2,)"
            )
        if self.tokens is not None and not self.tokens:
            raise DflaxError("the end of text has no tokens; give at least one, or None for the model's own")

    def cut(
        self,
        written: Bool[Array, "B T"],
        column: Int32[Array, "B T"],
        predicted: Int32[Array, "B"],
        probability: Float[Array, "B"],
        length: Int32[Array, "B"],
    ) -> Int32[Array, "B"]:
        """The new length of every canvas.

        Args:
          written: slots in which this step has written an end token; column: theirs.
          predicted: column of the predicted end token to consider; probability: its own, negative where there is none.
          length: of the canvas so far.
        """
        found = probability >= self.floor
        at = jnp.where(found, predicted, length)
        if self.committed:
            first = jnp.min(jnp.where(written, column, length[:, None]), axis=1)
            at = jnp.where(jnp.any(written, axis=1), first, at)
        return jnp.minimum(length, at + 1)


def stop_length(
    tokens: Int32[Array, "B S"], is_end: Bool[Array, "B S"], masked: Bool[Array, "B S"], length: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Length up to and with the first end token of each row that has nothing masked before it; else as it was.

    is_end: end tokens of the generated region. masked: what is not written, within the length.
    """
    S = tokens.shape[1]
    column = jnp.arange(S, dtype=jnp.int32)
    first_mask = jnp.min(jnp.where(masked, column, S), axis=1)
    first_end = jnp.min(jnp.where(is_end, column, S), axis=1)
    return jnp.where(first_end < first_mask, jnp.minimum(length, first_end + 1), length)


def text_length(answer: Sequence[int | None], ends: Container[int | None]) -> int:
    """How many tokens stand before the first end token."""
    return next((i for i, token in enumerate(answer) if token in ends), len(answer))
