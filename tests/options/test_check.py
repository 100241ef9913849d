"""What options say together: contradictions, ranges, and leftovers without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maulstick.errors import OptionError
from maulstick.options.check import check_train_options
from maulstick.options.load import LoadedOptions, load_train_options
from maulstick.options.ranges import RANGES
from maulstick.options.schema import DatasetOptions, ModelOptions, RunOptions, TrainOptions

Load = Callable[..., LoadedOptions]


@pytest.mark.parametrize(
    "missing", ["pretrained_model_name_or_path", "train_data_dir", "output_dir"], ids=["model", "data", "output"]
)
def test_what_is_required_is_asked_for_by_name(missing: str) -> None:
    given = {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o"}
    tokens = [token for name, value in given.items() if name != missing for token in (f"--{name}", value)]
    with pytest.raises(OptionError, match=f"Give {missing}"):
        load_train_options(tokens)


def test_a_dataset_description_stands_for_the_data_folder(load: Load) -> None:
    assert load("--train_data_dir", "", "--dataset_config", "d.toml").options.dataset.train_data_dir is None


@pytest.mark.parametrize(
    "arguments, named",
    [
        (
            ["--network_train_unet_only", "--network_train_text_encoder_only"],
            ["network_train_unet_only", "network_train_text_encoder_only"],
        ),
        (["--dim_from_weights"], ["dim_from_weights", "network_weights"]),
        (["--conv_alpha", "4"], ["conv_alpha", "conv_dim"]),
        (
            ["--network_train_unet_only", "--text_encoder_lr", "1e-5"],
            ["network_train_unet_only", "text_encoder_lr = 1e-05"],
        ),
        (
            ["--network_train_text_encoder_only", "--unet_lr", "1e-5"],
            ["network_train_text_encoder_only", "unet_lr = 1e-05"],
        ),
        (["--block_lr", "mid=0", "--mid_lr_weight", "0"], ["block_lr", "mid_lr_weight"]),
        (["--block_alphas", "1"], ["block_alphas", "Give block_dims too"]),
        (["--network_args", "block_alphas=1"], ["block_alphas", "Give block_dims too"]),
        (["--conv_block_alphas", "1", "--block_dims", "4"], ["conv_block_alphas", "Give conv_block_dims too"]),
        (["--cache_text_encoder_outputs"], ["cache_text_encoder_outputs", "Add network_train_unet_only"]),
        (["--dataset_config", "d.toml"], ["dataset_config", "train_data_dir"]),
        (
            ["--train_data_dir", "", "--dataset_config", "d.toml", "--reg_data_dir", "r"],
            ["dataset_config", "reg_data_dir"],
        ),
        (
            ["--lr_warmup_steps", "100"],
            ["lr_scheduler = constant", "lr_warmup_steps = 100", "lr_scheduler = constant_with_warmup"],
        ),
        (["--sample_every_n_steps", "10"], ["sample_every_n_steps", "sample_prompts"]),
        (["--sample_every_n_epochs", "1"], ["sample_every_n_epochs", "sample_prompts"]),
        (["--sample_at_first"], ["sample_at_first", "sample_prompts"]),
        (
            ["--min_bucket_reso", "512", "--max_bucket_reso", "256"],
            ["min_bucket_reso = 512", "max_bucket_reso = 256"],
        ),
        (["--enable_bucket", "--resolution", "64"], ["min_bucket_reso = 256", "resolution = 64"]),
        (["--enable_bucket", "--resolution", "512,1536"], ["max_bucket_reso = 1024", "resolution = 512,1536"]),
    ],
)
def test_contradictions_name_both_options(load: Load, arguments: list[str], named: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        load(*arguments)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--network_alpha", "-1"], "network_alpha = -1.0: expected 0 or more"),
        (["--learning_rate", "0"], "Nothing would be trained"),
        (["--unet_lr", "0", "--network_train_unet_only"], "Nothing would be trained"),
        (["--network_dropout", "1"], "network_dropout = 1.0: expected a chance from 0 to below 1"),
        (["--caption_dropout_rate", "1.01"], "caption_dropout_rate = 1.01: expected a chance from 0 to 1"),
        (["--seed", "-1"], "seed = -1: expected a whole number from 0 to 4294967295"),
        (["--learning_rate", "inf"], "learning_rate = inf"),
        (["--learning_rate", "nan"], "learning_rate = nan"),
        (["--text_encoder_lr", "-1e-4"], "text_encoder_lr = -0.0001: expected 0 or more"),
        (["--bucket_reso_steps", "20"], "bucket_reso_steps = 20: expected a multiple of 8"),
        (["--resolution", "500"], "resolution = 500: the sides of an image must be multiples of 8"),
        (["--resolution", "512x512"], "512x512"),
        (["--output_name", "a/b"], "output_name = 'a/b': expected a file name"),
        (["--output_name", " "], "output_name = ' ': expected a file name"),
        (["--lr_warmup_steps", "1.0", "--lr_scheduler", "cosine"], "lr_warmup_steps = 1.0.*100% for all"),
        (["--text_encoder_lr", "1e-4", "1e-5", "1e-6"], "text_encoder_lr has 3 values"),
        (["--text_encoder_lr2", "-1"], "text_encoder_lr2 = -1.0: expected 0 or more"),
        (["--network_module", "lycoris.kohya"], "network_module = lycoris.kohya: its kinds.*network_type"),
        (["--network_module", "networks.lroa"], "network_module = networks.lroa: there is no such network"),
    ],
)
def test_values_out_of_range(load: Load, arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(*arguments)


@pytest.mark.parametrize(
    "name", sorted(RANGES.keys() - {"logit_mean", "adaptive_noise_scale", "base_weights_multiplier"})
)
def test_no_number_may_be_negative(load: Load, name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} = -3(\.0)?: expected"):
        load(f"--{name}=-3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--network_train_unet_only", "--text_encoder_lr", "0"],
        ["--network_train_unet_only", "--cache_text_encoder_outputs"],
        ["--network_train_text_encoder_only", "--unet_lr", "0"],
        ["--dim_from_weights", "--network_weights", "w.safetensors"],
        ["--lr_warmup_steps", "0%"],
        ["--lr_warmup_steps", "0.1", "--lr_scheduler", "cosine"],
        ["--enable_bucket", "--resolution", "500"],
        ["--keep_tokens", "0", "--prior_loss_weight", "1", "--sample_sampler", "euler", "--min_bucket_reso", "256"],
        ["--max_grad_norm", "0"],
        ["--keep_tokens", "1", "--caption_tag_dropout_rate", "0.1"],
        ["--block_alphas", "1", "--mid_lr_weight", "0"],
        ["--conv_block_dims", "4", "--conv_alpha", "2"],
        ["--block_lr", "mid=0", "--block_lr_zero_threshold", "0.1"],
        ["--loraplus_lr_ratio", "0", "--block_lr_zero_threshold", "0"],
        ["--train_data_dir", "", "--dataset_config", "d.toml", "--keep_tokens", "1", "--min_bucket_reso", "128"],
    ],
)
def test_harmless_combinations_pass_without_a_word(load: Load, arguments: list[str]) -> None:
    assert load(*arguments).notices == []


@pytest.mark.parametrize(
    "arguments, notice",
    [
        (
            ["--keep_tokens", "1"],
            "keep_tokens has no effect without shuffle_caption, caption_tag_dropout_rate or token_warmup_step.",
        ),
        (["--token_warmup_min", "3"], "token_warmup_min has no effect without token_warmup_step."),
        (
            ["--bucket_no_upscale", "--max_bucket_reso", "2048"],
            "max_bucket_reso, bucket_no_upscale have no effect without enable_bucket.",
        ),
        (["--fsdp_base"], "autopsy has no effect with fsdp_base: one process alone cannot run a step again."),
        (
            ["--multires_noise_discount", "0.5"],
            "multires_noise_discount has no effect without multires_noise_iterations.",
        ),
        (["--huber_c", "0.5"], "huber_c has no effect without loss_type = huber or smooth_l1."),
        (["--prior_loss_weight", "0.5"], "prior_loss_weight has no effect without reg_data_dir."),
        (
            ["--max_train_steps", "100", "--max_train_epochs", "3"],
            "max_train_steps has no effect: max_train_epochs = 3 takes its place.",
        ),
        (["--no_metadata", "--training_comment", "x"], "training_comment has no effect with no_metadata."),
        (["--sample_sampler", "euler_a"], "sample_sampler has no effect without sample_prompts."),
        (
            ["--sample_prompts", "p.txt", "--sample_sampler", "euler_a"],
            "sample_prompts, sample_sampler have no effect without sample_every_n_steps, sample_every_n_epochs or "
            "sample_at_first.",
        ),
        (
            ["--lr_scheduler", "constant_with_warmup"],
            "lr_scheduler = constant_with_warmup is the same as constant without lr_warmup_steps.",
        ),
        (
            ["--network_train_text_encoder_only", "--network_args", "conv_dim=4"],
            "conv_dim has no effect with network_train_text_encoder_only.",
        ),
        (
            ["--network_train_text_encoder_only", "--block_lr", "mid=0", "--loraplus_unet_lr_ratio", "4"],
            "block_lr, loraplus_unet_lr_ratio have no effect with network_train_text_encoder_only.",
        ),
        (
            ["--network_train_unet_only", "--loraplus_text_encoder_lr_ratio", "4"],
            "loraplus_text_encoder_lr_ratio has no effect with network_train_unet_only.",
        ),
        (
            ["--block_lr_zero_threshold", "0.1"],
            "block_lr_zero_threshold has no effect without down_lr_weight, mid_lr_weight, up_lr_weight or block_lr.",
        ),
        (["--conv_dim", "4", "--conv_block_dims", "4"], "conv_dim has no effect with conv_block_dims."),
        (
            ["--dim_from_weights", "--network_weights", "w", "--block_dims", "4"],
            "block_dims has no effect with dim_from_weights: ranks and alphas come from network_weights.",
        ),
        (["--log_prefix", "a_", "--log_with", "wandb"], "log_prefix has no effect without TensorBoard."),
        (["--wandb_run_name", "a"], "wandb_run_name has no effect without W&B."),
        (["--log_tracker_name", "a"], "log_tracker_name has no effect without log_with."),
        (
            ["--learning_rate", "1e-3", "--unet_lr", "1e-4", "--text_encoder_lr", "1e-5"],
            "learning_rate has no effect: every part that is trained has a rate of its own.",
        ),
        (
            ["--learning_rate", "1e-3", "--unet_lr", "1e-4", "--network_train_unet_only"],
            "learning_rate has no effect: every part that is trained has a rate of its own.",
        ),
        (
            ["--dim_from_weights", "--network_weights", "w", "--network_dim", "4"],
            "network_dim has no effect with dim_from_weights: ranks and alphas come from network_weights.",
        ),
        (["--network_alpha", "0"], "network_alpha = 0 means network_alpha = network_dim (4), as in sd-scripts."),
        (
            ["--text_encoder_lr", "0"],
            "A learning rate of 0 for the text encoder: it is not trained, and not in the file.",
        ),
        (["--unet_lr", "0"], "A learning rate of 0 for the UNet: it is not trained, and not in the file."),
    ],
)
def test_leftovers_are_named(load: Load, arguments: list[str], notice: str) -> None:
    assert load(*arguments).notices == [notice]


def test_options_made_in_python_are_checked_alike() -> None:
    options = TrainOptions(
        model=ModelOptions(pretrained_model_name_or_path="m"),
        dataset=DatasetOptions(dataset_config="d.toml"),  # type: ignore[arg-type]
        run=RunOptions(output_dir="o", max_train_steps=0),  # type: ignore[arg-type]
    )
    with pytest.raises(OptionError, match="max_train_steps = 0: expected at least 1"):
        check_train_options(options, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--masked_loss",), "masked_loss is given without masks. Give conditioning_data_dir"),
        (("--conditioning_data_dir", "m"), "conditioning_data_dir is given, but nothing uses it"),
        (
            ("--masked_loss", "--conditioning_data_dir", "m", "--alpha_mask"),
            "alpha_mask and conditioning_data_dir contradict each other",
        ),
        (
            ("--masked_loss", "--conditioning_data_dir", "m", "--network_type", "ip_adapter", "--image_encoder", "e"),
            "masked_loss and conditioning_data_dir contradict each other: it is the folder of an IP-Adapter",
        ),
    ],
)
def test_masks_come_from_one_place(load, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(*arguments)


def test_masks_that_can_be_meant(load) -> None:
    for arguments in (
        ("--alpha_mask",),
        ("--masked_loss", "--alpha_mask"),
        ("--masked_loss", "--conditioning_data_dir", "m"),
        ("--conditioning_data_dir", "m", "--network_type", "ip_adapter", "--image_encoder", "e"),
    ):
        assert load(*arguments).notices == []


@pytest.mark.parametrize("name", ["random_crop", "color_aug"])
@pytest.mark.parametrize("cache", ["cache_latents", "cache_latents_to_disk"])
def test_varied_images_cannot_be_cached(load: Load, name: str, cache: str) -> None:
    with pytest.raises(OptionError, match=f"{name} and cache_latents contradict each other: latents are cached once"):
        load(f"--{name}", f"--{cache}")
    assert load(f"--{name}").notices == []


def test_options_about_reading_images(load: Load) -> None:
    data = load("--vae_batch_size", "3", "--max_data_loader_n_workers", "0", "--skip_image_resolution", "512,768")
    assert (data.options.dataset.vae_batch_size, data.options.dataset.max_data_loader_n_workers) == (3, 0)
    assert data.notices == []
    assert load("--vae_batch_size", "0").options.dataset.vae_batch_size is None
    for arguments, message in (
        (("--vae_batch_size", "-1"), "vae_batch_size = -1: expected at least 1"),
        (("--max_data_loader_n_workers", "-1"), "max_data_loader_n_workers = -1: expected 0 or more"),
        (("--skip_image_resolution", "big"), "skip_image_resolution is 'big'; expected one size"),
        (("--resize_interpolation", "lancsos"), "lancsos"),
    ):
        with pytest.raises(OptionError, match=message):
            load(*arguments)
