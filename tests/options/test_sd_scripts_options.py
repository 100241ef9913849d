"""sd-scripts' options: every one has a verdict, defaults are silent, and files of kohya_ss load unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maulstick.errors import OptionError
from maulstick.options.check import DEFAULTS
from maulstick.options.config_file import Given
from maulstick.options.load import LoadedOptions, load_train_options
from maulstick.options.sd_scripts import judge_options, option_rows, take_leftover_tokens
from maulstick.options.sd_scripts_table import (
    DIFFERENCES,
    MAULSTICK_ONLY,
    NETWORK_ARGUMENTS,
    SD_SCRIPTS_OPTIONS,
    NoEffect,
    Refused,
    Renamed,
)
from maulstick.options.values import option_types

Load = Callable[..., LoadedOptions]

NAMES = json.loads((Path(__file__).parent / "sd_scripts_names.json").read_text())
"""The option names of sd-scripts' LoRA scripts, and the keys that kohya_ss adds to its files."""


def test_every_option_of_sd_scripts_has_exactly_one_verdict() -> None:
    rows = [row.name for row in option_rows()]
    theirs = {name for names in NAMES.values() for name in names}
    assert len(theirs) == 227
    assert len(rows) == len(set(rows))
    assert set(rows) == theirs | MAULSTICK_ONLY
    assert set(DIFFERENCES) <= {*option_types(), "config_file"}


def test_verdicts_say_something() -> None:
    for row in option_rows():
        assert row.verdict in {"same", "ours", "renamed", "no effect", "refused"}
        assert row.verdict == "same" or len(row.explanation) > 5
        assert not row.explanation.endswith(".")


