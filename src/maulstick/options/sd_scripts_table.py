"""The rows about sd-scripts: every option of its LoRA scripts that Maulstick has not, and its default there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from maulstick.options.ip_adapter_schema import IpAdapterOptions
from maulstick.options.safety_schema import AutopsyOptions, GuardOptions, RescueOptions
from maulstick.options.text_rates import BY_NUMBER

Default = bool | int | float | str | None
"""sd-scripts' default. Its type says what follows the name on a command line: a bool nothing, anything else one value.
"""


@dataclass(frozen=True)
class OnlyWith:
    """A condition on one of Maulstick's own options; ``values`` empty means: it is set at all."""

    option: str
    values: tuple[str, ...]
    reason: str

    def holds(self, active: Mapping[str, Any]) -> bool:
        value = active[self.option]
        return value in self.values if self.values else value is not None


@dataclass(frozen=True)
class NoEffect:
    """Accepted and reported: nothing here depends on it, for ``reason``.

    ``needs``: name and value of one of Maulstick's own options, without which it is an error, as in sd-scripts.
    """

    reason: str
    default: Default = None
    also_off: tuple[Any, ...] = ()
    scripts: str = "all"
    needs: tuple[str, str] | None = None


@dataclass(frozen=True)
class Refused:
    """An error that says what to do ``instead``; with ``only_with``, merely without effect where that does not hold."""

    instead: str
    default: Default = None
    also_off: tuple[Any, ...] = ()
    scripts: str = "all"
    only_with: OnlyWith | None = None


@dataclass(frozen=True)
class Renamed:
    """Another name of one of Maulstick's own options."""

    to: str
    default: Default = None
    scripts: str = "all"


def _later(what: str, **details: Any) -> Refused:
    return Refused(f"{what} is not supported yet; remove it", **details)


_WITH_HUB = OnlyWith("huggingface_repo_id", (), "only used with huggingface_repo_id")
_WITH_RESUME = OnlyWith("resume", (), "only used with resume")
_WITH_WANDB = OnlyWith("log_with", ("wandb", "all"), "only used with W&B")

_IN_32_BIT = "the LoRA and the optimizer stay in 32 bits, which takes a few MB more and loses no small updates"
_MODEL_AND_MEMORY: dict[str, NoEffect | Refused | Renamed] = {
    "tokenizer_cache_dir": NoEffect("the tokenizer files ship with Maulstick"),
    "xformers": NoEffect("PyTorch's own attention is always used", False),
    "sdpa": NoEffect("PyTorch's own attention is always used", False),
    "mem_eff_attn": NoEffect("PyTorch's own attention is always used", False),
    "lowram": NoEffect("weights are always read on the CPU and moved after", False),
    "highvram": NoEffect("device memory is emptied only where encoders are done", False),
    "no_half_vae": NoEffect("SDXL's VAE never runs in fp16; others' overflowing latents are made again in fp32", False),
    "full_fp16": NoEffect(_IN_32_BIT, False, needs=("mixed_precision", "fp16")),
    "full_bf16": NoEffect(_IN_32_BIT, False, needs=("mixed_precision", "bf16")),
    "cpu_offload_checkpointing": Refused("not supported; use gradient_checkpointing", False),
    "fused_backward_pass": Refused("not supported; gradients of a LoRA are small", False),
    "torch_compile": Refused(
        "not supported: alarms and autopsy look into modules as they run, which a compiled network bypasses, and each "
        "size of pictures would be compiled anew; remove it",
        False,
    ),
    "dynamo_backend": NoEffect("only used with torch_compile", "inductor", ("no",)),
    "deepspeed": Refused("DeepSpeed is not supported; several GPUs are used through accelerate launch", False),
    "zero_stage": NoEffect("only used with deepspeed", 2),
    "offload_optimizer_device": NoEffect("only used with deepspeed"),
    "offload_optimizer_nvme_path": NoEffect("only used with deepspeed"),
    "offload_param_device": NoEffect("only used with deepspeed"),
    "offload_param_nvme_path": NoEffect("only used with deepspeed"),
    "zero3_init_flag": NoEffect("only used with deepspeed", False),
    "zero3_save_16bit_model": NoEffect("only used with deepspeed", False),
    "fp16_master_weights_and_gradients": NoEffect("only used with deepspeed", False),
}

