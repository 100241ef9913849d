"""The options about training images; the string under a field is its line in ``--help``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from maulstick.options import groups

Interpolation = Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"]


@Parameter(name="*", group=groups.DATA)
@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    train_data_dir: Path | None = None
    """Folder that holds image folders named REPEATS_name (such as 10_cat)."""
    reg_data_dir: Path | None = None
    """The same for regularisation images."""
    dataset_config: Path | None = None
    """Dataset description as sd-scripts' TOML, instead of train_data_dir."""
    resolution: str = "512"
    """Training size in pixels: N or WIDTH,HEIGHT."""
    resize_interpolation: Interpolation | None = None
    """Filter for resizing images; without it area averaging to shrink and lanczos to enlarge."""
    skip_image_resolution: str | None = None
    """Leave out images of no more pixels than this size has: N or WIDTH,HEIGHT."""
    train_batch_size: int = 1
    """Images per micro-batch and process."""
    caption_extension: str = ".txt"
    """Extension of the caption files; .txt and .caption are both looked for, this one first."""
    shuffle_caption: bool = False
    """Shuffle the comma-separated tags of a caption each time it is used."""
    keep_tokens: int = 0
    """Number of tags at the start that shuffling leaves in place."""
    keep_tokens_separator: str = ""
    """Mark in captions: what stands before it (and after a second one) is left in place, instead of keep_tokens."""
    secondary_separator: str | None = None
    """Mark between tags that are shuffled and dropped as one; it becomes caption_separator."""
    caption_separator: str = ","
    """What stands between the tags of a caption."""
    caption_prefix: str | None = None
    """Text put before every caption."""
    caption_suffix: str | None = None
    """Text put after every caption."""
    enable_wildcard: bool = False
    """Choose one of {red|green|blue} in captions each time, and one line of captions that have several."""
    caption_dropout_rate: float = 0.0
    """Chance (0 to 1) to train an image with an empty caption."""
    caption_dropout_every_n_epochs: int = 0
    """Train every n-th epoch with empty captions; 0 trains none so."""
    caption_tag_dropout_rate: float = 0.0
    """Chance (0 to 1) to leave out each tag that is not kept in place."""
    token_warmup_min: int = 1
    """Number of tags at the first step of token_warmup_step."""
    token_warmup_step: float = 0.0
    """Use more and more tags until this step (a fraction below 1: of all steps); 0 uses all at once."""
    enable_bucket: bool = False
    """Sort images into buckets by aspect ratio instead of cropping all to one size."""
    min_bucket_reso: int = 256
    """Shortest side of a bucket, in pixels."""
    max_bucket_reso: int = 1024
    """Longest side of a bucket, in pixels."""
    bucket_reso_steps: int = 64
    """Bucket sides are multiples of this many pixels."""
    bucket_no_upscale: bool = False
    """Never enlarge an image: small ones get a bucket of their own size."""
    flip_aug: bool = False
    """Mirror images at random, with chance 1/2."""
    random_crop: bool = False
    """Cut images at a random place after resizing instead of in the middle; not with cache_latents."""
    color_aug: bool = False
    """Change hue, saturation, brightness and contrast a little, with chance 1/2; not with cache_latents."""
    alpha_mask: bool = False
    """Weigh the loss by the alpha channels of the images; their colours are taken as they are, whatever the alpha."""
    masked_loss: bool = False
    """Weigh the loss by masks from conditioning_data_dir (white is trained, black is not), or by alpha_mask."""
    conditioning_data_dir: Path | None = None
    """Folder of masks (masked_loss) or of an IP-Adapter's reference images (without it), named as the images."""
    cache_latents: bool = False
    """Encode all images once before training and keep the latents in memory."""
    cache_latents_to_disk: bool = False
    """The same, kept as files beside the images for the next run."""
    vae_batch_size: int | None = None
    """Images encoded at once; without it as many as their size allows."""
    max_data_loader_n_workers: int | None = None
    """Most threads that read images while latents are made (four without it); 0 reads them in the training thread."""
    cache_text_encoder_outputs: bool = False
    """Encode captions once; the text encoder leaves the device where captions don't vary."""
    prior_loss_weight: float = 1.0
    """Weight of the loss of regularisation images."""
    validation_split: float = 0.0
    """Share of the training images (0 to 1) to hold back: never trained, the validation loss is measured on them."""
    validation_seed: int | None = None
    """Seed that chooses those images; without it that of the run."""
