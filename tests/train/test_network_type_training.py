"""Whole runs of every kind of adapter, through the options: what they learn, write, and say about it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from maulstick.adapters.adapter_tensors import adapter_tensors
from maulstick.adapters.files import save_lora_file
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.adapters.kinds import adapter_kind
from maulstick.adapters.module_kinds import kind_of
from maulstick.adapters.read_formats import read_adapter
from maulstick.cli import main
from maulstick.errors import OptionError
from maulstick.families.load import load_family
from maulstick.options.schema import ModelOptions
from maulstick.tools.apply_lora import apply_loras
from maulstick.tools.inspect_lora import inspect_file
from maulstick.tools.lora_choice import LoraChoice
from maulstick.train.plan import plan_lines
from tests.models import TEXT_WIDTH, model_folder

pytestmark = pytest.mark.slow

# Arguments, how inspect calls the file, ss_network_module, part of ss_network_args.
LYCORIS = "lycoris.kohya"
SHORT = ("--max_train_steps", "2")
UNET_ONLY = ("--network_train_unet_only",)
CASES = {
    "lora": ([], "LoRA", "networks.lora", {}),
    "dora": ([], "DoRA", LYCORIS, {"algo": "lora", "dora_wd": "True", "wd_on_output": "False"}),
    "loha": ([], "LoHa", LYCORIS, {"algo": "loha"}),
    "lokr": (["factor=4"], "LoKr", LYCORIS, {"algo": "lokr", "factor": "4", "decompose_both": "False"}),
    "oft": ([], "OFT", LYCORIS, {"algo": "diag-oft"}),
}


@pytest.fixture
def run_of(make_run):
    def make(kind: str, *arguments: str, network_args: tuple[str, ...] = (), **changes):
        given = ["--network_type", kind, *arguments]
        if network_args:
            given += ["--network_args", *network_args]
        if kind == "oft":
            given += ["--network_alpha", "1"]
        return make_run(*given, version="sd1", **changes)

    return make


@pytest.mark.parametrize("kind", CASES)
def test_a_run_of_every_kind_learns_and_its_file_reads_back(kind, run_of):
    arguments, title, module, network_args = CASES[kind]
    blocks = ("conv_dim=2", "block_lr=mid=0 down.0-8=0", *arguments)
    run = run_of(kind, *SHORT, "--gradient_checkpointing", "--learning_rate", "1e-2", network_args=blocks)
    prepared = run.prepare()
    losses = losses_on_a_fixed_batch(run)
    assert losses[-1] < losses[0]
    result = run.train()
    file = read_adapter(result.path)
    assert {kind_of(part) for part in file.modules.values()} == {title}
    facts = inspect_file(result.path)
    assert facts.kinds == {title: len(file.modules)}
    assert facts.zero_modules == ()
    # A block of weight 0 is not in the file; convolutions and the text encoder are.
    names = list(file.modules)
    assert not any("mid_block" in name or "down_blocks_0_" in name for name in names)
    assert any(name.endswith("_conv1") for name in names)
    assert any(name.startswith("lora_te_") for name in names)
    (unet,) = (part for part in prepared.plan.components if part.component == "unet")
    assert unet.modules == sum(name.startswith("lora_unet_") for name in names)
    trained = [p.numel() for name, p in run.loop.parts.named_parameters if name.startswith("unet.")]
    assert unet.parameters == sum(trained)
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result.path).values())
    with safe_open(result.path, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["ss_network_module"] == module
    assert network_args.items() <= json.loads(metadata["ss_network_args"]).items()


def losses_on_a_fixed_batch(run) -> list[float]:
    """Take some steps of the run's own optimizer on one batch; return the loss before each."""
    parts = run.loop.parts
    generator = torch.Generator().manual_seed(0)
    noisy, noise = (torch.randn(2, 4, 8, 8, generator=generator) for _ in range(2))
    states = torch.randn(2, 77, TEXT_WIDTH, generator=generator)
    losses = []
    for _ in range(6):
        predicted = parts.family.denoiser(noisy, torch.tensor([100, 700]), encoder_hidden_states=states).sample
        loss = (predicted - noise).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr", "oft"])