_DATA: dict[str, NoEffect | Refused | Renamed] = {
    "caption_extention": Renamed("caption_extension"),
    "face_crop_aug_range": Refused(
        "crops around faces, whose places are read from file names, are not supported; cut the faces out into images "
        "of their own beside the whole ones, or use random_crop"
    ),
    "train_inpainting": _later("training for inpainting", default=False),
    "in_json": Refused("image lists in JSON are not supported; use train_data_dir or dataset_config"),
    "dataset_repeats": NoEffect("only used with in_json", 1),
    "dataset_class": Refused("a dataset class of one's own is not supported; use train_data_dir or dataset_config"),
    "debug_dataset": Refused("use `maulstick check`, which shows what would be trained", False),
    "cache_info": NoEffect("images and captions are always read and checked at the start", False),
    "skip_cache_check": NoEffect("caches are always checked, by content", False),
    "persistent_data_loader_workers": NoEffect("images are read by threads, which start at once", False),
}

_RUN: dict[str, NoEffect | Refused | Renamed] = {
    "save_n_epoch_ratio": Refused("use save_every_n_epochs"),
    "output_config": Refused(
        "not supported; write `name = value` lines into a TOML file and name that with config_file; every run's event "
        "log holds all its options too",
        False,
    ),
    "save_state_to_huggingface": Refused(
        "only LoRA files are uploaded; upload the state folder with `hf upload REPO FOLDER`, and remove this",
        False,
        only_with=_WITH_HUB,
    ),
    "resume_from_huggingface": Refused(
        "states are not downloaded; fetch the folder with `hf download REPO`, and name it with resume",
        False,
        only_with=_WITH_RESUME,
    ),
}

_OPTIMIZER: dict[str, NoEffect | Refused | Renamed] = {
    "use_8bit_adam": Refused("use optimizer_type = AdamW8bit", False),
    "use_lion_optimizer": Refused("use optimizer_type = Lion", False),
}

_LOG: dict[str, NoEffect | Refused | Renamed] = {
    "log_config": NoEffect("all options are always logged", False),
    "wandb_api_key": Refused("keys don't belong in options; run `wandb login` once", only_with=_WITH_WANDB),
    "console_log_level": NoEffect("what is shown is set with console"),
    "console_log_file": Refused("use console = plain and redirect the output to a file"),
    "console_log_simple": Refused("use console = plain", False),
}

_ONE_ENCODER = "dropping the text of one encoder is not supported (caption_dropout_rate drops that of all)"
_SDXL_AND_SD3: dict[str, NoEffect | Refused | Renamed] = {
    "cache_text_encoder_outputs_to_disk": Refused("use cache_text_encoder_outputs", False, scripts="SDXL, SD3"),
    "disable_mmap_load_safetensors": NoEffect("how files are read is chosen by Maulstick", False, scripts="SDXL, SD3"),
    **{
        name: Refused(f"{why}; remove it", default, also_off, scripts="SD3")
        for name, default, also_off, why in (
            ("save_clip", False, (), "only the LoRA is saved"),
            ("save_t5xxl", False, (), "only the LoRA is saved"),
            ("t5xxl_device", None, (), "T5 is on the device only while it is needed"),
            ("t5xxl_dtype", None, (), "T5 is in mixed_precision, and in bf16 instead of fp16, which it overflows"),
            ("text_encoder_batch_size", None, (), "captions are encoded 16 at a time"),
            ("apply_lg_attn_mask", False, (), "zeros in the place of padding are not supported"),
            ("apply_t5_attn_mask", False, (), "zeros in the place of padding are not supported"),
            ("clip_l_dropout_rate", 0.0, (), _ONE_ENCODER),
            ("clip_g_dropout_rate", 0.0, (), _ONE_ENCODER),
            ("t5_dropout_rate", 0.0, (), _ONE_ENCODER),
            ("pos_emb_random_crop_rate", 0.0, (), "positions are always those of the middle, as in drawing"),
            ("enable_scaled_pos_embed", False, (), "positions are always those of the middle, as in drawing"),
            ("blocks_to_swap", None, (0,), "swapping blocks out of memory is not supported"),
        )
    },
}

_KOHYA_SS: dict[str, NoEffect | Refused | Renamed] = {
    "epoch": NoEffect("kohya_ss makes max_train_steps of it", scripts="kohya_ss"),
    "noise_offset_type": NoEffect("a note of kohya_ss to itself", scripts="kohya_ss"),
    "lowvram": NoEffect("sd-scripts does not have it either", False, scripts="kohya_ss"),
    "stop_text_encoder_training": NoEffect("sd-scripts ignores it too", 0, scripts="kohya_ss"),
}

