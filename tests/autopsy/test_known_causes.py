"""Known causes, each from a small case that really fails so, and each named right."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler
from diffusers.training_utils import compute_snr
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import T5Config, T5EncoderModel

from maulstick.autopsy import KNOWN_CAUSES, Direction, examine, explain_error

HALF = torch.float16


def first_cause(report):
    assert report.causes, report.text()
    return report.causes[0].id


class Small(nn.Module):
    """A trained layer behind whatever is tested."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(1, 1)

    def forward(self, *arguments):
        out = self.body(*arguments)
        out = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
        return self.head(out.float().mean().view(1)).sum()


def small_vae() -> AutoencoderKL:
    torch.manual_seed(0)
    config = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(**config, **blocks).requires_grad_(False)


@pytest.mark.parametrize("dtype, healthy", [(HALF, False), (torch.bfloat16, True), (torch.float32, True)])
def test_a_vae_that_overflows_in_fp16(dtype, healthy):
    vae = small_vae()
    with torch.no_grad():
        vae.encoder.down_blocks[1].resnets[0].conv1.weight.mul_(3e5)
    vae.to(dtype)
    head = nn.Linear(1, 1)
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    report = examine(
        lambda: head(vae.encode(pixels).latent_dist.mean.float().mean().view(1)).sum(), {"vae": vae, "head": head}
    )
    assert report.healthy is healthy
    if not healthy:
        assert report.finding.module == "vae.encoder.down_blocks.1.resnets.0.conv1"
        assert report.finding.tensor.dtype == "float16"
        assert report.finding.amax_in_fp32 > 65504
        assert first_cause(report) == "vae_fp16_overflow"


def test_t5_wo_in_fp16():
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="relu")
    encoder = T5EncoderModel(config).requires_grad_(False)
    with torch.no_grad():
        encoder.encoder.block[1].layer[1].DenseReluDense.wo.weight.fill_(1.5e3)
        encoder.encoder.block[1].layer[1].DenseReluDense.wi.weight.fill_(5.0)
    model = Small(encoder.to(HALF))
    report = examine(lambda: model(torch.arange(6)[None]), model)
    assert report.finding.module == "body.encoder.block.1.layer.1.DenseReluDense.wo"
    assert first_cause(report) == "t5_fp16_overflow"


@pytest.mark.parametrize("weight_of", ["min_snr", "debiased"])
def test_zero_terminal_snr_with_a_weight_by_snr(weight_of):
    scheduler = DDPMScheduler(rescale_betas_zero_snr=True, beta_schedule="scaled_linear")
    model = Small(nn.Identity())
    timesteps = torch.tensor([10, 999])

    def run():
        snr = compute_snr(scheduler, timesteps)
        weights = snr.clamp(max=5) / snr if weight_of == "min_snr" else 1 / snr.sqrt()
        return (model(torch.ones(2)) * weights).mean()

    facts = {"zero_terminal_snr": True, "min_snr_gamma": 5.0, "timesteps": timesteps.tolist()}
    report = examine(run, model, facts=facts)
    assert (report.finding.module, report.finding.direction) == (None, Direction.FORWARD)
    assert report.finding.tensor.kind == ("NaN" if weight_of == "min_snr" else "Inf")
    assert first_cause(report) == "zero_snr_weights"
    assert "timestep 999" in report.causes[0].evidence


class ToyAttention(nn.Module):
    def __init__(self, fused: bool, size: float) -> None:
        super().__init__()
        self.to_q = nn.Linear(16, 16, bias=False)
        self.to_k = nn.Linear(16, 16, bias=False)
        for layer in (self.to_q, self.to_k):
            nn.init.eye_(layer.weight)
            layer.weight.data.mul_(size)
        self.fused = fused

    def forward(self, x):
        q, k = self.to_q(x), self.to_k(x)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, x)
        return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ x


def test_attention_logits_without_qk_norm():
    torch.manual_seed(0)
    model = Small(ToyAttention(fused=False, size=100).to(HALF))
    x = torch.randn(1, 8, 16).to(HALF)
    report = examine(lambda: model(x), model)
    assert (report.finding.module, report.finding.module_class) == ("body", "ToyAttention")
    assert "mm" in report.finding.op
    assert first_cause(report) == "attention_logits"
    assert "no qk-norm" in report.causes[0].evidence
    logits = (x.float() * 100) @ (x.float() * 100).transpose(-1, -2)
    assert report.finding.amax_in_fp32 == pytest.approx(float(logits.abs().max()), rel=1e-2)
    assert examine(lambda: model.float()(x.float()), model).healthy