def test_a_run_goes_on_from_a_file_of_its_kind_and_no_other(kind, run_of, tmp_path):
    first = run_of(kind, *UNET_ONLY, *SHORT, output="first").train().path
    run = run_of(kind, *UNET_ONLY, "--network_weights", str(first), output="second")
    run.prepare()
    states = adapter_kind(run.options.network).state(run.loop.parts.family.denoiser)
    save_lora_file(tmp_path / "again.safetensors", adapter_tensors({"unet": states}, SD_KEY_NAMES), {})
    old, new = load_file(first), load_file(tmp_path / "again.safetensors")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor)
    other = "loha" if kind != "loha" else "dora"
    with pytest.raises(OptionError, match="Set network_type to what the file holds"):
        run_of(other, "--network_weights", str(first), output="third").prepare()
    with pytest.raises(OptionError, match="this run plans"):
        run_of(kind, "--network_weights", str(first), "--network_dim", "2", output="fourth").prepare()


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("lora", ["--factor", "4"], "factor belongs to network_type = lokr"),
        ("loha", ["--wd_on_output"], "wd_on_output belongs to network_type = dora"),
        ("loha", ["--network_dropout", "0.1"], "no activations between factors"),
        ("lokr", ["--loraplus_lr_ratio", "4"], "there is none"),
        ("lokr", ["--dim_from_weights", "--network_weights", "x"], "does not tell the rank"),
        ("dora", ["--scale_weight_norms", "1"], "what it trains"),
        ("oft", ["--conv_dim", "2", "--conv_alpha", "2"], "a turn has no scale"),
        ("oft", ["--rank_dropout", "0.1"], "only module_dropout"),
        ("lora", ["--network_module", "lycoris.kohya"], "choose with network_type"),
        ("lora", ["--network_args", "algo=loha"], "use network_type = "),
        ("lora", ["--network_args", "dora_wd=True"], "network_type = dora"),
    ],
)
def test_arguments_without_effect_are_refused(kind, arguments, words, run_of):
    with pytest.raises(OptionError, match=words):
        run_of(kind, *arguments)


def test_switches_in_network_args_are_read_in_any_writing(run_of):
    for text, expected in (("True", True), ("false", False)):
        run = run_of("lokr", network_args=(f"decompose_both={text}",))
        assert run.options.network.decompose_both is expected


def test_the_plan_says_what_an_oft_turns(run_of):
    lines = "\n".join(plan_lines(run_of("oft", *UNET_ONLY).prepare().plan))
    assert "192 modules (OFT)" in lines
    assert "turns blocks of 4 outputs" in lines


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr", "oft"])
def test_a_picture_with_the_file_is_that_of_the_merged_model(kind, run_of, tmp_path):
    path = run_of(kind, *UNET_ONLY, *SHORT, "--network_args", "conv_dim=2", "--learning_rate", "3e-2").train().path
    assert main(["merge", str(path), "--base", str(model_folder()), "--output", str(tmp_path / "merged")]) == 0
    plain, merged = family_of(model_folder()), family_of(tmp_path / "merged")
    untouched = prediction(plain)
    apply_loras(plain, [LoraChoice(path)])
    torch.testing.assert_close(prediction(plain), prediction(merged), rtol=1e-3, atol=1e-4)
    assert (prediction(plain) - untouched).abs().max() > 1e-3


def family_of(folder):
    options = ModelOptions(pretrained_model_name_or_path=str(folder))
    return load_family(options, device=torch.device("cpu"), dtype=torch.float32)


@torch.no_grad()
def prediction(family) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noisy, states = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 77, TEXT_WIDTH, generator=generator)
    return family.denoiser(noisy, torch.tensor([300]), encoder_hidden_states=states).sample