SD_SCRIPTS_GROUPS: Mapping[str, Mapping[str, NoEffect | Refused | Renamed]] = {
    "Model": _MODEL_AND_MEMORY,
    "Data": _DATA,
    "Run": _RUN,
    "Optimizer": _OPTIMIZER,
    "Log": _LOG,
    "SDXL and SD3": _SDXL_AND_SD3,
    "kohya_ss": _KOHYA_SS,
}
"""Every option of sd-scripts' train_network, sdxl_train_network and sd3_train_network that is not in ``schema``, and
the keys that kohya_ss adds to its configuration files; by the group of ``--help`` that each would be in."""

SD_SCRIPTS_OPTIONS: Mapping[str, NoEffect | Refused | Renamed] = {
    name: entry for group in SD_SCRIPTS_GROUPS.values() for name, entry in group.items()
}

ONLY_IN: Mapping[str, str] = {
    "cache_text_encoder_outputs": "SDXL, SD3",
    **dict.fromkeys(("clip_l", "clip_g", "t5xxl", "t5xxl_max_token_length"), "SD3"),
    **dict.fromkeys(("weighting_scheme", "logit_mean", "logit_std", "mode_scale", "training_shift"), "SD3"),
    **dict.fromkeys(("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"), "kohya_ss"),
}
"""Which of sd-scripts' scripts have an option that Maulstick has too, where it is not all of them."""

SUPPORTED_NETWORK_ARGUMENTS = (
    *("conv_dim", "conv_alpha", "rank_dropout", "module_dropout"),
    *("block_lr", "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"),
    *("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas", "train_block_indices"),
    *("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"),
    *("factor", "decompose_both", "wd_on_output"),
)

_LYCORIS = "belongs to LyCORIS and has no counterpart here; remove it"

_RANKS_BY_KIND = ("emb_dims", *(f"{side}_{kind}_dim" for side in ("context", "x") for kind in ("attn", "mlp", "mod")))

NETWORK_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("use_tucker", "use_cp", "use_scalar", "rank_dropout_scale", "train_norm", "constraint"), _LYCORIS),
    **dict.fromkeys(("constrain", "rescaled", "block_size", "rs_lora", "unbalanced_factorization"), _LYCORIS),
    "full_matrix": "a large network_dim (such as 100000) makes both factors of a LoKr whole; use that",
    "algo": "use network_type = lora, dora, loha, lokr or oft (LyCORIS' diag-oft), without network_module",
    "preset": "modules are chosen as sd-scripts does, by conv_dim and the numbers by block; remove it",
    "dora_wd": "use network_type = dora with wd_on_output=True, which is LyCORIS' default",
    "unit": "belongs to networks.dylora, which is not supported; networks.lora is",
    "dropout": "use network_dropout",
    "split_qkv": "query, key and value are trained as one, as sd-scripts does without it; 'maulstick convert --to "
    "diffusers' writes them apart. Remove it",
    "train_t5xxl": "T5 is not trained; remove it",
    "verbose": "the plan is always shown; remove it",
    **dict.fromkeys(_RANKS_BY_KIND, "ranks by kind of layer are not supported; use network_dim or block_dims"),
}
"""Keys of ``network_args`` that other networks or later versions have, with what to do about them."""

NETWORK_MODULES: Mapping[str, str] = {
    "lycoris.kohya": "its kinds are trained here without LyCORIS, on the modules that sd-scripts trains (LyCORIS' "
    "preset 'full' also trains conv_in, conv_out and time_embedding, and 3x3 convolutions with network_dim)",
    "networks.lora_fa": "LoRA-FA is not supported",
    "networks.dylora": "DyLoRA is not supported",
    "networks.oft": "network_type = oft trains one, in LyCORIS' form",
    "networks.lora_flux": "FLUX models are not supported yet",
    "networks.lora_lumina": "Lumina models are not supported",
}
"""What is to be said about sd-scripts' other network modules."""

