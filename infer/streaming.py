"""`dflax.stream`: tokens as they come, of whatever `speculate`, `generate` or `denoise` would answer."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

from dflax.infer.diffuse import DenoisePiece, stream_denoise
from dflax.infer.generate import Piece, stream_generate, stream_speculate
from dflax.model import Model


@overload
def stream(
    target: Model, drafter: Model | None, prompts: Sequence[Any], *arguments: Any, **options: Any
) -> Iterator[Piece]: ...


@overload
def stream(
    model: Model, prompts: Sequence[Any], *arguments: Any, **options: Any
) -> Iterator[Piece] | Iterator[DenoisePiece]: ...


def stream(*arguments: Any, **options: Any) -> Iterator[Piece] | Iterator[DenoisePiece]:
    """Tokens as they are committed.

    Takes what the call it stands for takes, checked at once and not at the first piece:

    * `stream(target, drafter, prompts, ...)` for `speculate`.
    * `stream(target, prompts, ...)` for `generate`, and so with None for the drafter. These two take `rounds_per_call`: rounds between
      two looks at the device, every round is a piece of its own all the same.
    * `stream(model, prompts, ...)` of a diffusion model for `denoise`, tokens in whatever order. It takes `passes_per_call`: passes
      between two looks at the device, what they wrote into an answer is one piece.

    Raises:
      DflaxError: what the call it stands for refuses.
    """
    model, *rest = [*(options.pop(name) for name in ("target", "model") if name in options), *arguments]
    if "drafter" in options:
        rest.insert(0, options.pop("drafter"))
    if rest and isinstance(rest[0], Model):
        return stream_speculate(model, *rest, **options)
    if rest and rest[0] is None:
        return stream_generate(model, *rest[1:], **options)
    if not model.is_drafter and model.config.bidirectional:
        return stream_denoise(model, *rest, **options)
    return stream_generate(model, *rest, **options)