def test_a_projection_that_overflows_is_not_taken_for_logits():
    model = Small(ToyAttention(fused=False, size=6e4).to(HALF))
    report = examine(lambda: model(torch.full((1, 8, 16), 2.0, dtype=HALF)), model)
    assert report.finding.module == "body.to_q"
    assert first_cause(report) == "fp16_overflow"


def test_adamw_eps_is_zero_in_fp16():
    model = nn.Linear(2, 1, bias=False).to(HALF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8)
    x = torch.tensor([[1.0, 0.0]], dtype=HALF)
    report = examine(lambda: model(x).sum(), model, optimizer=optimizer)
    assert report.finding.direction is Direction.OPTIMIZER_STEP
    assert report.finding.tensor.name == "weight"
    assert [cause.id for cause in report.causes] == ["fp16_eps_underflow", "fp16_trainables"]
    roomy = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    healthy = examine(lambda: model(x).sum(), model, optimizer=roomy)
    assert healthy.healthy
    assert [cause.id for cause in healthy.causes] == ["fp16_trainables"]


def test_fp16_trainables_are_named_by_the_scalers_error_too():
    model = nn.Linear(2, 1).to(HALF)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(1, 2, dtype=HALF)).float().sum()).backward()
    with pytest.raises(ValueError) as caught:
        scaler.unscale_(optimizer)
    assert explain_error(caught.value).id == "fp16_trainables"


def test_a_loss_replaced_by_a_constant_is_named_by_the_scalers_error():
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(torch.zeros((), requires_grad=True) * 0).backward()
    with pytest.raises(AssertionError) as caught:
        scaler.step(optimizer)
    assert explain_error(caught.value).id == "no_gradients"
    assert explain_error("CUDA out of memory") is None


def test_a_zero_row_under_dora():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        base[0].weight[3] = 0
    model = get_peft_model(base, LoraConfig(target_modules=["0"], r=2, use_dora=True))
    report = examine(lambda: model(torch.ones(2, 4)).mean(), model)
    assert report.finding.direction is Direction.FORWARD
    assert first_cause(report) == "dora_zero_row"
    assert "row 3 of" in report.causes[0].evidence