_GUARD_OPTIONS = frozenset(option.name for option in fields(GuardOptions))
_RESCUE_OPTIONS = frozenset(option.name for option in fields(RescueOptions))
_AUTOPSY_OPTIONS = frozenset(option.name for option in fields(AutopsyOptions))
_IP_ADAPTER_OPTIONS = frozenset(option.name for option in fields(IpAdapterOptions))
DIFFERENCES: Mapping[str, str] = {
    "clip_skip": "SDXL and SD3 take a layer of their own: 1 counts as not given there, another layer is refused",
    "network_module": "networks.lora is the default for all models; networks.lora_sd3 for SD3 is the same",
    "network_dim": "default 4, as sd-scripts takes when none is given",
    "learning_rate": "default 1e-4 (sd-scripts: 2e-6)",
    "caption_extension": "default .txt (sd-scripts: .caption); .txt and .caption are both found anyway",
    "resolution": "default 512 (sd-scripts has none)",
    "output_name": "default last",
    "optimizer_type": "default AdamW; Adafactor takes the rate that is given (relative_step=False)",
    "sample_sampler": "default euler (sd-scripts: ddim)",
    "lr_scheduler": "without adafactor and those that follow the loss; with rex",
    "lr_warmup_skip_zero": "start the warm-up above 0",
    "max_skipped_fraction": "stop a run that is mostly skipping",
    "alarms": "alarms while training",
    "weighting_scheme": "default logit_normal, as SD3 was trained (sd-scripts: uniform)",
    "training_shift": "default the model's own, 3 (sd-scripts: 1)",
    "t5xxl": "also a diffusers folder with text_encoder_3 and tokenizer_3",
    "no_t5xxl": "leave T5 out",
    "text_encoder_lr": "one rate for all text encoders, or one for each",
    **dict.fromkeys(BY_NUMBER, "one value of text_encoder_lr by its number"),
    **dict.fromkeys(SUPPORTED_NETWORK_ARGUMENTS, "in sd-scripts only a key of network_args, which works too"),
    "network_type": "what is trained; sd-scripts and LyCORIS say it with network_module and algo",
    "block_lr": "all weights by block in one table; sd-scripts has down_lr_weight, mid_lr_weight and up_lr_weight",
    "logging_dir": "may be left out: trackers' files then go into output_dir/logs",
    "save_model_as": "ckpt and pt hold no metadata; an IP-Adapter is always safetensors",
    "metadata_thumbnail": "a file that is missing or no picture is an error (sd-scripts: left out)",
    "huggingface_path_in_repo": "may be left out: files are then at the top of the repository",
    "async_upload": "without it a file that takes longer than a minute goes on uploading beside the training",
    "log_prefix": "default output_name and a dash (sd-scripts: none)",
    "log_tracker_name": "default maulstick in W&B (sd-scripts: network_train)",
    "log_tracker_config": "adds to wandb_run_name instead of taking its place",
    "ddp_timeout": "default 12 hours, because caching on one process may take long",
    "fp8_base": "each row is scaled to the range of the format first, so that less is lost",
    "validation_split": "copies of a held-back picture are not trained either; also measured before the first step",
    "max_validation_steps": "batches of train_batch_size over all processes together",
    **dict.fromkeys(_GUARD_OPTIONS, "the gradient guardian"),
    **dict.fromkeys(_RESCUE_OPTIONS, "going back to a good state when a run is lost"),
    **dict.fromkeys(_AUTOPSY_OPTIONS, "finding where NaN or infinity came from"),
    **dict.fromkeys(_IP_ADAPTER_OPTIONS, "training of IP-Adapters, which sd-scripts does not have"),
    "conditioning_data_dir": "masks with masked_loss, also for plain folders; else an IP-Adapter's reference images",
    "random_crop": "after resizing to the bucket (sd-scripts without buckets: from the image in its own size)",
    "color_aug": "also saturation, brightness and contrast, chance 1/2 (sd-scripts: hue or gamma, 1/3)",
    "weighted_captions": "states keep their mean, as in the web UI; also with cache_text_encoder_outputs; not for SD3",
    "resize_interpolation": "Pillow's filters, which widen when shrinking (OpenCV's don't); also box",
    "vae_batch_size": "without it as many as their size allows (sd-scripts: 1)",
    "max_data_loader_n_workers": "threads, and without it four (sd-scripts: processes, eight)",
    "ema_decay": "saving a running average of the weights",
    "console": "terminal output",
    "log_details_every_n_steps": "norms by block and losses by timestep in the event log",
    "report": "one HTML file about the run",
    "fsdp_base": "the frozen denoiser spread over processes",
    "config_file": "unknown names in it are errors",
}
"""Options that Maulstick has too, with another default or a limit."""

_LOG_OPTIONS = ("console", "log_details_every_n_steps", "report")
_OTHERS = (
    *("alarms", "ema_decay", "fsdp_base", "lr_warmup_skip_zero", "max_skipped_fraction", "network_type", "no_t5xxl"),
    *BY_NUMBER,
)
MAULSTICK_ONLY = frozenset(
    {
        *_OTHERS,
        *_LOG_OPTIONS,
        *_GUARD_OPTIONS,
        *_RESCUE_OPTIONS,
        *_AUTOPSY_OPTIONS,
        *_IP_ADAPTER_OPTIONS,
        *SUPPORTED_NETWORK_ARGUMENTS,
    }
)
"""Options that sd-scripts does not have under this name."""
