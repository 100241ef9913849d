"""Which values an option that is a number may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from maulstick.errors import OptionError
from maulstick.options.schema import TrainOptions, flat_values
from maulstick.options.text_rates import BY_NUMBER


@dataclass(frozen=True)
class _Range:
    expected: str
    holds: Callable[[float], bool]


_ONE_OR_MORE = _Range("at least 1", lambda value: value >= 1)
_ZERO_OR_MORE = _Range("0 or more", lambda value: value >= 0)
_ABOVE_ZERO = _Range("above 0", lambda value: value > 0)
_CHANCE = _Range("a chance from 0 to 1", lambda value: 0 <= value <= 1)
_SHARE = _Range("a share from 0 to 1", lambda value: 0 <= value <= 1)
_CHANCE_BELOW_ONE = _Range("a chance from 0 to below 1 (at 1 nothing would be trained)", lambda value: 0 <= value < 1)

RANGES: dict[str, _Range] = {
    "clip_skip": _ONE_OR_MORE,
    "base_weights_multiplier": _Range("a number", lambda value: True),
    "network_dim": _ONE_OR_MORE,
    "network_alpha": _ZERO_OR_MORE,
    "factor": _Range("a whole number of at least 2, or -1", lambda value: value >= 2 or value == -1),
    "network_dropout": _CHANCE_BELOW_ONE,
    "conv_dim": _ONE_OR_MORE,
    "conv_alpha": _ABOVE_ZERO,
    "rank_dropout": _CHANCE_BELOW_ONE,
    "module_dropout": _CHANCE_BELOW_ONE,
    "scale_weight_norms": _ABOVE_ZERO,
    "block_lr_zero_threshold": _ZERO_OR_MORE,
    "loraplus_lr_ratio": _ABOVE_ZERO,
    "loraplus_unet_lr_ratio": _ABOVE_ZERO,
    "loraplus_text_encoder_lr_ratio": _ABOVE_ZERO,
    "ip_adapter_tokens": _ONE_OR_MORE,
    **dict.fromkeys(("image_dropout_rate", "text_dropout_rate", "image_text_dropout_rate"), _CHANCE),
    "ip_adapter_scale_warmup_steps": _ZERO_OR_MORE,
    **dict.fromkeys(("train_batch_size", "vae_batch_size"), _ONE_OR_MORE),
    "max_data_loader_n_workers": _ZERO_OR_MORE,
    "keep_tokens": _ZERO_OR_MORE,
    **dict.fromkeys(("caption_dropout_rate", "caption_tag_dropout_rate"), _CHANCE),
    **dict.fromkeys(("caption_dropout_every_n_epochs", "token_warmup_min", "token_warmup_step"), _ZERO_OR_MORE),
    "min_bucket_reso": _ONE_OR_MORE,
    "max_bucket_reso": _ONE_OR_MORE,
    "bucket_reso_steps": _Range("a multiple of 8, at least 8", lambda value: value >= 8 and value % 8 == 0),
    "prior_loss_weight": _ZERO_OR_MORE,
    "validation_split": _SHARE,
    "validation_seed": _ZERO_OR_MORE,
    **dict.fromkeys(("validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps"), _ONE_OR_MORE),
    **dict.fromkeys(("save_every_n_epochs", "save_every_n_steps"), _ONE_OR_MORE),
    **dict.fromkeys(("save_last_n_epochs", "save_last_n_steps"), _ZERO_OR_MORE),
    **dict.fromkeys(("save_last_n_epochs_state", "save_last_n_steps_state"), _ZERO_OR_MORE),
    "initial_epoch": _ZERO_OR_MORE,
    "initial_step": _ZERO_OR_MORE,
    "max_train_steps": _ONE_OR_MORE,
    "max_train_epochs": _ONE_OR_MORE,
    "gradient_accumulation_steps": _ONE_OR_MORE,
    "max_skipped_fraction": _SHARE,
    "ddp_timeout": _ONE_OR_MORE,
    "seed": _Range("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    "learning_rate": _ZERO_OR_MORE,
    "unet_lr": _ZERO_OR_MORE,
    **dict.fromkeys(("text_encoder_lr", *BY_NUMBER), _ZERO_OR_MORE),
    "max_grad_norm": _ZERO_OR_MORE,
    "ema_decay": _Range("above 0 and below 1", lambda value: 0 < value < 1),
    "lr_scheduler_num_cycles": _ONE_OR_MORE,
    "lr_scheduler_power": _ABOVE_ZERO,
    "lr_scheduler_min_lr_ratio": _SHARE,
    "lr_scheduler_timescale": _ONE_OR_MORE,
    **dict.fromkeys(("min_snr_gamma", "logit_std", "training_shift"), _ABOVE_ZERO),
    "t5xxl_max_token_length": _ONE_OR_MORE,
    **dict.fromkeys(("logit_mean", "adaptive_noise_scale"), _Range("a number", lambda value: True)),
    "mode_scale": _Range("from -1 to 1.75, where the density stays one", lambda value: -1 <= value <= 1.75),
    **dict.fromkeys(("noise_offset", "min_timestep", "v_pred_like_loss", "multires_noise_discount"), _ZERO_OR_MORE),
    "multires_noise_iterations": _Range("from 1 to 20", lambda value: 1 <= value <= 20),
    **dict.fromkeys(("ip_noise_gamma", "huber_c", "huber_scale"), _ABOVE_ZERO),
    "max_timestep": _ONE_OR_MORE,
    **dict.fromkeys(("rescue_after", "rescue_every", "rescue_keep", "rescue_limit"), _ONE_OR_MORE),
    "rescue_lr_factor": _Range("above 0 and at most 1", lambda value: 0 < value <= 1),
    "rescue_lr_restore_after": _ZERO_OR_MORE,
    "autopsy_limit": _ONE_OR_MORE,
    "sample_every_n_steps": _ONE_OR_MORE,
    "sample_every_n_epochs": _ONE_OR_MORE,
    "log_details_every_n_steps": _ZERO_OR_MORE,
}
"""Every option that is a number, with the values it may have."""


def check_ranges(options: TrainOptions) -> None:
    """Raise OptionError for a number that is not finite or out of its range, and for an unusable file name."""
    values = flat_values(options)
    for name, allowed in RANGES.items():
        numbers = values[name] if isinstance(values[name], list) else [values[name]]
        for number in numbers:
            if number is not None and not (math.isfinite(number) and allowed.holds(number)):
                finite = "" if math.isfinite(number) else "a finite number, "
                raise OptionError(f"{name} = {number}: expected {finite}{allowed.expected}.")
    name = options.run.output_name
    if not name.strip() or "/" in name or "\\" in name:
        raise OptionError(f"output_name = {name!r}: expected a file name without folders; those go into output_dir.")
