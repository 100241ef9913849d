"""Weights and ranks by block, and LoRA+: what is trained, how fast, what it costs, what log and file say."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maulstick.adapters.block_weights import NamedBlocks, parse_block_weights
from maulstick.adapters.blocks import SD_BLOCKS, sd_block_index
from maulstick.adapters.files import read_lora_file
from maulstick.cli import main
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.options.load import load_train_options
from maulstick.options.schema import ModelOptions
from maulstick.train.choice import Choice, choose_targets
from maulstick.train.events import read_events
from tests.models import model_folder

UNET_ONLY = ("--network_train_unet_only",)
WITHOUT_MODULES = (0, 3, 6, 9, 10, 11, 13, 14, 15)


@pytest.fixture(scope="module")
def family() -> Family:
    options = ModelOptions(pretrained_model_name_or_path=str(model_folder()))
    return load_family(options, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def choose(family: Family) -> Callable[..., Choice]:
    """Return a function that makes the choice for the small SD 1.x model, at a learning rate of 1e-3."""

    def choose(*arguments: str) -> Choice:
        required = ("--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o")
        rate = () if "--learning_rate" in arguments else ("--learning_rate", "1e-3")
        return choose_targets(family, load_train_options([*required, *rate, *arguments]).options)

    return choose


def counts(choice: Choice) -> dict[int, int]:
    found = [target.block for target in choice.targets["unet"]]
    return {block: found.count(block) for block in sorted(set(found))}


# ---------------------------------------------------------------------------------------------------------------------
# What is trained


@pytest.mark.parametrize(
    ("arguments", "modules"),
    [
        (["down_lr_weight=sine", "mid_lr_weight=1", "up_lr_weight=cosine"], 180),
        (["down_lr_weight=zeros", "mid_lr_weight=0.5", "conv_dim=2"], 177),
        (["down_lr_weight=0", "mid_lr_weight=0"], 108),
        (["mid_lr_weight=1"], 192),
    ],
)
def test_blocks_of_weight_zero_get_no_module(choose, arguments, modules):
    choice = choose(*UNET_ONLY, "--network_args", *arguments)
    assert len(choice.targets["unet"]) == modules
    weights = choice.rates["unet"].block_weights
    assert all(weights[target.block] > 0 for target in choice.targets["unet"])


def test_every_way_to_say_it_gives_the_same_choice(choose):
    by_part = choose("--network_args", "down_lr_weight=0", "mid_lr_weight=0", "up_lr_weight=0,0,0,0,0,0,1,1,1,1,1,1")
    table = choose("--block_lr", "other=0", "up.6-11=1")
    named = choose("--block_lr", "block=0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1,1,1,1,1,1")
    assert by_part.targets == table.targets == named.targets
    assert counts(table) == dict.fromkeys(range(19, 25), 12)
    preset = choose("--block_lr", "OUTALL")
    assert counts(preset) == dict.fromkeys(range(16, 25), 12)


def test_ranks_by_block(choose):
    dims = ",".join(str(index % 3) for index in range(25))
    choice = choose("--network_args", f"block_dims={dims}", "block_alphas=0.5", "conv_block_dims=0")
    assert {target.dim for target in choice.targets["text_encoder"]} == {4}
    assert {(target.block, target.dim, target.alpha) for target in choice.targets["unet"]} == {
        (index, index % 3, 0.5) for index in range(25) if index % 3 and index not in WITHOUT_MODULES
    }
    with_convolutions = choose("--network_args", "conv_block_dims=" + "0," * 24 + "3", "conv_alpha=2")
    large = [target for target in with_convolutions.targets["unet"] if target.kind == "conv3x3"]
    assert {(target.block, target.dim, target.alpha) for target in large} == {(24, 3, 2.0)}
    assert {target.dim for target in with_convolutions.targets["unet"] if target not in large} == {4}
    assert choice.rates["unet"].block_weights is None


def test_alphas_by_block_go_with_weights_too(choose):
    choice = choose("--network_args", "block_alphas=2", "mid_lr_weight=0.5")
    assert {(target.dim, target.alpha) for target in choice.targets["unet"]} == {(4, 2.0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block_lr", "down.0=0.5"], r'block_lr "down\.0": there is no module to train in IN00'),
        (["--block_lr", "down.9-11=0.5"], r'block_lr "down\.9-11": there is no module to train in IN09-IN11'),
        (["--block_lr", "block=0"], "Every block with modules of the unet has weight 0"),
        (["--block_lr", "other=0", "down.9-11=1"], r'block_lr "down\.9-11": there is no module to train in IN09-IN11'),
        (["--down_lr_weight", "0,0,0,0,0,0,0,0,0,1,1,1"], "down_lr_weight: there is no module to train in IN09-IN11"),
        (["--block_lr", "NONE"], "Every block with modules of the unet has weight 0.*network_train_text_encoder_only"),
        (["--down_lr_weight", "1,2,3"], "down_lr_weight has 3 values, but there are 12 blocks"),
        (["--up_lr_weight", "sin"], "Did you mean 'sine'"),
        (["--block_dims", "1,2,3"], "block_dims has 3 values, but there are 25 blocks"),
    ],
)
def test_what_cannot_be_meant_is_refused(choose, arguments, message):
    with pytest.raises(OptionError, match=message):
        choose(*arguments)


def test_a_range_with_convolutions_only_may_be_weighed_when_they_are_trained(choose):
    choice = choose("--conv_dim", "2", "--block_lr", "down.9-11=0.5")
    assert [counts(choice)[block] for block in (9, 10, 11)] == [1, 3, 3]
    assert choice.rates["unet"].notes == ()


def test_base_of_a_preset_is_the_text_encoders_weight(choose):
    half = choose("--block_lr", "ALL0.5", "--text_encoder_lr", "2e-4")
    assert half.rates["text_encoder"].learning_rate == pytest.approx(1e-4)
    without_text = choose("--block_lr", "0" + ",1" * 16)
    assert list(without_text.targets) == ["unet"]


def test_the_blocks_of_a_family(family):
    assert family.block_layout() == NamedBlocks(SD_BLOCKS.names, SD_BLOCKS.parts)
    plain = SimpleNamespace(block_names=lambda: ["first", "second"])
    assert Family.block_parts(plain) == {"block": range(2)}


# ---------------------------------------------------------------------------------------------------------------------
# How fast


def test_without_weights_there_is_one_group_for_each_network(choose):
    choice = choose("--unet_lr", "2e-3", "--text_encoder_lr", "1e-4")
    groups = {name: rates.groups(choice.targets[name]) for name, rates in choice.rates.items()}
    assert groups == {"text_encoder": {"textencoder": 1e-4}, "unet": {"unet": 2e-3}}


def test_each_block_that_trains_has_its_rate_times_its_weight(choose):
    choice = choose("--network_args", "down_lr_weight=cosine", "mid_lr_weight=0", "up_lr_weight=sine", "--unet_lr", "2")
    weights = parse_block_weights(SD_BLOCKS, down_lr_weight="cosine", mid_lr_weight="0", up_lr_weight="sine")
    # In the order of the modules in diffusers' UNet.
    trained = [1, 2, 4, 5, 7, 8, *range(16, 25)]
    expected = {f"unet_block{index}": 2 * weights[index] for index in trained}
    groups = choice.rates["unet"].groups(choice.targets["unet"])
    assert groups == expected
    assert list(groups) == list(expected)
    assert choice.rates["text_encoder"].groups(choice.targets["text_encoder"]) == {"textencoder": 1e-3}


def test_lora_plus_gives_up_factors_groups_of_their_own(choose):
    choice = choose("--loraplus_lr_ratio", "16", "--loraplus_text_encoder_lr_ratio", "4")
    assert choice.rates["unet"].groups(choice.targets["unet"]) == {"unet": 1e-3, "unet_plus": 16e-3}
    assert choice.rates["text_encoder"].groups(choice.targets["text_encoder"]) == {
        "textencoder": 1e-3,
        "textencoder_plus": 4e-3,
    }
    blocks = choose("--loraplus_unet_lr_ratio", "2", "--block_lr", "other=0", "mid=0.5", "up.11=1")
    assert blocks.rates["unet"].groups(blocks.targets["unet"]) == {
        "unet_block24": 1e-3,
        "unet_block24_plus": 2e-3,
        "unet_block12": 0.5e-3,
        "unet_block12_plus": 1e-3,
    }
    assert list(blocks.rates["text_encoder"].groups(blocks.targets["text_encoder"])) == ["textencoder"]


def first_moves(path: Path) -> dict[int, float]:
    """Block -> largest value of its up factors; they start at 0, and Adam's first step is the learning rate."""
    moved: dict[int, float] = {}
    for name, weights in read_lora_file(path).modules.items():
        block = sd_block_index(name)
        if block is not None:
            moved[block] = max(moved.get(block, 0.0), float(weights.up.abs().max()))
    return moved


