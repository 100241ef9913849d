"""What options say together: contradictions and values out of range are errors, harmless leftovers are named.

Nothing here opens a file; what depends on the model or on the images is checked where those are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from maulstick.errors import OptionError, contradiction
from maulstick.guard.errors import GuardError
from maulstick.guard.presets import GuardConfig, resolve
from maulstick.options.blocks import BLOCK_RANKS, PART_WEIGHTS, check_blocks
from maulstick.options.check_data import check_data
from maulstick.options.hardware import check_hardware
from maulstick.options.ip_adapter import check_ip_adapter
from maulstick.options.log_schema import LogOptions
from maulstick.options.network_types import check_network_type
from maulstick.options.objective import check_objective, objective_leftovers
from maulstick.options.ranges import check_ranges
from maulstick.options.schedules import check_schedule, schedule_leftovers
from maulstick.options.schema import DatasetOptions, TrainOptions, flat_values
from maulstick.options.sd_scripts_table import NETWORK_MODULES
from maulstick.options.text_rates import (
    check_text_encoder_rates,
    highest_text_encoder_rate,
    states_all_text_encoder_rates,
)

DEFAULTS = flat_values(TrainOptions())


def check_train_options(
    options: TrainOptions, given: Collection[str], *, with_files: bool = True, with_output: bool = True
) -> list[str]:
    """Refuse options that cannot mean what they say, and name those that have no effect.

    Args:
        given: the names that the user set, to tell a value from a default.
        with_files: whether model, images and a folder for the results must be named.
        with_output: whether the folder for the results must be.

    Returns:
        One line for each thing that is harmless but will not do what it seems to.

    Raises:
        OptionError: something required is missing, a value is out of range, or two options contradict each other.
    """
    if with_files:
        _check_required(options, with_output=with_output)
    check_ranges(options)
    _check_network(options, given)
    check_blocks(options)
    check_network_type(options.network, given)
    check_ip_adapter(options, given, with_files=with_files)
    _check_rates(options)
    check_data(options)
    check_schedule(options.schedule)
    check_objective(options.objective)
    _check_samples(options)
    _check_output(options)
    check_hardware(options)
    return [*guard_config(options)[1], *_leftovers(options, given)]


def guard_config(options: TrainOptions) -> tuple[GuardConfig, list[str]]:
    """Return what the guardian options mean, and a line for each flag that a preset overrules.

    Raises:
        OptionError: a flag has a value that cannot be used, or needs another one.
    """
    flags = dict(vars(options.guard))
    mode = flags.pop("grad_norm_mode")
    try:
        config, notices = resolve(mode, flags)
    except GuardError as error:
        raise OptionError(str(error)) from error
    given = [name for name, value in flags.items() if value is not None]
    if mode is None and given and not config.skips:
        if not config.log:
            raise OptionError(
                f"{', '.join(given)}: without skip_grad_norm or grad_norm_log nothing is skipped or logged. Add one of "
                "them, or name a preset with grad_norm_mode."
            )
        notices = [*notices, "grad_norm_log without skip_grad_norm: steps are logged, and none is skipped."]
    return config, notices


# ---------------------------------------------------------------------------------------- what must be there


def _check_required(options: TrainOptions, *, with_output: bool) -> None:
    if options.model.pretrained_model_name_or_path is None:
        raise OptionError(
            "No base model was named. Give pretrained_model_name_or_path: a diffusers folder, or one "
            ".safetensors/.ckpt file."
        )
    if options.dataset.train_data_dir is None and options.dataset.dataset_config is None:
        raise OptionError(
            "No training images were named. Give train_data_dir (a folder that holds folders such as 10_cat) "
            "or dataset_config (a dataset description in TOML)."
        )
    if with_output and options.run.output_dir is None:
        raise OptionError("No folder for the results was named. Give output_dir.")


# ---------------------------------------------------------------------------------------- contradictions


def _check_network(options: TrainOptions, given: Collection[str]) -> None:
    network = options.network
    if network.network_module not in ("networks.lora", "networks.lora_sd3"):
        said = NETWORK_MODULES.get(network.network_module, "there is no such network")
        raise OptionError(
            f"network_module = {network.network_module}: {said}. Remove network_module, and "
            "choose with network_type what is trained: lora, dora, loha, lokr, oft or ip_adapter."
        )
    if network.network_type == "ip_adapter" and network.network_train_text_encoder_only:
        raise OptionError(
            "network_train_text_encoder_only does not work with network_type = ip_adapter: no text encoder is trained. "
            "Remove it."
        )
    if network.network_train_unet_only and network.network_train_text_encoder_only:
        raise contradiction(
            "network_train_unet_only",
            "network_train_text_encoder_only",
            "nothing would be trained. Remove one or both.",
        )
    has_conv_rank = network.conv_dim is not None or network.conv_block_dims is not None
    if network.conv_alpha is not None and not has_conv_rank and not network.dim_from_weights:
        raise OptionError("conv_alpha is given without conv_dim, so 3x3 convolutions get no LoRA. Give conv_dim too.")
    if network.dim_from_weights and network.network_weights is None:
        raise OptionError("dim_from_weights is given without network_weights. Name the file to take the ranks from.")
    if options.dataset.cache_text_encoder_outputs and _text_encoder_rate(options):
        raise contradiction(
            "cache_text_encoder_outputs",
            "training the text encoder",
            "its outputs change meanwhile. Add network_train_unet_only, or remove cache_text_encoder_outputs.",
        )


def _unet_rate(options: TrainOptions) -> float:
    """The learning rate of the UNet; 0 when it is not trained."""
    optimizer = options.optimizer
    if options.network.network_train_text_encoder_only:
        return 0.0
    return optimizer.learning_rate if optimizer.unet_lr is None else optimizer.unet_lr


def _text_encoder_rate(options: TrainOptions) -> float:
    """The highest learning rate of a text encoder; 0 when none is trained."""
    optimizer = options.optimizer
    if options.network.network_train_unet_only:
        return 0.0
    return highest_text_encoder_rate(optimizer)


def _check_rates(options: TrainOptions) -> None:
    network, optimizer = options.network, options.optimizer
    check_text_encoder_rates(optimizer)
    stated = [*(optimizer.text_encoder_lr or []), optimizer.text_encoder_lr1, optimizer.text_encoder_lr2]
    if network.network_train_unet_only and any(stated):
        raise contradiction(
            "network_train_unet_only",
            f"text_encoder_lr = {max(rate for rate in stated if rate):g}",
            "the text encoder is not trained. Remove one.",
        )
    if network.network_train_text_encoder_only and optimizer.unet_lr:
        raise contradiction(
            "network_train_text_encoder_only",
            f"unet_lr = {optimizer.unet_lr:g}",
            "the UNet is not trained. Remove one.",
        )
    if not _unet_rate(options) and not _text_encoder_rate(options):
        raise OptionError(
            "Nothing would be trained: learning_rate, unet_lr and text_encoder_lr leave neither UNet nor text encoder "
            "a rate above 0."
        )


def _check_samples(options: TrainOptions) -> None:
    sample = options.sample
    if options.run.fsdp_base and sample.sample_prompts is not None:
        raise contradiction(
            "fsdp_base",
            "sample_prompts",
            "the first process draws, but holds only a part of the base. Draw with the saved file instead: "
            "maulstick generate.",
        )
    if sample.sample_prompts is None:
        for name in ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"):
            if getattr(sample, name):
                raise OptionError(f"{name} is given without sample_prompts. Name a text file with one prompt a line.")


def _check_output(options: TrainOptions) -> None:
    if options.run.save_model_as != "safetensors" and options.network.network_type == "ip_adapter":
        raise contradiction(
            f"save_model_as = {options.run.save_model_as}",
            "network_type = ip_adapter",
            "IP-Adapters are saved as safetensors. `maulstick convert --to comfyui` makes a .bin of one.",
        )
    repository = options.upload.huggingface_repo_id
    if repository is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise OptionError(f"huggingface_repo_id = {repository}: give it as NAME/REPO, such as anna/my-lora.")


# ---------------------------------------------------------------------------------------- leftovers


def _leftovers(options: TrainOptions, given: Collection[str]) -> Iterator[str]:
    """Yield a line for each option that says something and does nothing, because another one is missing."""
    sample, optimizer, network = options.sample, options.optimizer, options.network
    values = flat_values(options)

    def set_otherwise(*names: str) -> list[str]:
        return [name for name in names if name in given and values[name] != DEFAULTS[name]]

    yield from _data_leftovers(options.dataset, set_otherwise)
    yield from _run_leftovers(options, given, set_otherwise)
    if options.run.fsdp_base and options.autopsy.autopsy:
        yield "autopsy has no effect with fsdp_base: one process alone cannot run a step again."
    if not options.autopsy.autopsy:
        yield from _no_effect(set_otherwise("autopsy_limit"), "with no-autopsy")
    if not options.rescue.rescue:
        rescue_numbers = [name for name in vars(options.rescue) if name != "rescue"]
        yield from _no_effect(set_otherwise(*rescue_numbers), "with no-rescue")
    elif options.rescue.rescue_lr_factor == 1:
        yield from _no_effect(set_otherwise("rescue_lr_restore_after"), "with rescue_lr_factor = 1")
    if sample.sample_prompts is None:
        yield from _no_effect(set_otherwise("sample_sampler"), "without sample_prompts")
    elif not (sample.sample_every_n_steps or sample.sample_every_n_epochs or sample.sample_at_first):
        names = ["sample_prompts", *set_otherwise("sample_sampler")]
        yield from _no_effect(names, "without sample_every_n_steps, sample_every_n_epochs or sample_at_first")
    yield from schedule_leftovers(options.schedule, given)
    yield from objective_leftovers(options.objective, given)
    yield from _network_leftovers(options, given, set_otherwise)
    yield from _log_leftovers(options.log, set_otherwise)
    unet_has_rate = optimizer.unet_lr is not None or network.network_train_text_encoder_only
    text_has_rate = states_all_text_encoder_rates(optimizer) or network.network_train_unet_only
    if "learning_rate" in given and unet_has_rate and text_has_rate:
        yield "learning_rate has no effect: every part that is trained has a rate of its own."


def _run_leftovers(
    options: TrainOptions, given: Collection[str], set_otherwise: Callable[..., list[str]]
) -> Iterator[str]:
    run = options.run
    if {"max_train_steps", "max_train_epochs"} <= set(given):
        yield f"max_train_steps has no effect: max_train_epochs = {run.max_train_epochs} takes its place."
    for unit in ("steps", "epochs"):
        if not getattr(run, f"save_every_n_{unit}"):
            last = set_otherwise(f"save_last_n_{unit}", f"save_last_n_{unit}_state")
            yield from _no_effect(last, f"without save_every_n_{unit}")
    if not run.save_state:
        yield from _no_effect(
            set_otherwise("save_last_n_epochs_state", "save_last_n_steps_state"), "without save_state"
        )
    elif run.save_state_on_train_end:
        yield "save_state_on_train_end is part of save_state."
    if run.initial_step is None and run.initial_epoch is None:
        yield from _no_effect(set_otherwise("skip_until_initial_step"), "without initial_step or initial_epoch")
    elif run.initial_step is not None:
        yield from _no_effect(set_otherwise("initial_epoch"), "with initial_step")
    if run.fp8_base:
        yield from _no_effect(set_otherwise("fp8_base_unet"), "with fp8_base, which includes the UNet")
    if run.fsdp_base:
        yield from _no_effect(set_otherwise("ddp_gradient_as_bucket_view", "ddp_static_graph"), "with fsdp_base")
    if run.no_metadata:
        yield from _no_effect(set_otherwise("training_comment"), "with no_metadata")
    if run.save_model_as != "safetensors":
        yield (
            f"save_model_as = {run.save_model_as}: the file holds no metadata, and many programs refuse it, as such "
            "files can hold code. safetensors is better."
        )
        yield from _no_effect(
            set_otherwise("no_metadata", "training_comment", *vars(options.metadata)), "without safetensors"
        )
    if options.upload.huggingface_repo_id is None:
        yield from _no_effect(set_otherwise(*vars(options.upload)), "without huggingface_repo_id")


def _network_leftovers(
    options: TrainOptions, given: Collection[str], set_otherwise: Callable[..., list[str]]
) -> Iterator[str]:
    network = options.network
    if network.conv_block_dims is not None:
        yield from _no_effect(set_otherwise("conv_dim"), "with conv_block_dims")
    if not (network.block_lr or any(getattr(network, name) is not None for name in PART_WEIGHTS)):
        missing = "without down_lr_weight, mid_lr_weight, up_lr_weight or block_lr"
        yield from _no_effect(set_otherwise("block_lr_zero_threshold"), missing)
    if network.network_train_unet_only:
        yield from _no_effect(set_otherwise("loraplus_text_encoder_lr_ratio"), "with network_train_unet_only")
    if network.network_train_text_encoder_only:
        by_block = ("block_lr", *PART_WEIGHTS, *BLOCK_RANKS, "train_block_indices")
        of_unet = ("conv_dim", "conv_alpha", *by_block, "loraplus_unet_lr_ratio")
        yield from _no_effect(set_otherwise(*of_unet), "with network_train_text_encoder_only")
    elif not _unet_rate(options):
        yield "A learning rate of 0 for the UNet: it is not trained, and not in the file."
    if not network.network_train_unet_only and not _text_encoder_rate(options):
        yield "A learning rate of 0 for the text encoder: it is not trained, and not in the file."
    if network.dim_from_weights:
        of_file = ("network_dim", "network_alpha", "conv_dim", "conv_alpha", *BLOCK_RANKS)
        ranks = [name for name in of_file if name in given]
        yield from _no_effect(ranks, "with dim_from_weights: ranks and alphas come from network_weights")
    elif network.network_alpha == 0:
        yield f"network_alpha = 0 means network_alpha = network_dim ({network.network_dim}), as in sd-scripts."


def _data_leftovers(data: DatasetOptions, set_otherwise: Callable[..., list[str]]) -> Iterator[str]:
    # A dataset description may switch these on for its own datasets, whatever the options say.
    if data.dataset_config is not None:
        return
    varying = data.shuffle_caption or data.caption_tag_dropout_rate or data.token_warmup_step
    if not varying:
        kept = set_otherwise("keep_tokens", "keep_tokens_separator", "caption_separator")
        yield from _no_effect(kept, "without shuffle_caption, caption_tag_dropout_rate or token_warmup_step")
    if not data.token_warmup_step:
        yield from _no_effect(set_otherwise("token_warmup_min"), "without token_warmup_step")
    if not data.enable_bucket:
        buckets = set_otherwise("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale")
        yield from _no_effect(buckets, "without enable_bucket")
    if data.reg_data_dir is None:
        yield from _no_effect(set_otherwise("prior_loss_weight"), "without reg_data_dir")
    if not data.validation_split:
        schedule = ("validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps")
        yield from _no_effect(set_otherwise("validation_seed", *schedule), "without validation_split")


def _log_leftovers(log: LogOptions, set_otherwise: Callable[..., list[str]]) -> Iterator[str]:
    if log.log_with is None:
        yield from _no_effect(set_otherwise("log_tracker_name", "log_tracker_config"), "without log_with")
    if log.log_with not in ("tensorboard", "all"):
        yield from _no_effect(set_otherwise("log_prefix"), "without TensorBoard")
    if log.log_with not in ("wandb", "all"):
        yield from _no_effect(set_otherwise("wandb_run_name"), "without W&B")


def _no_effect(names: list[str], missing: str) -> Iterator[str]:
    if names:
        yield f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {missing}."
