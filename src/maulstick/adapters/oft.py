"""OFT on a frozen model (arXiv 2306.07280): groups of neighbouring outputs are turned by an orthogonal matrix.

For a block of n outputs: ``W' = R^T W`` with ``R = (1 + Q) (1 - Q)^-1`` and ``Q = -Q^T`` (Cayley's map). This is what
LyCORIS, ComfyUI and the web UI read as ``oft_blocks``, where ``Q = blocks - blocks^T``. PEFT's own OFT turns the inputs
instead, which no reader of Stable Diffusion files knows, and its convolutions larger than 1x1 do not start at the
identity; so only peft's way of attaching layers is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from peft import PeftType
from peft.tuners.lycoris_utils import LycorisConfig, LycorisLayer, LycorisTuner
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from maulstick.adapters.injection import DEFAULT_ADAPTER, base_weight, rank_settings, start_tensor
from maulstick.adapters.lean import LoraDropout, refuse_unusual
from maulstick.adapters.module_kinds import OftWeights, rotation_change
from maulstick.adapters.targets import LoraTarget
from maulstick.adapters.whole_change import attach, is_left_out, layers
from maulstick.errors import OptionError

UNLIMITED = 8192.0
"""Alpha in the file. Readers take it for a limit on the norm of Q (ComfyUI for the norm itself, the others times the
number of outputs), and some take 0 for "no turn at all"; this one is beyond every norm, and exact in bf16 and fp16."""


class OftLayer(nn.Module, LycorisLayer):
    """OFT of a Linear or Conv2d module: ``y + y (R - 1)`` on the output before its bias, block by block."""

    adapter_layer_names = ("oft_skew",)
    # peft's; its base class sets them without types.
    r: dict[str, int]
    alpha: dict[str, float]
    scaling: dict[str, float]
    base_layer: nn.Module
    active_adapters: list[str]
    get_base_layer: Any
    set_adapter: Any

    def __init__(self, base_layer: nn.Module, adapter_name: str, block_size: int) -> None:
        super().__init__()
        refuse_unusual(base_layer, "OFT")
        LycorisLayer.__init__(self, base_layer)
        self.oft_skew = nn.ParameterDict({})
        self.lora_noise: dict[str, LoraDropout] = {}
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, block_size, block_size)

    @property
    def _available_adapters(self) -> set[str]:
        return set(self.oft_skew)

    def update_layer(self, adapter_name: str, r: int, alpha: float, **kwargs: Any) -> None:
        """Add an adapter with blocks of ``r`` outputs; ``alpha`` is the same, for strength 1."""
        self.r[adapter_name], self.alpha[adapter_name], self.scaling[adapter_name] = r, alpha, 1.0
        self.create_adapter_parameters(adapter_name, r)
        self.set_adapter(self.active_adapters)

    def create_adapter_parameters(self, adapter_name: str, r: int, **kwargs: Any) -> None:
        """Make room for what lies above the diagonal of each block's Q."""
        blocks = base_weight(self).shape[0] // r
        self.oft_skew[adapter_name] = nn.Parameter(torch.empty(blocks, r * (r - 1) // 2))

    def reset_adapter_parameters(self, adapter_name: str) -> None:
        """Go back to the identity."""
        nn.init.zeros_(self.oft_skew[adapter_name])

    def turn(self, adapter_name: str) -> Tensor:
        """``R - 1`` of each block, (blocks, n, n) in fp32."""
        skew = self.oft_skew[adapter_name]
        with torch.autocast(skew.device.type, enabled=False):
            return rotation_change(upper_triangles(skew, self.r[adapter_name]))

    def get_delta_weight(self, adapter_name: str, *, apply_rank_dropout: bool = False) -> Tensor:
        """What the adapter changes in the weight, in fp32."""
        weight = base_weight(self).to(torch.float32)
        blocks = weight.view(-1, self.r[adapter_name], weight[0].numel())
        change = torch.einsum("knm,kni->kmi", self.turn(adapter_name), blocks)
        return self.scaling[adapter_name] * change.reshape(weight.shape)

    def _get_delta_activations(self, adapter_name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Added to the output ``x`` without bias, whose channels are the last (Linear) or the second (Conv2d)."""
        turn = self.turn(adapter_name) * self.scaling[adapter_name]
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(turn.dtype)
        if isinstance(self.get_base_layer(), nn.Linear):
            return torch.einsum("...kn,knm->...km", x.unflatten(-1, turn.shape[:2]), turn).flatten(-2)
        return torch.einsum("bknhw,knm->bkmhw", x.unflatten(1, turn.shape[:2]), turn).flatten(1, 2)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged_adapters:
            return result
        base: Any = self.get_base_layer()
        bias = base.bias
        if bias is not None and isinstance(base, nn.Conv2d):
            bias = bias.view(1, -1, 1, 1)
        plain = result if bias is None else result - bias
        base_dtype = result.dtype
        for name in self.active_adapters:
            noise = self.lora_noise.get(name) if self.training else None
            if name in self._available_adapters and not (noise is not None and is_left_out(noise)):
                result = result + self._get_delta_activations(name, plain)
        return result.to(base_dtype)


@dataclass
class _OftConfig(LycorisConfig):
    r: int = 4
    alpha: float = 4.0
    target_modules: str = ""
    exclude_modules: None = None
    inference_mode: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.OFT


class _OftModel(LycorisTuner):
    prefix = "oft_skew"
    tuner_layer_cls = OftLayer
    target_module_mapping: ClassVar[dict[str, Any]] = {}
    layers_mapping: ClassVar = {nn.Conv2d: OftLayer, nn.Linear: OftLayer}

    def _create_and_replace(
        self, config: Any, adapter_name: str, target: nn.Module, target_name: str, parent: nn.Module, current_key: str
    ) -> None:
        key = get_pattern_key(config.rank_pattern.keys(), current_key)
        block_size = config.rank_pattern.get(key, config.r)
        if isinstance(target, OftLayer):
            target.update_layer(adapter_name, block_size, block_size)
            return
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        self._replace_module(parent, target_name, OftLayer(base, adapter_name, block_size), target)


def upper_triangles(skew: Tensor, size: int) -> Tensor:
    """(blocks, n(n-1)/2) -> (blocks, n, n) with these values above the diagonal, row by row, and 0 elsewhere."""
    rows, columns = torch.triu_indices(size, size, 1, device=skew.device)
    full = skew.new_zeros(skew.shape[0], size, size)
    return full.index_put((torch.arange(skew.shape[0], device=skew.device)[:, None], rows, columns), skew)


def skew_of(blocks: Tensor) -> Tensor:
    """The values above the diagonal of ``blocks - blocks^T``, (blocks, n(n-1)/2)."""
    rows, columns = torch.triu_indices(blocks.shape[-1], blocks.shape[-1], 1, device=blocks.device)
    return (blocks - blocks.mT)[:, rows, columns]


def oft_target(target: LoraTarget) -> LoraTarget:
    """The target with the block size that fits: the largest divisor of its outputs that is not above ``dim``."""
    outputs = target.shape[0]
    size = next((size for size in range(min(target.dim, outputs), 1, -1) if outputs % size == 0), 1)
    if size == 1:
        raise OptionError(
            f"network_type = oft turns blocks of at most network_dim (or conv_dim) = {target.dim} outputs, but the "
            f"{outputs} outputs of '{target.path}' cannot be split into blocks of 2 to {target.dim}. Raise it."
        )
    return replace(target, dim=size, alpha=float(size))


def oft_shapes(target: LoraTarget) -> dict[str, tuple[int, ...]]:
    """Name of a trained tensor -> its shape; ``target`` as ``oft_target`` gives it."""
    return {"oft_skew": (target.shape[0] // target.dim, target.dim * (target.dim - 1) // 2)}


def inject_oft(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    *,
    adapter_name: str = DEFAULT_ADAPTER,
    dropout: LoraDropout | None = None,
) -> dict[str, Any]:
    """Attach an OFT with blocks of at most ``dim`` outputs, at the identity; return path -> layer."""
    targets = [oft_target(target) for target in targets]
    settings = rank_settings(targets)
    config = _OftConfig(r=settings.rank, target_modules=settings.target_modules, rank_pattern=settings.rank_pattern)
    modules = attach(_OftModel, config, root, targets, adapter_name, dropout)
    for target in targets:
        module = modules[target.path]
        shape, device = module.oft_skew[adapter_name].shape, base_weight(module).device
        module.oft_skew[adapter_name] = start_tensor(shape, device, target, 0, lambda start, _: start.zero_())
    return modules


def oft_modules(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, Any]:
    """Path -> OFT layer, in module order."""
    return layers(root, OftLayer, adapter_name)


def oft_weights(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> OftWeights:
    """The blocks as a file has them."""
    skew = module.oft_skew[adapter_name].detach()
    return OftWeights(upper_triangles(skew, module.r[adapter_name]), UNLIMITED)
