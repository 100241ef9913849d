"""What the tests of network types share: a small network with modules of every form, and adapters on it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from maulstick.adapters.adapter_tensors import adapter_tensors
from maulstick.adapters.files import save_lora_file
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.kinds import AdapterKind, DoraKind, LohaKind, LokrKind, LoraKind, OftKind
from maulstick.adapters.targets import LoraTarget

KINDS = {
    "lora": LoraKind(),
    "dora": DoraKind(),
    "dora on output": DoraKind(on_output=True),
    "loha": LohaKind(),
    "lokr": LokrKind(),
    "lokr factor": LokrKind(factor=2),
    "lokr both": LokrKind(factor=8, decompose_both=True),
    "oft": OftKind(),
}
Q = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
FF = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
CONV1 = "mid_block.attentions.0.proj_in"
CONV3 = "down_blocks.1.resnets.0.conv1"
DOWN = "down_blocks.0.downsamplers.0.conv"


def network() -> nn.Module:
    """Modules of every form at the paths of a UNet; the Linear without bias, one convolution with a stride."""
    torch.manual_seed(3)
    forms = {
        Q: nn.Linear(12, 24, bias=False),
        FF: nn.Linear(20, 12),
        CONV1: nn.Conv2d(12, 16, 1),
        CONV3: nn.Conv2d(8, 24, 3, padding=1),
        DOWN: nn.Conv2d(8, 8, 3, stride=2, padding=1),
    }
    root = nn.Module()
    for path, module in forms.items():
        parent = root
        *parts, last = path.split(".")
        for part in parts:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, module)
    return root


RANKS = {Q: (4, 2.0), FF: (3, 5.0), CONV1: (2, 2.0), CONV3: (4, 1.0), DOWN: (8, 3.0)}


def plan(root: nn.Module, kind: AdapterKind) -> list[LoraTarget]:
    targets = []
    for path, (dim, alpha) in RANKS.items():
        module = root.get_submodule(path)
        form = "linear" if isinstance(module, nn.Linear) else f"conv{module.kernel_size[0]}x{module.kernel_size[0]}"
        targets.append(LoraTarget("unet", path, form, "", tuple(module.weight.shape), dim, alpha, None))
    return [kind.fitted(target) for target in targets]


def inputs(module: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(module, nn.Linear):
        return torch.randn(2, 5, module.in_features, generator=generator)
    return torch.randn(2, module.in_channels, 6, 6, generator=generator)


def outputs(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    x = inputs(module)
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, module.bias)
    return F.conv2d(x, weight, module.bias, module.stride, module.padding)


def change(root: nn.Module, kind: AdapterKind, seed: int = 5) -> None:
    """Move every trained value at random, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for entry in kind.parameters(root):
            entry.parameter.add_(0.3 * torch.randn(entry.parameter.shape, generator=generator))


def trained(kind: AdapterKind, **injection) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A network with a changed adapter, and its base modules by path."""
    root = network()
    base = {path: root.get_submodule(path) for path in RANKS}
    kind.inject(root, plan(root, kind), **injection)
    change(root, kind)
    return root.eval(), base


def written(root: nn.Module, kind: AdapterKind, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    path = folder / "adapter.safetensors"
    save_lora_file(path, adapter_tensors({"unet": kind.state(root)}, SD_KEY_NAMES, dtype), {})
    return path
