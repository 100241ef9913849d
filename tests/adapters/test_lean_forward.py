"""The lean forward against peft's own, and the dropouts against their definition."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from maulstick.adapters.lean import LeanConv2d, LeanLinear, LoraDropout, lean_or_none
from maulstick.errors import ModelError, OptionError

LAYERS = {
    "linear": (lambda: nn.Linear(24, 16), (3, 7, 24)),
    "linear_2d": (lambda: nn.Linear(24, 16, bias=False), (5, 24)),
    "conv1x1": (lambda: nn.Conv2d(12, 16, 1), (2, 12, 6, 5)),
    "conv3x3": (lambda: nn.Conv2d(12, 16, 3, padding=1), (2, 12, 6, 5)),
    "conv3x3_stride": (lambda: nn.Conv2d(12, 16, 3, stride=2, padding=1), (2, 12, 6, 5)),
}


def _wrapped(layer: nn.Module, *, lean: bool, names: tuple[str, ...] = ("default",), dtype=None) -> nn.Module:
    """A copy of the layer with LoRAs of rank 4 and strength 0.5, the same values whether lean or not, in fp32."""
    model = nn.Sequential(type(layer)(*_arguments(layer)))
    model[0].load_state_dict(layer.state_dict())
    if dtype is not None:
        model.to(dtype)
    for name in names:
        config = LoraConfig(r=4, lora_alpha=2, target_modules=["0"])
        if lean:
            config._register_custom_module({nn.Linear: lean_or_none, nn.Conv2d: lean_or_none})
        inject_adapter_in_model(config, model, name)
    module = model[0]
    for index, name in enumerate(names):
        generator = torch.Generator().manual_seed(index)
        for factor in (module.lora_A[name], module.lora_B[name]):
            factor.weight = nn.Parameter(torch.randn(factor.weight.shape, generator=generator) * 0.3)
    module.set_adapter(list(names))
    return module


def _arguments(layer: nn.Module) -> tuple:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, layer.bias is not None
    return layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding


def _run(module: nn.Module, x: torch.Tensor, autocast: torch.dtype | None) -> list[torch.Tensor]:
    """Output, gradient of the input, and gradients of both factors."""
    x = x.clone().requires_grad_()
    context = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    with context:
        output = module(x)
    weight = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    (output.float() * weight).sum().backward()
    return [output, x.grad, module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("base_dtype", "autocast", "rounding"),
    [
        (torch.float32, None, 2e-6),
        (torch.float32, torch.bfloat16, 2**-7),
        (torch.float32, torch.float16, 2**-10),
        (torch.bfloat16, torch.bfloat16, 2**-7),
        (torch.float16, torch.float16, 2**-10),
        (torch.bfloat16, None, 2**-7),
        (torch.float16, None, 2**-10),
    ],
)
def test_equals_peft(kind, base_dtype, autocast, rounding):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = build(), torch.randn(shape).to(base_dtype)
    lean, stock = (_wrapped(layer, lean=lean, dtype=base_dtype) for lean in (True, False))
    assert isinstance(lean, (LeanLinear, LeanConv2d))
    assert not isinstance(stock, (LeanLinear, LeanConv2d))
    for ours, theirs in zip(_run(lean, x, autocast), _run(stock, x, autocast), strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours.float() - theirs.float()).abs().max()
        assert error <= 2 * rounding * theirs.float().abs().max()
    # The factors matter: the comparison would not notice an adapter that does nothing.
    assert (lean(x) - lean.base_layer(x)).abs().max() > 0.05


def test_bf16_autocast_rounds_no_worse_than_peft():
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 96), torch.randn(4, 50, 96)
    exact = _wrapped(layer, lean=False).double()(x.double())
    errors = {}
    for lean in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            errors[lean] = (_wrapped(layer, lean=lean)(x).double() - exact).square().mean().sqrt().item()
    assert errors[True] <= errors[False] * 1.02


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("kind", LAYERS)
def test_several_adapters_with_strengths_add_up_as_in_peft(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = build(), torch.randn(shape)
    outputs = []
    for lean in (True, False):
        module = _wrapped(layer, lean=lean, names=("first", "second"))
        module.set_scale("first", 0.7)
        module.set_scale("second", -0.3)
        outputs.append(module(x))
        module.set_adapter(["second"])
        outputs.append(module(x))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-2)


@pytest.mark.parametrize("kind", LAYERS)
def test_merged_and_disabled_adapters(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, x = build(), torch.randn(shape)
    module = _wrapped(layer, lean=True)
    plain, adapted = layer(x), module(x)
    module.merge()
    torch.testing.assert_close(module(x), adapted)
    module.unmerge()
    torch.testing.assert_close(module(x), adapted)
    module.enable_adapters(False)
    torch.testing.assert_close(module(x), plain)
    module.enable_adapters(True)
    torch.testing.assert_close(module(x), adapted)


def test_dora_takes_pefts_forward():
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 16), torch.randn(5, 24)
    outputs = []
    for lean in (True, False):
        model = nn.Sequential(nn.Linear(24, 16))
        model[0].load_state_dict(layer.state_dict())
        config = LoraConfig(r=4, lora_alpha=2, target_modules=["0"], use_dora=True)
        if lean:
            config._register_custom_module({nn.Linear: lean_or_none})
        torch.manual_seed(3)
        inject_adapter_in_model(config, model)
        with torch.no_grad():
            model[0].lora_B["default"].weight.fill_(0.2)
        outputs.append(model(x))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], layer(x), atol=1e-2)


def _middle(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The activations between the factors."""
    return module.lora_A["default"](x)


