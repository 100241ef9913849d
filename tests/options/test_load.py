"""Loading: every option from the command line and from TOML, what beats what, and what is not let through."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from maulstick.errors import OptionError
from maulstick.options.check import DEFAULTS
from maulstick.options.ip_adapter_schema import IpAdapterOptions
from maulstick.options.load import LoadedOptions, load_train_options
from maulstick.options.ranges import RANGES
from maulstick.options.schema import flat_values
from maulstick.options.sd_scripts import unknown_option_error
from maulstick.options.values import option_types

Load = Callable[..., LoadedOptions]

SPECIAL: dict[str, tuple[list[str], str, Any]] = {
    "network_module": (["networks.lora"], '"networks.lora"', "networks.lora"),
    "network_args": (["conv_dim=3", "rank_dropout=0.1"], '["conv_dim=3", "rank_dropout=0.1"]', None),
    "block_lr": (["down.4-5=0.5", "mid=0", "up=sine"], '{ "down.4-5" = 0.5, mid = 0, up = "sine" }', None),
    "up_lr_weight": (["0,0.5,1"], "[0, 0.5, 1]", "0,0.5,1"),
    "block_dims": (["4"], "4", "4"),
    "resolution": (["512,768"], '"512,768"', "512,768"),
    "skip_image_resolution": (["512,768"], "[512, 768]", "512,768"),
    "bucket_reso_steps": (["32"], "32", 32),
    "max_bucket_reso": (["2048"], "2048", 2048),
    "lr_warmup_steps": (["5%"], '"5%"', "5%"),
    "lr_decay_steps": (["0.2"], "0.2", "0.2"),
    "lr_scheduler": (["rex"], '"rex"', "rex"),
    "lr_scheduler_args": (["lr_end=0"], '["lr_end=0"]', None),
    "multires_noise_iterations": (["6"], "6", 6),
    "huggingface_repo_id": (["anna/my-lora"], '"anna/my-lora"', "anna/my-lora"),
    # The token itself is kept apart from the options.
    "huggingface_token": (["hf_secret"], '"hf_secret"', "(given)"),
    "optimizer_args": (["weight_decay=0.1", "betas=0.9,0.95"], '["weight_decay=0.1", "betas=0.9,0.95"]', None),
}
COMPANIONS: dict[str, str] = {
    "conv_alpha": "conv_dim = 4",
    "adaptive_noise_scale": "noise_offset = 0.1",
    "mode_scale": 'weighting_scheme = "mode"',
    "block_alphas": "block_dims = 4",
    "conv_block_alphas": "conv_block_dims = 4",
    "dim_from_weights": 'network_weights = "w.safetensors"',
    "cache_text_encoder_outputs": "network_train_unet_only = true",
    "lr_warmup_steps": 'lr_scheduler = "cosine"',
    "lr_scheduler_args": 'lr_scheduler = "polynomial"',
    **dict.fromkeys(("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"), 'sample_prompts = "p.txt"'),
    "dataset_config": 'train_data_dir = ""',
    "masked_loss": "alpha_mask = true",
    "conditioning_data_dir": 'network_type = "ip_adapter"\nimage_encoder = "clip"',
    **dict.fromkeys(
        ("skip_grad_norm_max", "nan_to_window", "inf_to_window", "skip_nan_immediate", "skip_inf_immediate"),
        "skip_grad_norm = true",
    ),
    "grad_cosine_log": "grad_norm_log = true",
    **dict.fromkeys(("factor", "decompose_both"), 'network_type = "lokr"'),
    "wd_on_output": 'network_type = "dora"',
    **dict.fromkeys(("fp8_base", "fp8_base_unet"), 'mixed_precision = "bf16"'),
    **dict.fromkeys(
        (option.name for option in fields(IpAdapterOptions)), 'network_type = "ip_adapter"\nimage_encoder = "clip"'
    ),
    "image_encoder": 'network_type = "ip_adapter"',
    "sample_ip_image": 'network_type = "ip_adapter"\nimage_encoder = "clip"\nsample_prompts = "p.txt"',
}


def example(name: str) -> tuple[list[str], str, Any]:
    """Return a value of the option that is not its default: as tokens, as TOML and as it should arrive."""
    if name in SPECIAL:
        tokens, toml, expected = SPECIAL[name]
        return tokens, toml, tokens if expected is None else expected
    hint = option_types()[name]
    if hint is bool:
        return [], "true", True
    if hint is int:
        return ["96"], "96", 96
    if hint is float:
        return ["0.75"], "0.75", 0.75
    if hint is Path:
        return ["some/place"], '"some/place"', Path("some/place")
    if hint is str:
        return ["text"], '"text"', "text"
    if hint == list[Path]:
        return (
            ["a.safetensors", "b.safetensors"],
            '["a.safetensors", "b.safetensors"]',
            [Path("a.safetensors"), Path("b.safetensors")],
        )
    if hint == list[float]:
        return ["1e-05"], "1e-05", [1e-05]
    assert get_origin(hint) is Literal
    choice = next(choice for choice in get_args(hint) if choice != DEFAULTS[name])
    return [str(choice)], f'"{choice}"' if isinstance(choice, str) else str(choice), choice


REQUIRED_TOML = {"pretrained_model_name_or_path": '"model"', "train_data_dir": '"images"', "output_dir": '"out"'}


@pytest.mark.parametrize("name", list(option_types()))
def test_every_option_arrives_from_command_line_and_from_toml(name: str, tmp_path: Path) -> None:
    tokens, toml, expected = example(name)
    companion = COMPANIONS.get(name, "")
    lines = [
        f"{key} = {value}" for key, value in REQUIRED_TOML.items() if key != name and not companion.startswith(key)
    ]
    rest = tmp_path / "rest.toml"
    rest.write_text("\n".join([*lines, companion]))
    from_command_line = load_train_options(["--config_file", str(rest), f"--{name}", *tokens])
    whole = tmp_path / "whole.toml"
    whole.write_text("\n".join([*lines, companion, "[section]", f"{name} = {toml}"]))
    from_file = load_train_options(["--config_file", str(whole)])
    assert flat_values(from_command_line.options)[name] == expected
    assert from_command_line.options == from_file.options
    assert name in from_command_line.given & from_file.given
    assert from_file.config_file == whole


def test_without_anything_every_value_is_the_default(load: Load) -> None:
    loaded = load()
    changed = {name for name, value in flat_values(loaded.options).items() if value != DEFAULTS[name]}
    assert changed == loaded.given == set(REQUIRED_TOML)
    assert loaded.notices == []
    assert loaded.config_file is None


def test_every_number_has_a_range() -> None:
    numbers = {name for name, hint in option_types().items() if hint in (int, float, list[float])}
    # The guardian checks its own numbers.
    assert numbers == set(RANGES) | {"skip_grad_norm_max"}


def test_the_command_line_beats_the_file(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('network_dim = 8\nshuffle_caption = true\nvae = "other"\nseed = 5\nxformers = true\n')
    loaded = load("--config_file", str(file), "--network_dim", "16", "--shuffle_caption=false", "--vae", "")
    assert loaded.options.network.network_dim == 16
    assert loaded.options.dataset.shuffle_caption is False
    assert loaded.options.model.vae is None
    assert loaded.options.run.seed == 5
    assert "vae" not in loaded.given


def test_dashes_are_taken_for_underscores(load: Load) -> None:
    assert load("--network-dim", "16").options.network.network_dim == 16


# ---------------------------------------------------------------------------------------- network_args


def test_network_args_fill_the_options_of_that_name(load: Load) -> None:
    network = load(
        "--network_args", "conv_dim=8", "conv_alpha=4", "rank_dropout=0.1", "module_dropout=0.2"
    ).options.network
    assert (network.conv_dim, network.conv_alpha) == (8, 4.0)
    assert (network.rank_dropout, network.module_dropout) == (0.1, 0.2)
    assert network.network_args == ["conv_dim=8", "conv_alpha=4.0", "rank_dropout=0.1", "module_dropout=0.2"]


def test_network_args_list_what_was_given_directly(load: Load) -> None:
    assert load("--conv_dim", "8").options.network.network_args == ["conv_dim=8"]


def test_network_args_and_the_option_itself(load: Load, tmp_path: Path) -> None:
    assert load("--network_args", "conv_dim=8", "--conv_dim", "8").options.network.conv_dim == 8
    with pytest.raises(OptionError, match=r"conv_dim = 4 \(command line\) and conv_dim=8 in network_args"):
        load("--network_args", "conv_dim=8", "--conv_dim", "4")
    file = tmp_path / "run.toml"
    file.write_text('network_args = ["conv_dim=8"]\n')
    network = load("--config_file", str(file), "--conv_dim", "4").options.network
    assert (network.conv_dim, network.network_args) == (4, ["conv_dim=4"])
    file.write_text("conv_dim = 8\n")
    assert load("--config_file", str(file), "--network_args", "conv_dim=4").options.network.conv_dim == 4


@pytest.mark.parametrize(
    "argument, message",
    [
        ("conv_dm=4", "Unknown key 'conv_dm' in network_args .*Did you mean 'conv_dim'"),
        ("zzz=4", "Unknown key 'zzz' .*There are conv_dim, conv_alpha, rank_dropout, module_dropout"),
        ("conv_dim", "network_args 'conv_dim' .*expected key=value"),
        ("conv_dim=four", 'conv_dim = "four" .*network_args.*expected a whole number'),
        ("lr_weight=1", "Unknown key 'lr_weight' .*Did you mean '(down|mid|up)_lr_weight'"),
        ("algo=lokr", "network_args 'algo' .*LyCORIS"),
    ],
)
def test_network_args_that_are_not_understood(load: Load, argument: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load("--network_args", argument)


def test_network_args_twice_the_same_key(load: Load) -> None:
    with pytest.raises(OptionError, match="'conv_dim' stands more than once"):
        load("--network_args", "conv_dim=4", "conv_dim=8")


def test_numbers_by_block_are_network_args_as_sd_scripts_writes_them(load: Load) -> None:
    arguments = [
        "down_lr_weight=0,0,0,0,0,0,1,1,1,1,1,1",
        "mid_lr_weight=0.5",
        "up_lr_weight=sine+.2",
        "block_lr_zero_threshold=0.1",
        "block_dims=2,2,2,2,4,4,4,4,6,6,6,6,8,6,6,6,6,4,4,4,4,2,2,2,2",
        "conv_block_dims=2",
        "loraplus_lr_ratio=16",
    ]
    network = load("--network_args", *arguments).options.network
    assert network.down_lr_weight == "0,0,0,0,0,0,1,1,1,1,1,1"
    assert (network.mid_lr_weight, network.up_lr_weight) == ("0.5", "sine+.2")
    assert (network.block_lr_zero_threshold, network.loraplus_lr_ratio) == (0.1, 16.0)
    assert network.network_args == [*arguments[:6], "loraplus_lr_ratio=16.0"]


@pytest.mark.parametrize(
    "toml",
    [
        'block_lr = { "down.4-5" = 0.5, mid = 0, up = "sine" }',
        "block_lr = { down.4-5 = 0.5, mid = 0, up = 'sine' }",
        '[block_lr]\n"down.4-5" = 0.5\nmid = 0\nup = "sine"',
        '[network.block_lr]\n"down.4-5" = 0.5\nmid = 0\nup = "sine"',
        '[network]\nblock_lr = ["down.4-5=0.5", "mid=0", "up=sine"]',
        'block_lr = "down.4-5=0.5  mid=0 up=sine"',
        'network_args = ["block_lr=down.4-5=0.5 mid=0 up=sine"]',
    ],
)
def test_block_lr_is_a_table(load: Load, tmp_path: Path, toml: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    network = load("--config_file", str(file)).options.network
    assert network.block_lr == ["down.4-5=0.5", "mid=0", "up=sine"]
    assert network.network_args == ["block_lr=down.4-5=0.5 mid=0 up=sine"]


def test_block_lr_may_be_a_preset_and_hold_lists(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('block_lr = "OUTALL"\n')
    assert load("--config_file", str(file)).options.network.block_lr == ["OUTALL"]
    file.write_text('block_lr = { "up.6-8" = [0.1, 0, "0.3"] }\n')
    assert load("--config_file", str(file)).options.network.block_lr == ["up.6-8=0.1,0,0.3"]
    file.write_text("block_lr = {}\n")
    assert load("--config_file", str(file)).options.network.network_args == []
    assert load("--block_lr", "down=0", "--block_lr", "mid=0.5").options.network.block_lr == ["down=0", "mid=0.5"]


@pytest.mark.parametrize("toml", ["block_lr = 1", "block_lr = [1]", "block_lr = { down = true }"])
def test_numbers_by_block_of_another_type(load: Load, tmp_path: Path, toml: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    with pytest.raises(OptionError, match=r"block_lr = .*: expected a (table|list)"):
        load("--config_file", str(file))


# ---------------------------------------------------------------------------------------- what follows from what


def test_zero_turns_options_off_that_kohya_ss_writes_as_zero(load: Load) -> None:
    loaded = load(
        "--min_snr_gamma", "0", "--scale_weight_norms", "0", "--clip_skip", "0", "--network_args", "rank_dropout=0"
    )
    values = flat_values(loaded.options)
    assert [values[name] for name in ("min_snr_gamma", "scale_weight_norms", "clip_skip", "rank_dropout")] == [None] * 4
    assert values["network_args"] == []


def test_caching_to_disk_is_caching(load: Load) -> None:
    assert load("--cache_latents_to_disk").options.dataset.cache_latents is True


def test_a_log_folder_means_tensorboard(load: Load) -> None:
    loaded = load("--logging_dir", "logs")
    assert loaded.options.log.log_with == "tensorboard"
    assert len(loaded.notices) == 1
    assert "TensorBoard" in loaded.notices[0]
    assert load("--logging_dir", "logs", "--log_with", "wandb").options.log.log_with == "wandb"


# ---------------------------------------------------------------------------------------- names that do not exist


def misspelt(name: str, generator: random.Random) -> str:
    """Return the name with one letter left out or replaced by one that occurs in no option."""
    place = generator.randrange(len(name))
    return name[:place] + generator.choice(["", "q"]) + name[place + 1 :]


@pytest.mark.parametrize("name", [*option_types(), "config_file"])
def test_a_misspelt_option_is_an_error_that_names_the_right_one(name: str, tmp_path: Path) -> None:
    generator = random.Random(name)
    wrong = misspelt(name, generator)
    arguments, dashes, where = [f"--{wrong}", "1"], "--", "command line"
    if generator.random() < 0.5:
        file = tmp_path / "run.toml"
        file.write_text(f"[part]\n{wrong} = 1\n")
        arguments, dashes, where = ["--config_file", str(file)], "", f"{file}, section [part]"
    with pytest.raises(OptionError) as error:
        load_train_options(arguments)
    said, _, hint = str(error.value).partition(" Did you mean")
    assert said.startswith(f"Unknown option '{dashes}{wrong}' ({where}).")
    is_like_no_other = name not in ("v2", "clip_l", "clip_g")  # what is left of these may be nothing like them
    if is_like_no_other:
        assert hint == f" '{dashes}{name}'?"
    for _ in range(6 if is_like_no_other else 0):
        assert f"Did you mean '{name}'?" in str(unknown_option_error(misspelt(name, generator), "here"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run.toml"], "Unexpected argument 'run.toml'.*--config_file"),
        (["--v2", "true"], "Unexpected argument 'true'.*--name=false"),
        (["--network_dim", "x"], 'Invalid value for --network_dim: unable to convert "x" into int'),
        (["--network_dim"], "--network_dim requires an argument"),
        (["--seed", "1", "--seed", "2"], "--seed specified multiple times"),
        (["--mixed_precision", "fp61"], 'Invalid value "fp61" for --mixed_precision.*Did you mean "fp16"'),
        (["--zero_stage", "--v2"], "--zero_stage needs a value"),
        (["--help2"], "Unknown option '--help2'.*train --help"),
    ],
)
def test_command_lines_that_cannot_be_meant(load: Load, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(*arguments)


def test_a_file_cannot_name_a_file(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('config_file = "other.toml"\n')
    with pytest.raises(OptionError, match="one file cannot name another"):
        load("--config_file", str(file))
