"""Frozen weights in eight bits: what is lost, what gradients come back, and what a backward pass keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from maulstick.adapters.fp8 import (
    FP8,
    Fp8Conv2d,
    Fp8Linear,
    quantised,
    restored,
    store_in_fp8,
    stored_bytes,
    whole_weight,
)
from maulstick.errors import ModelError


def test_rows_use_the_range_of_the_format() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 0, 64)[:, None]
    small, scales = quantised(weight)
    assert small.dtype == FP8
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    back = restored(small, scales, torch.float32)
    # Three digits after the leading one: half a step is 1/16 of the value, where it is not far below its row's largest.
    near = weight.abs() > weight.abs().amax(1, keepdim=True) / 2**9
    near &= scales[:, None] > 2.0**-14
    assert ((back - weight).abs()[near] <= weight.abs()[near] / 16).all()
    plain = weight.to(FP8).float()
    assert (back - weight).norm(dim=1).div((plain - weight).norm(dim=1)).max() < 1.01
    assert (back - weight)[20].norm() < 0.1 * (plain - weight)[20].norm()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(restored(small, scales, dtype)[32:].float(), back[32:])


@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_computes_with_the_restored_weight_and_so_does_its_gradient(layer: str, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(12, 8) if layer == "linear" else nn.Conv2d(12, 8, 3, stride=2, padding=1)
    plain.requires_grad_(False)
    small = copy.deepcopy(plain)
    root = nn.ModuleDict({"layer": small})
    store_in_fp8(root)
    assert isinstance(small, Fp8Linear | Fp8Conv2d)
    assert small.weight.dtype == FP8
    plain.weight.data = whole_weight(small)
    inputs = [torch.randn(2, 3, 12) if layer == "linear" else torch.randn(2, 12, 6, 6)] * 2
    inputs = [each.clone().requires_grad_() for each in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = [module(x) for module, x in zip((plain, small), inputs, strict=True)]
    assert outputs[0].dtype == outputs[1].dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)
    for output in outputs:
        output.float().square().sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert (inputs[1].grad - inputs[0].grad).norm() < (0.01 if autocast else 1e-5) * inputs[0].grad.norm()


def test_a_backward_pass_keeps_no_restored_weight() -> None:
    root = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    store_in_fp8(root)
    kept: list[torch.Tensor] = []
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        root(x)
    assert {tensor.dtype for tensor in kept if tensor.numel() == 64 * 32} == {FP8}


def test_what_trains_and_what_is_kept_stays() -> None:
    root = nn.ModuleDict({"conv_in": nn.Linear(8, 8), "block": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    root.requires_grad_(False)
    root["trained"] = nn.Linear(8, 8)
    assert stored_bytes(root, in_fp8=False) == 4 * (2 * 72 + 16)
    expected = stored_bytes(root, in_fp8=True, keep={"conv_in"})
    store_in_fp8(root, keep={"conv_in"})
    assert [name for name, module in root.named_modules() if isinstance(module, Fp8Linear)] == ["block"]
    assert expected == stored_bytes(root, in_fp8=False) == 4 * (72 + 8 + 16) + 64
    root["block"] = nn.Linear(8, 8).requires_grad_(False)
    root["block"].weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match="'block' is not finite"):
        store_in_fp8(root)
