"""One step of the loop: gradients of a window, bad gradients, and the loss scaler on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from maulstick.options.objective_schema import ObjectiveOptions
from maulstick.train.events import read_events
from maulstick.train.objective import draw_noise
from maulstick.train.seeds import derive_seed
from maulstick.train.validate import denoising_loss

UNET_ONLY = ("--network_train_unet_only",)


def adapter_of(run):
    return {name: parameter.detach().clone() for name, parameter in run.loop.parts.named_parameters}


def spoil_gradients_at(run, step, value):
    """Put ``value`` into one gradient element of the window with this number (from 0)."""
    loop, accumulate = run.loop, run.loop.accumulate_gradients

    def accumulate_and_spoil(window, images):
        loss = accumulate(window, images)
        if loop.state.step == step:
            loop.parts.named_parameters[7][1].grad.view(-1)[3] = value
        return loss

    loop.accumulate_gradients = accumulate_and_spoil


def test_a_windows_gradient_is_that_of_the_mean_over_its_images(make_run):
    """Micro-batches of 2, 2 and 1 image: every image must weigh 1/5, whatever batch it is in."""
    run = make_run(*UNET_ONLY, "--gradient_accumulation_steps", "3", "--train_batch_size", "2")
    run.prepare()
    loop = run.loop
    (full, _), *_ = loop.windows(0)
    batches = [full[0], full[1], (full[2][0].__class__(0, 2, full[2][0].items[:1]), full[2][1][:1])]
    losses = []

    def remember(*arguments, forward=loop.forward):
        loss = forward(*arguments)
        losses.append(loss.detach())
        return loss

    loop.forward = remember
    mean = loop.accumulate_gradients(batches, 5.0)
    gradients = [p.grad.clone() for _, p in loop.parts.named_parameters if p.grad is not None]
    all_losses = torch.cat(losses)
    assert len(all_losses) == 5
    assert float(mean) == pytest.approx(float(all_losses.mean()), rel=1e-6)

    def one_backward():
        for _, parameter in loop.parts.named_parameters:
            parameter.grad = None
        total = 0.0
        for place, (batch, latents) in enumerate(batches):
            noise = torch.Generator().manual_seed(derive_seed(loop.parts.seed, "noise", 0, place, 0))
            total = total + loop.forward(batch, latents, noise).sum()
        (total / 5).backward()
        return [p.grad for _, p in loop.parts.named_parameters if p.grad is not None]

    for accumulated, together in zip(gradients, one_backward(), strict=True):
        torch.testing.assert_close(accumulated, together, rtol=1e-4, atol=1e-7)
    run.records.close("end")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_bad_gradient_never_reaches_the_weights(make_run, tmp_path, value, precision):
    run = make_run(*UNET_ONLY, "--mixed_precision", precision)
    run.prepare()
    spoil_gradients_at(run, 2, value)
    states = []
    update = run.loop.update

    def watch(window, loss):
        before = adapter_of(run)
        outcome = update(window, loss)
        after = adapter_of(run)
        states.append((outcome.skipped, all(torch.equal(before[name], after[name]) for name in before)))
        return outcome

    run.loop.update = watch
    result = run.train()
    assert states == [(False, False), (False, False), (True, True), (False, False), (False, False), (False, False)]
    assert (result.state.step, result.state.skipped) == (6, 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in adapter_of(run).values())
    events = read_events(tmp_path / "out" / "last.events.jsonl")
    (skip,) = [event for event in events if event["event"] == "skip"]
    assert skip["step"] == 3
    assert len(skip["images"]) == 2
    assert "gradient is" in skip["text"]
    scales = [event.get("train/loss_scale") for event in events if event["event"] == "step"]
    assert scales == ([None] * 6 if precision == "no" else [65536.0] * 2 + [32768.0] * 4)


def test_a_skipped_step_still_counts_for_the_schedule(make_run, tmp_path):
    run = make_run(*UNET_ONLY, "--lr_scheduler", "linear")
    run.prepare()
    spoil_gradients_at(run, 1, math.nan)
    run.train()
    steps = [event for event in read_events(tmp_path / "out" / "last.events.jsonl") if event["event"] == "step"]
    assert [step["lr/unet"] for step in steps] == pytest.approx([1e-3 * (6 - n) / 6 for n in range(6)])
    assert [step["train/skipped_steps"] for step in steps] == [0, 1, 1, 1, 1, 1]


def test_gradients_are_clipped_to_max_grad_norm(make_run):
    """One SGD step of rate 1 from a gradient clipped to 1e-3 moves the weights by 1e-3."""
    run = make_run(
        *UNET_ONLY,
        "--optimizer_type",
        "SGD",
        "--learning_rate",
        "1",
        "--max_grad_norm",
        "1e-3",
        "--max_train_steps",
        "1",
    )
    run.prepare()
    before = adapter_of(run)
    run.train()
    after = adapter_of(run)
    moved = math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in before))
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_noise_offset_shifts_whole_channels():
    latents = torch.zeros(400, 4, 8, 8)
    plain = draw_noise(latents, ObjectiveOptions(), torch.Generator().manual_seed(0))
    shifted = draw_noise(latents, ObjectiveOptions(noise_offset=0.5), torch.Generator().manual_seed(0))
    offset = (shifted - plain)[:, :, 0, 0]
    assert torch.allclose(shifted - plain, offset[:, :, None, None].expand_as(plain), atol=1e-6)
    assert float(offset.std()) == pytest.approx(0.5, rel=0.05)
    assert float(plain.std()) == pytest.approx(1.0, rel=0.01)


def test_held_out_loss_is_the_mean_over_ten_timesteps_of_fixed_noise(make_run):
    run = make_run(*UNET_ONLY)
    family = run.prepare().family
    run.records.close("end")
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    captions = ["a shape", "", "red"]
    measured = denoising_loss(family, latents, captions, batch_size=2)
    alphas = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, 0)
    generator = torch.Generator().manual_seed(0)
    losses = []
    family.denoiser.eval()
    with torch.no_grad():
        text = family.encode_text(family.tokenize(captions))["encoder_hidden_states"]
        for timestep in range(50, 1000, 100):
            noise = torch.randn(latents.shape, generator=generator)
            noisy = alphas[timestep] ** 0.5 * latents + (1 - alphas[timestep]) ** 0.5 * noise
            prediction = family.denoiser(noisy, torch.tensor(timestep), encoder_hidden_states=text).sample
            losses.append(float(((prediction - noise) ** 2).mean()))
    assert measured == pytest.approx(sum(losses) / 10, rel=1e-5)


@pytest.mark.parametrize("every, drawn", [("1", ["epoch000001", "epoch000002"]), ("2", ["epoch000002"]), ("3", [])])
def test_an_epoch_that_the_last_step_breaks_off_has_its_pictures_too(make_run, tmp_path, every, drawn):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a shape\n")
    run = make_run(*UNET_ONLY, "--sample_prompts", str(prompts), "--sample_every_n_epochs", every)
    plan, labels = run.prepare().plan, []
    assert plan.steps_per_epoch < plan.total_steps < 2 * plan.steps_per_epoch
    run.loop.parts.sample = lambda label, step: labels.append(label)
    run.train()
    assert labels == drawn
