"""What the options about images say together."""

from __future__ import annotations

from maulstick.errors import OptionError, contradiction
from maulstick.options.dataset_config import parse_resolution
from maulstick.options.schema import DatasetOptions, TrainOptions


def check_data(options: TrainOptions) -> None:
    """Refuse options about images that contradict each other.

    Raises:
        OptionError: the message names them and says what to do.
    """
    data = options.dataset
    _check_masks(data, options.network.network_type)
    for name in ("random_crop", "color_aug"):
        # With a description, what its subsets say counts.
        if getattr(data, name) and data.cache_latents and data.dataset_config is None:
            reason = "latents are cached once, and such images are others each time. Remove one of them."
            raise contradiction(name, "cache_latents", reason)
    width, height = parse_resolution(data.resolution)
    if data.skip_image_resolution is not None:
        parse_resolution(data.skip_image_resolution, "skip_image_resolution")
    if data.dataset_config is not None:
        for name in ("train_data_dir", "reg_data_dir"):
            if getattr(data, name) is not None:
                raise contradiction("dataset_config", name, "both name image folders. Leave one of them out.")
        return
    if data.min_bucket_reso > data.max_bucket_reso:
        raise contradiction(
            f"min_bucket_reso = {data.min_bucket_reso}",
            f"max_bucket_reso = {data.max_bucket_reso}",
            "it must be smaller.",
        )
    if not data.enable_bucket:
        if width % 8 or height % 8:
            raise OptionError(f"resolution = {data.resolution}: the sides of an image must be multiples of 8 pixels.")
        return
    for name, fits in (
        ("min_bucket_reso", data.min_bucket_reso <= min(width, height)),
        ("max_bucket_reso", data.max_bucket_reso >= max(width, height)),
    ):
        if not fits:
            raise contradiction(
                f"{name} = {getattr(data, name)}",
                f"resolution = {data.resolution}",
                "the size of training must lie between min_bucket_reso and max_bucket_reso. Change one of them.",
            )


def _check_masks(data: DatasetOptions, network_type: str) -> None:
    is_ip_adapter = network_type == "ip_adapter"
    if data.conditioning_data_dir is not None:
        if data.masked_loss and is_ip_adapter:
            raise contradiction(
                "masked_loss",
                "conditioning_data_dir",
                "it is the folder of an IP-Adapter's reference images. Name the masks in a dataset_config, each "
                "subset with a conditioning_data_dir of its own, or use alpha_mask.",
            )
        if not data.masked_loss and not is_ip_adapter:
            raise OptionError(
                "conditioning_data_dir is given, but nothing uses it: it holds masks with masked_loss, and reference "
                "images with network_type = ip_adapter. Add one of them, or remove it."
            )
        if data.masked_loss and data.alpha_mask:
            raise contradiction(
                "alpha_mask", "conditioning_data_dir", "masks are either alpha channels or files. Remove one of them."
            )
    elif data.masked_loss and not data.alpha_mask and data.dataset_config is None:
        raise OptionError(
            "masked_loss is given without masks. Give conditioning_data_dir (a folder of masks named as the images) or "
            "alpha_mask (the images' alpha channels)."
        )
