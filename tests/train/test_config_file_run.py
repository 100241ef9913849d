"""A config file as sd-scripts' users have it, with every option of the main job, run as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from maulstick.adapters.files import read_lora_file
from maulstick.cli import main
from tests.models import single_file

CONFIG = """
[model_arguments]
pretrained_model_name_or_path = "{model}"
v2 = false
v_parameterization = false
clip_skip = 2
max_token_length = 150

[dataset_arguments]
train_data_dir = "{images}"
reg_data_dir = "{reg}"
resolution = "64,64"
train_batch_size = 2
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
caption_dropout_rate = 0.1
enable_bucket = true
min_bucket_reso = 64
max_bucket_reso = 128
bucket_reso_steps = 64
bucket_no_upscale = false
flip_aug = true
cache_latents = true
cache_latents_to_disk = true
prior_loss_weight = 0.5

[network_arguments]
network_module = "networks.lora"
network_dim = 4
network_alpha = 2
network_dropout = 0.05
network_args = ["conv_dim=2", "conv_alpha=1", "rank_dropout=0.05", "module_dropout=0.05"]
scale_weight_norms = 1.0
network_train_unet_only = false
network_train_text_encoder_only = false

[optimizer_arguments]
optimizer_type = "AdamW"
optimizer_args = ["weight_decay=0.01", "betas=0.9,0.99"]
learning_rate = 1e-4
unet_lr = 1e-4
text_encoder_lr = 5e-5
lr_scheduler = "cosine"
lr_warmup_steps = 1
max_grad_norm = 1.0

[training_arguments]
output_dir = "{output}"
output_name = "style"
save_precision = "fp16"
save_model_as = "safetensors"
save_every_n_epochs = 1
save_every_n_steps = 4
max_train_epochs = 1
gradient_accumulation_steps = 2
gradient_checkpointing = true
mixed_precision = "bf16"
seed = 42
min_snr_gamma = 5.0
noise_offset = 0.05
xformers = true
max_data_loader_n_workers = 0

[sample_arguments]
sample_prompts = "{prompts}"
sample_every_n_steps = 100
sample_every_n_epochs = 1
sample_at_first = true
sample_sampler = "euler_a"

[logging_arguments]
logging_dir = "{output}/logs"
log_with = "tensorboard"
"""


@pytest.mark.slow
def test_a_config_file_of_sd_scripts_runs_unchanged(images: Path, tmp_path: Path, capsys):
    reg = tmp_path / "reg" / "1_shape"
    reg.mkdir(parents=True)
    for source in sorted((images / "2_shape").glob("[01].*")):
        (reg / source.name).write_bytes(source.read_bytes())
    training = tmp_path / "images" / "2_shape"
    training.mkdir(parents=True)
    for source in (images / "2_shape").glob("*.*"):
        (training / source.name).write_bytes(source.read_bytes())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a shape, red --n blurry --w 64 --h 64 --d 7 --l 5 --s 2\n")
    config = tmp_path / "config.toml"
    output = tmp_path / "out"
    places = {
        "model": single_file(),
        "images": training.parent,
        "reg": reg.parent,
        "output": output,
        "prompts": prompts,
    }
    config.write_text(CONFIG.format(**places))

    assert main(["train", "--config_file", str(config)]) == 0

    shown = capsys.readouterr().out
    assert "xformers" in shown, "an option without effect is named"
    assert "10 per epoch with repeats + " in shown
    file = read_lora_file(output / "style.safetensors")
    assert len(file.modules) == 278 + 72
    assert file.metadata["ss_clip_skip"] == "2"
    assert file.metadata["ss_optimizer"].startswith("AdamW(weight_decay=0.01")
    assert sorted(path.name for path in (output / "sample").glob("*.png")) == [
        "style_epoch000001_00.png",
        "style_first_00.png",
    ]
    assert list((output / "logs").rglob("events.out.tfevents.*"))