def test_blocks_really_learn_at_their_rates(make_run, tmp_path):
    arguments = ["down_lr_weight=0", "mid_lr_weight=0.5", "up_lr_weight=linear", "loraplus_lr_ratio=3"]
    run = make_run(*UNET_ONLY, "--max_train_steps", "1", "--network_args", *arguments, version="sd1")
    run.prepare()
    parameters = [parameter for group in run.loop.parts.optimizer.param_groups for parameter in group["params"]]
    assert len(parameters) == len({id(parameter) for parameter in parameters}) == 2 * (12 + 108)
    assert {id(parameter) for parameter in parameters} == {id(p) for _, p in run.loop.parts.named_parameters}
    result = run.train()
    moved = first_moves(result.path)
    expected = {12: 0.5} | {index: (index - 13) / 11 for index in range(16, 25)}
    assert moved.keys() == expected.keys()
    for block, weight in expected.items():
        assert moved[block] == pytest.approx(3e-3 * weight, rel=1e-3)
    file = read_lora_file(result.path)
    assert len(file.modules) == 120
    assert json.loads(file.metadata["ss_network_args"]) == {
        "down_lr_weight": "0",
        "mid_lr_weight": "0.5",
        "up_lr_weight": "linear",
        "loraplus_lr_ratio": "3.0",
        "dropout": None,
    }
    (step,) = [e for e in read_events(tmp_path / "out" / "last.events.jsonl") if e["event"] == "step"]
    logged = {name: value for name, value in step.items() if name.startswith("lr/")}
    assert logged == pytest.approx(
        {f"lr/unet_block{block}": 1e-3 * weight for block, weight in expected.items()}
        | {f"lr/unet_block{block}_plus": 3e-3 * weight for block, weight in expected.items()}
    )


