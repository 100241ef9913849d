"""What the options of an IP-Adapter say together, and that they are not given for anything else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from maulstick.errors import OptionError
from maulstick.options.ip_adapter_schema import IpAdapterOptions
from maulstick.options.schema import TrainOptions

_RATES_OF_TEXT = ("text_encoder_lr", "text_encoder_lr1", "text_encoder_lr2")
_DROPS = ("image_dropout_rate", "text_dropout_rate", "image_text_dropout_rate")


def check_ip_adapter(options: TrainOptions, given: Collection[str], *, with_files: bool = True) -> None:
    """Refuse options of an IP-Adapter without one, and what cannot be meant with one.

    Raises:
        OptionError: the message names the option and what to do.
    """
    own = options.ip_adapter
    if options.network.network_type != "ip_adapter":
        for name in (option.name for option in fields(IpAdapterOptions)):
            if name in given:
                raise OptionError(
                    f"{name} belongs to network_type = ip_adapter, but network_type is {options.network.network_type}. "
                    "Remove it, or train an IP-Adapter."
                )
        return
    if own.image_encoder is None and with_files:
        raise OptionError(
            "network_type = ip_adapter needs image_encoder: the folder of a CLIP vision model with projection (SD 1.x, "
            "2.x, SDXL) or of a SigLIP vision model (SD3)."
        )
    for name in _RATES_OF_TEXT:
        if name in given:
            raise OptionError(
                f"{name} does not work with network_type = ip_adapter: no text encoder is trained. Remove it."
            )
    total = sum(getattr(own, name) for name in _DROPS)
    if total >= 1:
        raise OptionError(
            f"{', '.join(_DROPS)} add up to {total:g}, but at most one of them happens to an image: their sum must be "
            "below 1."
        )
    if options.dataset.caption_dropout_rate:
        raise OptionError(
            f"caption_dropout_rate = {options.dataset.caption_dropout_rate:g} would come on top of text_dropout_rate, "
            "which drops captions in an IP-Adapter's training. Set text_dropout_rate instead."
        )
    if options.dataset.flip_aug and options.dataset.conditioning_data_dir is not None:
        raise OptionError(
            "flip_aug with conditioning_data_dir would mirror images and not their references. Remove flip_aug."
        )
    if options.sample.sample_prompts is not None and own.sample_ip_image is None:
        raise OptionError("sample_prompts needs sample_ip_image here: a picture for the IP-Adapter to look at.")
    if own.sample_ip_image is not None and options.sample.sample_prompts is None:
        raise OptionError("sample_ip_image is given without sample_prompts. Name a text file with one prompt a line.")
