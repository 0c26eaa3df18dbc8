"""Does this drafter fit this target? Every misfit that would only show as low acceptance is refused here, with the reason."""

from dflax.config import ModelConfig
from dflax.errors import DflaxError
from dflax.model import Model


def check_target(target: Model) -> None:
    """Raises DflaxError if the model is no target."""
    if target.is_drafter:
        raise DflaxError(f"{_name(target)} is a drafter and cannot be decoded by itself; give the target model first")
    if target.config.bidirectional:
        raise DflaxError(
            f"{_name(target)} is a diffusion language model, which does not write one token after the other; use dflax.denoise"
        )


def check_diffusion(model: Model) -> tuple[ModelConfig, int]:
    """Configuration and mask token; DflaxError if the model cannot be denoised."""
    if model.is_drafter or not model.config.bidirectional:
        raise DflaxError(f"{_name(model)} is no diffusion language model; use dflax.generate")
    if model.config.mask_token_id is None:
        raise DflaxError(
            f"the config.json of {_name(model)} has no mask_token_id; give dflax.load(..., mask_token_id=...) or --mask-token-id"
        )
    return model.config, model.config.mask_token_id


def check_pair(target: Model, drafter: Model) -> None:
    """Raises DflaxError with the reason if the drafter cannot draft for this target."""
    check_fit(target, drafter)
    if drafter.dtype != target.dtype:
        raise DflaxError(
            f"drafter {_name(drafter)} does not fit target {_name(target)}: its weights are {drafter.dtype}, the target's "
            f"{target.dtype}; load both with one dtype"
        )


def check_fit(target: Model, drafter: Model) -> None:
    """Raises DflaxError with the reason if the drafter was not made for this target; their dtypes may differ, as they do in training."""
    check_target(target)
    if not drafter.is_drafter:
        raise DflaxError(f"{_name(drafter)} is no drafter; the drafter must be a DFlash checkpoint")
    t, d, pair = target.config, drafter.config, f"drafter {_name(drafter)} does not fit target {_name(target)}"
    if d.vocab_size != t.vocab_size:
        raise DflaxError(f"{pair}: its vocabulary has {d.vocab_size} tokens, the target's {t.vocab_size}")
    if d.hidden_size != t.hidden_size:
        raise DflaxError(f"{pair}: its hidden size is {d.hidden_size}, the target's {t.hidden_size}")
    if d.num_target_layers not in (None, t.num_layers):
        raise DflaxError(f"{pair}: it was made for {d.num_target_layers} target layers, the target has {t.num_layers}")
    if not d.target_layer_ids or not all(0 <= i < t.num_layers for i in d.target_layer_ids):
        raise DflaxError(f"{pair}: it taps layers {list(d.target_layer_ids)} of a target with {t.num_layers} layers")
    if not 0 <= d.mask_token_id < t.vocab_size:
        raise DflaxError(f"{pair}: its mask token id {d.mask_token_id} is outside the vocabulary of {t.vocab_size}")
    if d.draft_vocab_size is not None and drafter.draft_ids is None:
        raise DflaxError(f"{pair}: it scores {d.draft_vocab_size} tokens, but which is not in the model (draft_ids)")


def check_block_size(drafter: Model, block_size: object, allow_larger: bool) -> int:
    """The block size to use: the trained one if None. Raises DflaxError if it is impossible or larger than trained."""
    trained = drafter.config.block_size
    if block_size is None:
        return trained
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise DflaxError(f'block_size is {block_size!r}; it must be a whole number of at least 1, None or "auto"')
    if block_size > trained and not allow_larger:
        raise DflaxError(
            f"block_size is {block_size}, but drafter {_name(drafter)} was trained with {trained}, beyond which drafts are "
            f"poor; give at most {trained}, or allow_larger_blocks=True"
        )
    return block_size


def _name(model: Model) -> str:
    return repr(model.name) if model.name else "(unnamed)"
