"""Alarms: each fires once on a planted fault, names it, and none on a healthy run."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from maulstick.guard.policies import Reason
from maulstick.guard.step import StepOutcome
from maulstick.guard.verdict import Verdict
from maulstick.train import alarms
from maulstick.train.alarms import LOGIT, RATES, WEIGHT_NORM, AlarmWatcher, largest_change, look_interval
from maulstick.train.attention_logits import LogitMeter
from maulstick.train.events import read_events
from maulstick.train.gradient_seen import behind_layer
from maulstick.train.trackers import Trackers
from maulstick.train.watchers import WindowDone

STEPS = ("--max_train_steps", "8", "--train_batch_size", "1")


@pytest.fixture
def early(monkeypatch):
    """Let the second look come at step 8 instead of 20, so that eight steps do."""
    monkeypatch.setattr(alarms, "UPDATES_TO_GET_A_GRADIENT", 8)
    monkeypatch.setattr(alarms, "_FIRST_LOOKS", (5, 8))


def watched(make_run, *arguments, watchers=1, **model):
    """Return a prepared run of eight steps with nothing but alarm watchers."""
    run = make_run(*arguments, *STEPS, **model)
    run.prepare()
    run.loop.parts.watchers = [AlarmWatcher(run.loop.parts.total_steps) for _ in range(watchers)]
    return run


def trained(run):
    run.loop.run()
    run.records.close("end")


def events_of(run, tmp_path, kind, output="out"):
    trained(run)
    return [event for event in read_events(tmp_path / output / "last.events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--gradient_checkpointing",),
        ("--clip_skip", "3"),
        ("--module_dropout", "0.1", "--mixed_precision", "bf16", "--network_train_unet_only"),
        ("--lr_scheduler", "linear", "--lr_warmup_steps", "7", "--network_train_unet_only"),
    ],
    ids=["plain", "checkpointing", "clip_skip", "module_dropout", "warm-up"],
)
def test_a_healthy_run_raises_no_alarm(early, make_run, tmp_path, arguments):
    run = watched(make_run, *arguments)
    watcher = run.loop.parts.watchers[0]
    assert events_of(run, tmp_path, "alarm") == []
    assert watcher.updates == 8
    assert set(watcher._judged) == {"zero", "gradients"}


def test_dropped_modules_are_given_time(early, make_run, tmp_path):
    """Of 96 tensors, chance may leave one without gradient for 8 updates where every other module is dropped."""
    run = watched(make_run, "--network_train_unet_only", "--module_dropout", "0.5")
    assert events_of(run, tmp_path, "alarm") == []
    assert run.loop.parts.watchers[0]._judged == []


def test_what_is_measured_is_written_down(early, make_run, tmp_path):
    run = watched(make_run, "--network_train_unet_only", "--learning_rate", "2e-3")
    looks = events_of(run, tmp_path, "look")
    assert [look["step"] for look in looks] == [5, 8]
    assert [look[RATES] for look in looks] == pytest.approx([5 * 4e-6, 8 * 4e-6])
    assert 0 < looks[0][WEIGHT_NORM] < looks[1][WEIGHT_NORM]
    assert 0 < looks[0][LOGIT] < 100
    assert look_interval(100) == 20
    assert look_interval(500) == 50
    assert look_interval(10**6) == 100


def test_a_network_that_is_cut_off_is_named_after_five_updates(early, make_run, tmp_path):
    run = watched(make_run)
    accumulate = run.loop.accumulate_gradients

    def cut(window, images):
        loss = accumulate(window, images)
        for name, parameter in run.loop.parts.named_parameters:
            if name.startswith("text_encoder."):
                parameter.grad = None
        return loss

    run.loop.accumulate_gradients = cut
    (alarm,) = events_of(run, tmp_path, "alarm")
    assert (alarm["step"], alarm["kind"]) == (5, "zero weights in text_encoder")
    assert alarm["text"].startswith("text_encoder: all 24 up weights are still exactly zero after 5 updates (")
    assert "gradient checkpointing" in alarm["text"]
    assert "0.001" in alarm["text"]


def test_tensors_that_never_get_a_gradient_are_counted_and_named(early, make_run, tmp_path):
    run = watched(make_run, "--network_train_unet_only")
    module = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    for name, parameter in run.loop.parts.named_parameters:
        if name.startswith(module):
            parameter.requires_grad_(False)
    zero, without = events_of(run, tmp_path, "alarm")
    assert (zero["step"], without["step"]) == (5, 8)
    assert f"unet: 1 of 96 tensors are still exactly zero after 5 updates ({module}.lora_up.weight)" in zero["text"]
    assert without["text"].startswith("unet: 2 of 96 tensors never got a gradient in 8 updates (")
    assert module in without["text"]


def test_layers_behind_clip_skip_are_expected_to_get_nothing():
    names = [f"text_encoder.text_model.encoder.layers.{n}.mlp.fc1.lora_up.weight" for n in range(12)]
    names += ["unet.up_blocks.0.layers.11.x.lora_up.weight"]
    assert behind_layer(names, {"text_encoder"}, 2) == {names[11]}
    assert behind_layer(names, {"text_encoder"}, 4) == {names[9], names[10], names[11]}
    assert behind_layer(names, {"text_encoder"}, 1) == behind_layer(names, {"text_encoder"}, None) == set()


# ------------------------------------------------------------------------------------------- without a real run


class Events:
    def __init__(self):
        self.rows = []

    def write(self, event, **fields):
        self.rows.append((event, fields))

    def alarms(self):
        return [(fields["step"], fields["text"]) for event, fields in self.rows if event == "alarm"]


def stub_loop(dtype=torch.float16, total=2000):
    """A loop as far as alarms look at it, with nothing trained in it."""
    family = SimpleNamespace(dtype=dtype, denoiser_naming=SimpleNamespace(component="unet"), text_encoder_naming={})
    options = SimpleNamespace(network=SimpleNamespace(module_dropout=None), model=SimpleNamespace(clip_skip=None))
    parameter = nn.Parameter(torch.ones(1))
    return SimpleNamespace(
        parts=SimpleNamespace(
            named_parameters=[],
            optimizer=torch.optim.SGD([parameter], lr=1e-2),
            records=SimpleNamespace(events=Events(), trackers=Trackers()),
            console=SimpleNamespace(say=lambda text: None),
            family=family,
            options=options,
            accelerator=SimpleNamespace(unwrap_model=lambda trainee: trainee),
            trainee=SimpleNamespace(networks={}, eval=lambda: None, train=lambda: None),
            seed=0,
        ),
        forward=lambda batch, latents, generator, only=None: None,
    )


def done(step, *, scale=None, stepped=True):
    verdict = Verdict(False, Reason.ACCEPTED, 1.0, 1.0, 10.0, scale=scale)
    return WindowDone(step, 0, [(None, None)], 1.0, StepOutcome(verdict, stepped), 0.1)


def alarms_of(watcher, loop, windows):
    for window in windows:
        watcher.after_window(loop, window)
    return loop.parts.records.events.alarms()


def test_a_loss_scale_that_only_sinks_is_told_once():
    scales = [65536.0 / 2 ** (step // 10) for step in range(300)]
    loop = stub_loop()
    found = alarms_of(AlarmWatcher(2000), loop, [done(step, scale=scale) for step, scale in enumerate(scales)])
    assert [step for step, _ in found] == [81]
    assert "sunk to 256, by 8 halvings" in found[0][1]


def test_a_loss_scale_that_grows_again_is_healthy():
    scales = [65536.0 / 2 ** (step % 7) for step in range(300)]
    found = alarms_of(AlarmWatcher(2000), stub_loop(), [done(step, scale=scale) for step, scale in enumerate(scales)])
    assert found == []


@pytest.mark.parametrize(
    ("course", "dtype", "says"),
    [
        (lambda step: 20 * math.exp(step / 150), torch.float16, "exponential"),
        (lambda step: 50.0 * step, torch.float16, "linear"),
        (lambda step: 20 * math.exp(step / 150), torch.bfloat16, None),
        (lambda step: 20 * math.exp(step / 150), torch.float32, None),
        (lambda step: 3 * math.sqrt(step), torch.float16, None),
        (lambda step: 0.01 * math.exp(step / 150), torch.float16, None),
        (lambda step: 20 * math.exp(step / 600), torch.float16, None),
    ],
    ids=["exponential", "linear", "bf16", "fp32", "healthy", "too early", "after the end"],
)
def test_a_trend_to_the_formats_limit_is_told_with_the_step_it_ends_at(monkeypatch, course, dtype, says):
    step = 0
    monkeypatch.setattr(alarms, "largest_change", lambda networks: (course(step), "unet.mid.to_q"))
    loop, watcher = stub_loop(dtype), AlarmWatcher(2000)
    for step in range(1, 1001):
        watcher.after_window(loop, done(step - 1))
    found = loop.parts.records.events.alarms()
    if says is None:
        assert found == []
        return
    ((at, text),) = found
    crossing = 150 * math.log(65504 / 20) if says == "exponential" else 65504 / 50
    assert f"This {says} trend reaches the limit of float16 (6.55e+04) at step {math.ceil(crossing)} of 2000" in text
    assert "the largest weight change of a module" in text
    assert "(unet.mid.to_q)" in text
    assert f"Sum of lr² so far: {at * 1e-4:.3g}." in text
    assert at < crossing


def test_a_value_beyond_the_format_is_told_at_once(monkeypatch):
    monkeypatch.setattr(alarms, "largest_change", lambda networks: (math.inf, "unet.mid.to_q"))
    loop, watcher = stub_loop(), AlarmWatcher(2000)
    found = alarms_of(watcher, loop, [done(step) for step in range(100)])
    assert [step for step, _ in found] == [5]
    assert "is inf, beyond float16" in found[0][1]


def test_skipped_windows_are_no_updates():
    loop, watcher = stub_loop(), AlarmWatcher(2000)
    for step in range(10):
        watcher.after_window(loop, done(step, stepped=step % 2 == 0))
    assert watcher.updates == 5
    assert watcher.rates_squared == pytest.approx(5 * 1e-4)


# --------------------------------------------------------------------------------------------- what is measured


class Attention(nn.Module):
    def __init__(self, heads=2, width=6):
        super().__init__()
        self.heads = heads
        self.to_k, self.to_q = nn.Linear(4, heads * width), nn.Linear(4, heads * width)

    def forward(self, x):
        return self.to_q(x).sum() + self.to_k(x).sum()


def test_the_largest_logit_is_that_of_the_attention():
    torch.manual_seed(0)
    attention, x = Attention(), torch.randn(3, 9, 4)
    meter = LogitMeter({"unet": nn.ModuleDict({"block": attention})})
    with meter.watching(), torch.no_grad():
        attention(x)
        attention(x * 2)
    expected = 0.0
    for image in x * 2:
        q, k = attention.to_q(image), attention.to_k(image)
        for head in range(2):
            columns = slice(6 * head, 6 * head + 6)
            expected = max(expected, float((q[:, columns] @ k[:, columns].T).detach().abs().max()) / math.sqrt(6))
    value, where = meter.largest()
    assert value == pytest.approx(expected, rel=1e-5)
    assert where == "unet.block"
    attention(x * 100)
    assert meter.largest()[0] == value
    assert not attention.to_q._forward_hooks


def test_the_unets_and_text_encoders_attentions_are_all_watched(make_run):
    run = make_run(version="sd1")
    run.prepare()
    networks = alarms.networks_of(run.loop)
    assert list(networks) == ["unet", "text_encoder"]
    meter = LogitMeter(networks)
    window, _ = next(run.loop.windows(0))
    with meter.watching(), torch.no_grad():
        run.loop.forward(*window[0], torch.Generator().manual_seed(0))
    # 16 transformer blocks of two attentions, 12 layers of the text encoder.
    assert len(meter._largest) == 32 + 12
    with torch.no_grad():
        run.prepared.family.denoiser.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.base_layer.weight.mul_(
            1e4
        )
    with meter.watching(), torch.no_grad():
        run.loop.forward(*window[0], torch.Generator().manual_seed(0))
    assert meter.largest()[1] == "unet.mid_block.attentions.0.transformer_blocks.0.attn1"


def test_the_largest_change_is_the_norm_of_the_product(make_run):
    run = make_run("--network_train_unet_only", "--network_alpha", "2")
    run.prepare()
    assert largest_change(alarms.networks_of(run.loop))[0] == 0.0
    parameters = dict(run.loop.parts.named_parameters)
    module = "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2"
    up, down = parameters[f"{module}.lora_up.weight"], parameters[f"{module}.lora_down.weight"]
    with torch.no_grad():
        up.normal_()
    value, where = largest_change(alarms.networks_of(run.loop))
    assert value == pytest.approx(float((2 / 4 * up.double() @ down.double()).detach().norm()), rel=1e-5)
    assert where == module


# -------------------------------------------------------------------------------------------------- resuming


def test_a_watcher_goes_on_exactly_where_it_was(early, make_run, tmp_path):
    """Three watchers in one run: one sees all of it, the third takes over from the second after six steps."""
    run = watched(make_run, "--network_train_unet_only", "--module_dropout", "0.1", watchers=2)
    whole, first = run.loop.parts.watchers
    second = AlarmWatcher(8)

    class HandOver:
        name = "hand over"

        def after_window(self, loop, done):
            if done.step == 5:
                file = io.BytesIO()
                torch.save(first.state_dict(), file)
                file.seek(0)
                second.load_state_dict(torch.load(file, weights_only=True))
                loop.parts.watchers = [whole, second]

    run.loop.parts.watchers = [whole, first, HandOver()]
    trained(run)
    assert second.updates == 8
    assert second.state_dict() == whole.state_dict()
    assert len(second.history[LOGIT]) == 2


def test_looking_changes_nothing_of_the_training(early, make_run):
    arguments = ("--network_train_unet_only", "--network_dropout", "0.1", "--rank_dropout", "0.1")
    with_alarms = watched(make_run, *arguments, output="with")
    without = watched(make_run, *arguments, watchers=0, output="without")
    trained(with_alarms)
    trained(without)
    for (name, ours), (other, theirs) in zip(
        with_alarms.loop.parts.named_parameters, without.loop.parts.named_parameters, strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs), name
