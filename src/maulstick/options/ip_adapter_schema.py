"""The options of an IP-Adapter; the string under a field is its line in ``--help``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from maulstick.options import groups


@Parameter(name="*", group=groups.IP_ADAPTER)
@dataclass(frozen=True, kw_only=True)
class IpAdapterOptions:
    image_encoder: Path | None = None
    """Folder of the frozen image encoder: a CLIP vision model with projection, for SD3 a SigLIP one."""
    ip_adapter_type: Literal["plain", "plus"] | None = None
    """SD 1.x, 2.x and XL: plain (4 tokens of the whole image) or plus (16 tokens of its parts); plain without this."""
    ip_adapter_tokens: int | None = None
    """Tokens that an image becomes; without it 4 (plain, where nothing else is possible), 16 (plus) or 64 (SD3)."""
    image_dropout_rate: float = 0.05
    """Chance (0 to 1) to train without the reference image."""
    text_dropout_rate: float = 0.05
    """Chance (0 to 1) to train without the caption."""
    image_text_dropout_rate: float = 0.05
    """Chance (0 to 1) to train without either; of the three at most one happens to an image."""
    ip_adapter_scale_warmup_steps: int = 0
    """Let the scale of the IP-Adapter rise to 1 over so many steps; SD3's starts as the base model only with this."""
    cache_image_features_to_disk: Annotated[bool, Parameter(negative="--no-cache_image_features_to_disk")] = True
    """Keep the features of reference images as files beside them."""
    sample_ip_image: Path | None = None
    """Reference image of the sample pictures; needed with sample_prompts."""