@pytest.mark.parametrize("scale", [2.0**-130, 0.0])
def test_a_collapsed_loss_scale(scale):
    """144 overflows in a row: the scale's inverse is infinite in fp32, and a healthy gradient becomes Inf."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    report = examine(lambda: model(torch.ones(1, 2)).sum(), model, optimizer=optimizer, loss_scale=scale)
    assert report.finding.direction is Direction.OPTIMIZER_STEP
    assert first_cause(report) == "scaler_collapse"


def test_a_loss_scale_that_is_only_too_high():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x):
            return (x * self.weight.to(HALF)).float()

    model = Halves()
    x = torch.full((2,), 4.0, dtype=HALF)
    report = examine(lambda: model(x).sum(), model, loss_scale=65536.0)
    assert report.finding.direction is Direction.BACKWARD
    assert first_cause(report) == "loss_scale_overflow"
    assert examine(lambda: model(x).sum(), model, loss_scale=1024.0).healthy


def test_a_poisoned_optimizer_state():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().backward()
    model.weight.grad[0, 1] = math.nan
    kept = model.weight.detach().clone()
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(kept)  # what a rescue of the weights alone does
    report = examine(lambda: model(torch.ones(1, 2)).sum(), model, optimizer=optimizer)
    assert report.finding.direction is Direction.OPTIMIZER_STATE
    assert report.finding.tensor.name == "exp_avg of weight"
    assert first_cause(report) == "optimizer_state_poisoned"


@pytest.mark.parametrize("name, cause", [("latents", "nan_latents"), ("text.states", "nan_text_states")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_cached_inputs_that_are_not_finite(name, cause, value):
    model = Small(nn.Identity())
    given = torch.ones(2, 3)
    given[1, 1] = value
    report = examine(lambda: model(given * 2), model, inputs={name: given})
    assert report.finding.direction is Direction.INPUT
    assert report.finding.tensor.name == name
    assert first_cause(report) == cause


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.full_like(saved, math.nan) for saved in ctx.saved_tensors)


@pytest.mark.parametrize("path, cause", [("attn", "attention_backward"), ("mixer", "custom_backward")])
def test_a_broken_backward_of_an_attention_kernel(path, cause):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_qkv = nn.Linear(4, 12)

        def forward(self, x):
            return _Kernel.apply(*self.to_qkv(x).chunk(3, -1))

    block = nn.Module()
    block.add_module(path, Mixer())
    report = examine(lambda: getattr(block, path)(torch.ones(1, 3, 4)).mean(), block)
    assert (report.finding.direction, report.finding.module) == (Direction.BACKWARD, path)
    assert first_cause(report) == cause


@pytest.mark.parametrize("told", ["losses", "scheduler"])
def test_a_target_that_the_model_does_not_predict(told):
    """The losses of a model that predicts v, against both targets, at high noise."""
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 4, 8, 8, generator=generator)
    kept = 0.3
    v = kept**0.5 * noise - (1 - kept) ** 0.5 * clean
    prediction = v + 0.1 * torch.randn(v.shape, generator=generator)
    losses = {name: float(F.mse_loss(prediction, t)) for name, t in (("epsilon", noise), ("v_prediction", v))}
    facts = {"prediction_type": "epsilon"}
    facts |= {"loss_by_prediction_type": losses} if told == "losses" else {"model_prediction_type": "v_prediction"}
    model = Small(nn.Identity())
    report = examine(lambda: model(torch.ones(2)), model, facts=facts)
    assert report.healthy
    assert first_cause(report) == "wrong_prediction_type"
    right = examine(lambda: model(torch.ones(2)), model, facts=facts | {"prediction_type": "v_prediction"})
    assert right.causes == ()


def test_a_row_of_the_mask_that_hides_everything():
    class Attention(nn.Module):
        def forward(self, x):
            mask = torch.zeros(3, 3)
            mask[1] = -math.inf
            return (x @ x.transpose(-1, -2) + mask).softmax(-1) @ x

    model = Small(Attention())
    report = examine(lambda: model(torch.ones(1, 3, 4)), model)
    assert report.finding.op == "aten._softmax"
    assert first_cause(report) == "fully_masked_row"


def test_a_resampler_that_grows_beyond_fp16():
    class Resampler(nn.Module):
        def forward(self, x):
            return x * 12 + x

    model = nn.Module()
    model.image_proj = Resampler()
    head = nn.Linear(1, 1)
    x = torch.full((2, 3), 12296.0, dtype=HALF)
    report = examine(lambda: head(model.image_proj(x).float().mean().view(1)).sum(), {"model": model, "head": head})
    assert report.finding.module == "model.image_proj"
    assert first_cause(report) == "resampler_overflow"
    assert report.finding.amax_in_fp32 == pytest.approx(12 * 12296)


def test_an_optimizer_that_spoils_finite_gradients():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.view(-1)[0] = math.inf

    model = nn.Linear(2, 1)
    report = examine(lambda: model(torch.ones(1, 2)).sum(), model, optimizer=Broken(model.parameters(), lr=0.1))
    assert first_cause(report) == "optimizer_step"
    assert bool(torch.isfinite(model.weight).all())


def test_a_normalisation_without_eps():
    model = Small(nn.LayerNorm(4, eps=0.0))
    report = examine(lambda: model(torch.ones(2, 4)), model)
    assert report.finding.module == "body"
    assert first_cause(report) == "normalisation_of_nothing"


def test_values_that_outgrow_bf16():
    class Growing(nn.Module):
        def forward(self, x):
            return x * x

    model = Small(Growing())
    report = examine(lambda: model(torch.full((2,), 1e30, dtype=torch.bfloat16)), model)
    assert first_cause(report) == "diverged"


def test_the_fp16_path_of_an_old_card():
    model = Small(nn.Linear(2, 2).to(HALF))
    with torch.no_grad():
        model.body.weight.fill_(6e4)
    facts = {"device": "NVIDIA GeForce GTX 1660"}
    report = examine(lambda: model(torch.full((1, 2), 9.0, dtype=HALF)), model, facts=facts)
    assert "old_card_fp16" in [cause.id for cause in report.causes]


def test_every_known_cause_says_what_to_do_and_has_its_own_name():
    names = [cause.id for cause in KNOWN_CAUSES]
    assert len(set(names)) == len(names) >= 24
    for cause in KNOWN_CAUSES:
        assert cause.cure.endswith(".")
        assert cause.sentence.endswith(".")
