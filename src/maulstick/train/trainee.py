"""The networks of a step as one module, so that one wrapper (DDP) sees everything that is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from maulstick.families.base import Conditioning, Family
from maulstick.options.schema import Precision
from maulstick.train.precision import autocast


class Trainee(nn.Module):
    """Denoiser and, where their LoRA is trained, text encoders, behind one forward pass."""

    def __init__(self, family: Family, *, trains_text_encoders: bool, precision: Precision) -> None:
        super().__init__()
        self.family = family
        self.precision = precision
        self.networks = nn.ModuleDict({"denoiser": family.denoiser})
        if trains_text_encoders:
            # One that never trains stays out: here it would get the dropout of training mode.
            trained = family.text_encoder_naming
            self.networks.update({name: part for name, part in family.text_encoders.items() if name in trained})

    def forward(
        self,
        noisy: Tensor,
        timesteps: Tensor,
        *,
        conditioning: Conditioning | None = None,
        tokens: Mapping[str, Tensor] | None = None,
        about_images: Conditioning | None = None,
    ) -> Tensor:
        """Return the denoiser's prediction for ``noisy`` (B, C, H, W).

        The text comes as finished ``conditioning``, or as ``tokens`` that the text encoders turn into it;
        ``about_images`` is what the family's ``image_conditioning`` gives.
        """
        device = noisy.device
        with autocast(torch.device(device), self.precision):
            if conditioning is None:
                if tokens is None:
                    raise ValueError("either conditioning or tokens must be given")
                conditioning = self.family.encode_text(tokens)
            return self.family.predict(noisy, timesteps, {**conditioning, **(about_images or {})})