def as_tokens(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else [f"--{name}=false"]
    return [f"--{name}={value}"]


def as_toml(name: str, value: object) -> str:
    return f"{name} = {json.dumps(value)}"


def test_defaults_of_sd_scripts_are_accepted_silently(load: Load, tmp_path: Path) -> None:
    tokens: list[str] = []
    lines: list[str] = []
    for name, entry in SD_SCRIPTS_OPTIONS.items():
        if not isinstance(entry, Renamed) and entry.default is not None:
            tokens += as_tokens(name, entry.default)
            lines.append(as_toml(name, entry.default))
    # So that the loop is not empty; fewer are left with every option that becomes one of ours.
    assert len(lines) > 40
    file = tmp_path / "defaults.toml"
    file.write_text("\n".join(lines))
    assert load(*tokens).notices == []
    assert load("--config_file", str(file)).notices == []
    assert load("--config_file", str(file)).options == load().options


def other_value(entry: NoEffect | Refused) -> object:
    if isinstance(entry.default, bool):
        return not entry.default
    return 77 if isinstance(entry.default, int | float) else "something"


NEEDED: dict[str, dict[str, object]] = {
    "noise_offset_random_strength": {"noise_offset": 0.1},
    "wandb_api_key": {"log_with": "wandb"},
    "save_state_to_huggingface": {"huggingface_repo_id": "anna/shapes"},
    "resume_from_huggingface": {"resume": "auto"},
}
"""What must be set for a conditional refusal."""


@pytest.mark.parametrize("name", [name for name, entry in SD_SCRIPTS_OPTIONS.items() if isinstance(entry, Refused)])
def test_refused_options_say_what_to_do(name: str) -> None:
    entry = SD_SCRIPTS_OPTIONS[name]
    assert isinstance(entry, Refused)
    value = other_value(entry)
    assert (name in NEEDED) == (entry.only_with is not None)
    for given in (take_leftover_tokens(as_tokens(name, value)), {name: Given(value, "run.toml, section [part]")}):
        with pytest.raises(OptionError) as error:
            judge_options(given, {**DEFAULTS, **NEEDED.get(name, {})})
        assert str(error.value).startswith(f"{name} = ")
        assert str(error.value).endswith(f" ({given[name].where}): {entry.instead}.")
        if entry.only_with is not None:
            assert judge_options(given, DEFAULTS) == f"Without effect here: {name} ({entry.only_with.reason})."


def test_refusals_reach_the_user(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[part]\ntorch_compile = true\n")
    with pytest.raises(OptionError, match=r"torch_compile = true \(.*run\.toml, section \[part\]\): .*not support"):
        load("--config_file", str(file))
    with pytest.raises(OptionError, match=r"output_config = true \(command line\): not supported; write .name = value"):
        load("--output_config")


def test_options_without_effect_are_reported_in_one_line(load: Load) -> None:
    tokens: list[str] = []
    reported = []
    for name, entry in SD_SCRIPTS_OPTIONS.items():
        if isinstance(entry, NoEffect) and entry.needs is None:
            tokens += as_tokens(name, other_value(entry))
            reported.append(f"{name} ({entry.reason})")
    loaded = load(*tokens)
    assert loaded.notices == [f"Without effect here: {'; '.join(reported)}."]
    assert len(reported) > 25
    assert loaded.options == load().options


@pytest.mark.parametrize(
    "arguments, options",
    [
        (["--xformers", "--zero_stage", "3", "--seed", "3"], ["xformers", "zero_stage"]),
        (["--dataset_repeats=4", "--seed", "3", "--mem_eff_attn"], ["dataset_repeats", "mem_eff_attn"]),
        (["--seed", "3", "--lowram", "--sdpa"], ["lowram", "sdpa"]),
    ],
)
def test_values_of_foreign_options_are_not_mistaken(load: Load, arguments: list[str], options: list[str]) -> None:
    loaded = load(*arguments)
    assert loaded.options.run.seed == 3
    assert [
        part.split(" (")[0] for part in loaded.notices[0].removeprefix("Without effect here: ").split("; ")
    ] == options


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_full_precision_names_need_the_same_mixed_precision(load: Load, precision: str) -> None:
    name = f"full_{precision}"
    (notice,) = load(f"--{name}", "--mixed_precision", precision).notices
    assert notice.startswith(f"Without effect here: {name} (the LoRA and the optimizer stay in 32 bits")
    for other in {"no", "fp16", "bf16"} - {precision}:
        with pytest.raises(
            OptionError, match=rf"{name} = true .*: it needs mixed_precision = {precision}, but .* is {other}"
        ):
            load(f"--{name}", "--mixed_precision", other)
    assert load(f"--{name}=false").notices == []


def test_the_command_line_beats_the_file_for_foreign_options_too(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("torch_compile = true\n")
    with pytest.raises(OptionError, match="torch_compile = true"):
        load("--config_file", str(file))
    assert load("--config_file", str(file), "--torch_compile=false").notices == []


def test_the_old_spelling_of_caption_extension(load: Load, tmp_path: Path) -> None:
    assert load("--caption_extention", ".tags").options.dataset.caption_extension == ".tags"
    file = tmp_path / "run.toml"
    file.write_text('caption_extention = ".tags"\n')
    loaded = load("--config_file", str(file))
    assert loaded.options.dataset.caption_extension == ".tags"
    assert "caption_extension" in loaded.given
    file.write_text('caption_extention = ".tags"\ncaption_extension = ".txt"\n')
    with pytest.raises(OptionError, match="are the same option"):
        load("--config_file", str(file))


def test_secrets_are_not_shown(load: Load) -> None:
    with pytest.raises(OptionError) as error:
        load("--log_with", "wandb", "--wandb_api_key", "abc123")
    assert "abc123" not in str(error.value)
    assert "abc123" not in load("--wandb_api_key", "abc123").notices[0]


def test_network_arguments_of_other_networks_are_explained(load: Load) -> None:
    for key, explanation in NETWORK_ARGUMENTS.items():
        with pytest.raises(OptionError) as error:
            load("--network_args", f"{key}=1")
        assert str(error.value) == f"network_args '{key}' (command line): {explanation}."


# ---------------------------------------------------------------------------------------- whole files

KOHYA_SS = """
async_upload = true
bucket_no_upscale = true
bucket_reso_steps = 64
cache_latents = true
cache_latents_to_disk = true
caption_extension = ".txt"
clip_skip = 1
dynamo_backend = "no"
enable_bucket = true
epoch = 8
gradient_accumulation_steps = 1
gradient_checkpointing = true
huber_c = 0.1
huber_scale = 1
huber_schedule = "snr"
huggingface_path_in_repo = ""
huggingface_repo_id = ""
huggingface_repo_type = ""
huggingface_repo_visibility = ""
huggingface_token = ""
keep_tokens = 1
learning_rate = 0.0001
loss_type = "l2"
lr_scheduler = "cosine"
lr_scheduler_args = []
lr_scheduler_num_cycles = 8
lr_scheduler_power = 1
lr_warmup_steps = 80
max_bucket_reso = 2048
max_data_loader_n_workers = 0
max_grad_norm = 1
max_timestep = 1000
max_token_length = 75
max_train_steps = 800
min_bucket_reso = 256
min_snr_gamma = 5
mixed_precision = "fp16"
network_alpha = 16
network_args = ["conv_dim=8", "conv_alpha=4",]
network_dim = 32
network_module = "networks.lora"
noise_offset = 0.05
noise_offset_type = "Original"
optimizer_args = []
optimizer_type = "AdamW8bit"
output_dir = "/training/model"
output_name = "last"
persistent_data_loader_workers = 1
pretrained_model_name_or_path = "/models/v1-5-pruned.safetensors"
prior_loss_weight = 1
resolution = "512,512"
sample_prompts = "/training/model/prompt.txt"
sample_sampler = "euler_a"
save_every_n_epochs = 1
save_model_as = "safetensors"
save_precision = "fp16"
shuffle_caption = true
text_encoder_lr = [5e-5,]
train_batch_size = 2
train_data_dir = "/training/img"
unet_lr = 0.0001
wandb_run_name = "last"
xformers = true
"""
"""A configuration file as kohya_ss writes it for SD 1.5: sorted, without sections, false and 0 left out."""


def test_a_file_of_kohya_ss_loads_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "config_lora-20240401-120000.toml"
    file.write_text(KOHYA_SS)
    loaded = load_train_options(["--config_file", str(file)])
    options = loaded.options
    assert (options.network.network_dim, options.network.network_alpha) == (32, 16.0)
    assert (options.network.conv_dim, options.network.conv_alpha) == (8, 4.0)
    assert (options.optimizer.unet_lr, options.optimizer.text_encoder_lr) == (1e-4, [5e-5])
    assert (options.schedule.lr_scheduler, options.schedule.lr_warmup_steps) == ("cosine", "80")
    assert options.dataset.resolution == "512,512"
    assert options.objective.min_snr_gamma == 5.0
    assert options.log.log_with is None
    remark, *others = loaded.notices
    named = [part.split(" (")[0] for part in remark.removeprefix("Without effect here: ").split("; ")]
    assert named == [
        "epoch",
        "noise_offset_type",
        "persistent_data_loader_workers",
        "xformers",
    ]
    assert others == [
        "async_upload has no effect without huggingface_repo_id.",
        "sample_prompts, sample_sampler have no effect without sample_every_n_steps, sample_every_n_epochs or "
        "sample_at_first.",
        "lr_scheduler_num_cycles has no effect with cosine; it is for cosine_with_restarts, cosine_with_min_lr, "
        "warmup_stable_decay.",
        "wandb_run_name has no effect without W&B.",
        "learning_rate has no effect: every part that is trained has a rate of its own.",
    ]