def test_optimizers_with_one_step_size_refuse_different_weights_and_take_equal_ones(make_run, tmp_path):
    prodigy = (*UNET_ONLY, "--optimizer_type", "Prodigy", "--learning_rate", "1")
    said = r"'Prodigy' uses one .*\(16 groups, lowest and highest: unet_block16 0\.41.*, unet_block12 1\).*use Prodigy"
    with pytest.raises(OptionError, match=said):
        make_run(*prodigy, "--up_lr_weight", "sine", version="sd1").prepare()
    assert not list((tmp_path / "out").glob("*"))
    run = make_run(*prodigy, "--block_lr", "other=0", "up.10-11=1", "--max_train_steps", "2", version="sd1")
    run.prepare()
    (group,) = run.loop.parts.optimizer.param_groups
    assert len(group["params"]) == 48
    run.train()
    step = [e for e in read_events(tmp_path / "out" / "last.events.jsonl") if e["event"] == "step"][-1]
    names = {name for name in step if name.startswith("lr/")}
    assert names == {f"lr/{kind}unet_block{block}" for kind in ("", "d*lr/") for block in (23, 24)}


# ---------------------------------------------------------------------------------------------------------------------
# What it costs


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_pass_ends_at_the_first_block_that_trains(make_run, checkpointing):
    """Only OUT06 and later train: nothing before it takes part in the backward pass, not even by recomputing."""
    switch = ("--gradient_checkpointing",) if checkpointing else ()
    run = make_run(*UNET_ONLY, *switch, "--block_lr", "other=0", "up.6-11=1", "--max_train_steps", "1", version="sd1")
    run.prepare()
    unet = run.prepared.family.denoiser
    forwards: Counter[str] = Counter()
    backwards: set[str] = set()

    def watch(path: str) -> Callable[..., None]:
        def seen(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: backwards.add(path))

        return seen

    layers = [path for path, _ in unet.named_modules() if path.split(".")[-2:-1] in (["resnets"], ["attentions"])]
    layers += [path for path, _ in unet.named_modules() if path.split(".")[-2:-1] == ["transformer_blocks"]]
    for path in layers:
        unet.get_submodule(path).register_forward_hook(watch(path))
        # Recomputing stops as soon as it has what it needs, so that it never comes to the end of a layer.
        unet.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: forwards.update([path]))
    run.train()
    # The first residual block of up_blocks.2 lies before the first module that trains.
    late = {path for path in layers if path.startswith(("up_blocks.2", "up_blocks.3"))} - {"up_blocks.2.resnets.0"}
    assert backwards == late
    assert set(forwards) == set(layers)
    # Of an attention, the transformer layers are what is recomputed.
    recomputed = {path for path in late if path.split(".")[-2] != "attentions"} if checkpointing else set()
    assert {path for path, count in forwards.items() if count != 1} == recomputed
    assert {forwards[path] for path in recomputed} <= {2}


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def test_check_shows_weights_and_modules_by_block(images, tmp_path, capsys):
    base = ["--pretrained_model_name_or_path", str(model_folder()), "--train_data_dir", str(images)]
    base += ["--output_dir", str(tmp_path / "out"), "--resolution", "64", "--learning_rate", "1e-3"]
    weighted = ["--network_args", "down_lr_weight=cosine", "mid_lr_weight=0", "up_lr_weight=0.5"]
    assert main(["check", "--json", *base, *weighted]) == 0
    plan = json.loads(capsys.readouterr().out)
    expected = parse_block_weights(SD_BLOCKS, down_lr_weight="cosine", mid_lr_weight="0", up_lr_weight="0.5")
    assert plan["block_lr_weights"] == list(expected)
    assert plan["modules_per_block"] == {
        str(block): 0 if block in (*WITHOUT_MODULES, 12) else 12 for block in range(25)
    }
    unet = next(part for part in plan["components"] if part["component"] == "unet")
    assert unet["groups"]["unet_block24"] == 0.5e-3
    assert len(unet["groups"]) == 15
    assert plan["notices"] == [
        "No module in IN00, IN03, IN06, IN09-IN11: the weights given for these blocks have no effect.",
        "The text encoder is trained too, so the backward pass runs through blocks of weight 0 all the same; "
        "network_train_unet_only ends it at the first block that trains.",
    ]
    assert main(["check", *base, *weighted]) == 0
    lines = capsys.readouterr().out
    assert "weights    IN00 1, IN01 0.99, IN02 0.959" in lines
    assert "IN11-MID 0, OUT00-OUT11 0.5" in lines
    smallest = 1e-3 * math.sin(math.pi / 2 * 3 / 11)
    assert f"learning rate 0.001 (from {smallest:g} to {1e-3 * expected[1]:g} in 15 groups)" in lines
    assert main(["check", "--json", *base]) == 0
    assert json.loads(capsys.readouterr().out)["block_lr_weights"] is None


def test_weights_of_a_start_file_in_blocks_of_weight_zero_are_left_out_and_named(make_run):
    first = make_run(*UNET_ONLY, "--max_train_steps", "1", output="first", version="sd1").train()
    start = ("--network_weights", str(first.path), "--max_train_steps", "1", "--block_lr", "other=0", "up.11=1")
    note = "network_weights: 180 modules are in blocks of weight 0; they are not trained, and not in the new file."
    for further in ((), ("--dim_from_weights",)):
        run = make_run(
            *UNET_ONLY, *start, *further, "--learning_rate", "1e-12", output=f"second{len(further)}", version="sd1"
        )
        assert note in run.prepare().plan.notices
        second = read_lora_file(run.train().path).modules
        assert len(second) == 12
        for name, weights in second.items():
            torch.testing.assert_close(weights.up, read_lora_file(first.path).modules[name].up, rtol=0, atol=1e-9)