def _finish(module: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return module.base_layer(x) + module.lora_B["default"](z) * module.scaling["default"]


@pytest.mark.parametrize("kind", LAYERS)
def test_neuron_dropout_acts_on_the_rank_activations(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    module, x = _wrapped(build(), lean=True), torch.randn(shape)
    module.lora_noise["default"] = LoraDropout(neuron=0.4)
    torch.manual_seed(7)
    output = module(x)
    torch.manual_seed(7)
    expected = _finish(module, x, nn.functional.dropout(_middle(module, x), 0.4))
    torch.testing.assert_close(output, expected)
    assert not torch.allclose(output, _finish(module, x, _middle(module, x)), atol=1e-3)


@pytest.mark.parametrize("kind", LAYERS)
def test_rank_dropout_masks_whole_channels_per_sample(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    module, x = _wrapped(build(), lean=True), torch.randn(shape)
    rank_axis = 1 if kind.startswith("conv") else -1
    module.lora_noise["default"] = LoraDropout(rank=0.5)
    torch.manual_seed(11)
    output = module(x)
    z = _middle(module, x)
    torch.manual_seed(11)
    mask = (torch.rand(shape[0], 4) > 0.5).float()
    assert 0 < mask.sum() < mask.numel()
    mask_shape = [1] * z.dim()
    mask_shape[0], mask_shape[rank_axis] = mask.shape
    torch.testing.assert_close(output, _finish(module, x, z * mask.reshape(mask_shape) / 0.5))


def test_rank_dropout_keeps_the_expectation():
    torch.manual_seed(0)
    module, x = _wrapped(nn.Linear(24, 16), lean=True), torch.randn(1, 24)
    module.lora_noise["default"] = LoraDropout(rank=0.25)
    with torch.no_grad():
        mean = module(x.expand(20_000, 24)).mean(dim=0, keepdim=True)
        exact = _finish(module, x, _middle(module, x))
    torch.testing.assert_close(mean, exact, atol=0.03, rtol=0)


def test_module_dropout_leaves_the_module_out_at_its_rate():
    torch.manual_seed(0)
    module, x = _wrapped(nn.Linear(24, 16), lean=True), torch.randn(2, 24)
    module.lora_noise["default"] = LoraDropout(module=0.3)
    with torch.no_grad():
        plain, adapted = module.base_layer(x), _finish(module, x, _middle(module, x))
        left_out = 0
        for _ in range(2000):
            output = module(x)
            is_plain = torch.allclose(output, plain, atol=1e-5)
            assert is_plain or torch.allclose(output, adapted, atol=1e-5)  # no rescaling
            left_out += is_plain
    assert 0.26 < left_out / 2000 < 0.34


@pytest.mark.parametrize("kind", LAYERS)
def test_no_dropout_in_evaluation(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    module, x = _wrapped(build(), lean=True).eval(), torch.randn(shape)
    before = module(x)
    module.lora_noise["default"] = LoraDropout(neuron=0.9, rank=0.9, module=0.9)
    torch.testing.assert_close(module(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["linear", "conv3x3"])
def test_checkpointing_draws_the_same_dropout_again(kind):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    module, x = _wrapped(build(), lean=True), torch.randn(shape)
    module.lora_noise["default"] = LoraDropout(neuron=0.3, rank=0.3, module=0.3)
    seen_left_out = seen_used = False
    for seed in range(8):
        gradients = []
        for use_checkpoint in (False, True):
            module.zero_grad()
            torch.manual_seed(seed)
            output = checkpoint(module, x, use_reentrant=False) if use_checkpoint else module(x)
            if output.requires_grad:
                output.square().sum().backward()
            gradients.append([factor["default"].weight.grad for factor in (module.lora_A, module.lora_B)])
        for direct, recomputed in zip(*gradients, strict=True):
            if direct is None:
                seen_left_out = True
                assert recomputed is None
            else:
                seen_used = True
                torch.testing.assert_close(direct, recomputed, rtol=0, atol=0)
    assert seen_left_out
    assert seen_used


@pytest.mark.parametrize("field", ["neuron", "rank", "module"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_probabilities_out_of_range_are_refused(field, value):
    names = {"neuron": "network_dropout", "rank": "rank_dropout", "module": "module_dropout"}
    with pytest.raises(OptionError, match=names[field]):
        LoraDropout(**{field: value})


class _Quantised(nn.Linear):
    """Stands for bitsandbytes' Linear8bitLt and its like: a Linear by class, whose weight is not floating point."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.int8), requires_grad=False)


def test_quantised_layers_are_left_to_peft():
    assert lean_or_none(_Quantised(4, 4), "default", config=LoraConfig(), r=2, lora_alpha=2) is None


def test_unusual_convolutions_are_refused():
    with pytest.raises(ModelError, match="groups=2"):
        lean_or_none(nn.Conv2d(4, 4, 3, groups=2), "default", config=LoraConfig(), r=2, lora_alpha=2)
    with pytest.raises(ModelError, match=r"dilation=\(2, 2\)"):
        lean_or_none(nn.Conv2d(4, 4, 3, dilation=2), "default", config=LoraConfig(), r=2, lora_alpha=2)
