"""Whether a saved state belongs to the run that wants to go on from it, and what differs where it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from maulstick.data.records import DatasetIndex, ImageRecord
from maulstick.errors import OptionError
from maulstick.options.schema import TrainOptions
from maulstick.train.events import json_value

VALUES_PER_TENSOR = 64
"""How many values of each base weight go into the fingerprint: another model differs in all of its tensors."""

FIXED_GROUPS = ("model", "network", "ip_adapter", "dataset", "guard")
FREE_GROUPS = ("sample", "metadata", "upload", "log")
FIXED = frozenset(
    {
        *("optimizer_type", "optimizer_args", "ema_decay"),
        *("gradient_accumulation_steps", "mixed_precision", "fp8_base", "fp8_base_unet", "seed"),
    }
)
"""Options outside ``FIXED_GROUPS`` that a state fits only with the same value."""
FREE = frozenset(
    {
        *("pretrained_model_name_or_path", "train_data_dir", "reg_data_dir", "dataset_config", "network_weights"),
        *("base_weights", "base_weights_multiplier"),
        *("image_encoder", "conditioning_data_dir", "sample_ip_image", "max_data_loader_n_workers"),
        *("output_dir", "output_name", "save_model_as", "save_precision", "no_metadata", "training_comment"),
        *("save_every_n_epochs", "save_every_n_steps", "save_last_n_epochs", "save_last_n_steps"),
        *("save_state", "save_state_on_train_end", "save_last_n_epochs_state", "save_last_n_steps_state"),
        *("resume", "initial_step", "initial_epoch", "skip_until_initial_step"),
        *("ddp_timeout", "ddp_gradient_as_bucket_view", "ddp_static_graph"),
    }
)
"""Options that may differ without a word: what they lead to is compared itself, or they don't touch what is learned."""
COUNTS_FROM_NOW_ON = frozenset(
    {
        *("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "vae_batch_size"),
        "cache_image_features_to_disk",
    }
)
"""Options inside ``FIXED_GROUPS`` that may differ: what is trained is the same, to rounding."""


def option_groups(options: TrainOptions) -> dict[str, str]:
    """Return option name -> name of its group."""
    return {option.name: group.name for group in fields(options) for option in fields(getattr(options, group.name))}


def option_values(options: TrainOptions) -> dict[str, Any]:
    """Return every option's value in the form it has in a state's facts."""
    return {name: json_value(getattr(getattr(options, group), name)) for name, group in option_groups(options).items()}


def changed_options(saved: Mapping[str, Any], options: TrainOptions) -> list[str]:
    """Return a line for each option that was changed and counts from now on.

    Raises:
        OptionError: an option has another value that the state does not fit to.
    """
    notes = []
    groups = option_groups(options)
    for name, now in option_values(options).items():
        if name in FREE or groups[name] in FREE_GROUPS or name not in saved or saved[name] == now:
            continue
        if name == "seed" and now is None:
            continue
        fixed = name in FIXED or groups[name] in FIXED_GROUPS
        if fixed and name not in COUNTS_FROM_NOW_ON:
            raise OptionError(
                f"resume: the state was saved with {name} = {saved[name]}, but {name} is {now} now. Set it back, or "
                "begin a new run with network_weights."
            )
        notes.append(f"resume: {name} was {saved[name]} and is {now} from here on")
    return notes


def fingerprint(network: nn.Module) -> str:
    """Identify the frozen weights of a network by names, shapes and some values of each tensor.

    What an adapter added (everything that trains) does not count.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        if parameter.requires_grad or parameter.is_meta:
            continue
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // VALUES_PER_TENSOR)][:VALUES_PER_TENSOR]
        digest.update(f"{plain_name(name)} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def plain_name(name: str) -> str:
    """Return a weight's name without what peft puts around a module that it adapts."""
    return name.replace(".base_layer", "")


def dataset_facts(index: DatasetIndex) -> list[list[str]]:
    """Return, in the order of the index, each image's name and a digest of all that is trained from it.

    Those that are held back for validation follow, with digests of their own.
    """
    rows = [(record, _digest(record)) for record in index.records]
    rows += [(record, f"held back {_digest(record)}") for record in index.held_back]
    return [[f"{record.path.parent.name}/{record.path.name}", digest] for record, digest in rows]


_NOT_TRAINED_FROM = (*("image_dir", "image_dir_note", "conditioning_data_dir", "validation_split", "validation_seed"),)
"""What a subset says that is not in its images; which of them are held back is compared itself."""


def _digest(record: ImageRecord) -> str:
    subset = {name: value for name, value in vars(record.subset).items() if name not in _NOT_TRAINED_FROM}
    told = (
        record.content_hash,
        record.captions,
        record.repeats,
        record.placement,
        record.dataset,
        sorted(subset.items()),
        None if record.mask is None else (record.mask.channel, record.mask.content_hash),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def refuse_other_dataset(saved: Sequence[Sequence[str]], index: DatasetIndex) -> None:
    """Raise OptionError, with the difference, unless the images are those of the state."""
    now = dataset_facts(index)
    before = [list(row) for row in saved]
    if now == before:
        return
    old, new = {row[0]: row[1] for row in before}, {row[0]: row[1] for row in now}
    parts = [
        (len(names), f"{what}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}")
        for what, names in (
            ("gone", sorted(old.keys() - new.keys())),
            ("new", sorted(new.keys() - old.keys())),
            (
                "changed (pixels, mask, caption, repeats, size, or held back or not)",
                sorted(n for n in old.keys() & new.keys() if old[n] != new[n]),
            ),
        )
        if names
    ]
    told = "; ".join(f"{count} {text}" for count, text in parts) or "their order is another"
    raise OptionError(
        f"resume: the images are not those of the state ({told}). Put them back, or begin a new run with "
        "network_weights."
    )


def refuse_other_encoders(saved: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Raise OptionError unless text encoders and VAE are those of the state.

    Returns a line for the user where the state is of an early version, which said nothing about them.
    """
    if saved is None:
        return [
            "resume: the state is of an earlier version of Maulstick, which kept nothing about the text encoders and "
            "the VAE; whether they are the same cannot be checked"
        ]
    others = [name.replace("_", " ") for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
    if others:
        raise OptionError(
            f"resume: the state belongs to a base model with the same UNet but another {' and another '.join(others)}. "
            "Name the model (and vae) that it was trained with, or begin a new run with network_weights."
        )
    return []


def refuse_other_parameters(saved: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> None:
    """Raise OptionError, with the difference, unless the trained tensors are those of the state."""
    if {name: list(shape) for name, shape in saved.items()} == {name: list(shape) for name, shape in now.items()}:
        return
    gone, new = sorted(saved.keys() - now.keys()), sorted(now.keys() - saved.keys())
    if gone or new:
        told = f"{len(gone)} of the state's tensors are not trained now and {len(new)} are new: {(gone or new)[0]}"
    else:
        name = next(name for name in saved if list(saved[name]) != list(now[name]))
        told = f"{name} has shape {list(now[name])} now and had {list(saved[name])}"
    raise OptionError(f"resume: what is trained is not what the state holds ({told}).")
