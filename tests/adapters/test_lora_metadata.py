"""The text metadata of LoRA files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from maulstick.adapters import metadata as module
from maulstick.adapters.metadata import (
    BaseModelFacts,
    DatasetFacts,
    LoraRunFacts,
    ModelSpecFacts,
    base_model_version,
    build_metadata,
    sd_architecture,
)

# What sd-scripts writes for every run, and for every run on folders; programs look these entries up.
ALWAYS = """session_id training_started_at output_name learning_rate text_encoder_lr unet_lr num_train_images
num_validation_images num_reg_images num_batches_per_epoch num_epochs gradient_checkpointing
gradient_accumulation_steps max_train_steps lr_warmup_steps lr_scheduler network_module network_dim network_alpha
network_dropout mixed_precision full_fp16 v2 base_model_version clip_skip max_token_length cache_latents seed lowram
noise_offset multires_noise_iterations multires_noise_discount adaptive_noise_scale zero_terminal_snr
training_comment sd_scripts_commit_hash optimizer max_grad_norm caption_dropout_rate caption_dropout_every_n_epochs
caption_tag_dropout_rate face_crop_aug_range prior_loss_weight min_snr_gamma scale_weight_norms ip_noise_gamma
debiased_estimation noise_offset_random_strength ip_noise_gamma_random_strength loss_type huber_schedule huber_scale
huber_c fp8_base fp8_base_unet validation_seed validation_split max_validation_steps validate_every_n_epochs
validate_every_n_steps resize_interpolation steps epoch training_finished_at"""
FOLDER_RUN = """batch_size_per_device total_batch_size resolution color_aug flip_aug random_crop shuffle_caption
enable_bucket bucket_no_upscale min_bucket_reso max_bucket_reso keep_tokens dataset_dirs reg_dataset_dirs
tag_frequency bucket_info"""


def _facts(**changes) -> LoraRunFacts:
    values = {
        "base_model_version": "sd_v1",
        "v2": False,
        "network_dim": 16,
        "network_alpha": 1.0,
        "output_name": "style",
        "model_spec": ModelSpecFacts(architecture="stable-diffusion-v1/lora", date="2026-03-01T12:00:00"),
    }
    return LoraRunFacts(**(values | changes))


FOLDERS = DatasetFacts(
    tag_frequency={"10_cat": {"cat": 3, "ほうき": 1}},
    dataset_dirs={"10_cat": {"n_repeats": 10, "img_count": 3}},
    reg_dataset_dirs={},
    batch_size_per_device=2,
    total_batch_size=4,
    resolution=(512, 512),
    color_aug=False,
    flip_aug=True,
    random_crop=False,
    shuffle_caption=True,
    enable_bucket=True,
    bucket_no_upscale=False,
    min_bucket_reso=256,
    max_bucket_reso=1024,
    keep_tokens=1,
    bucket_info={"buckets": {"0": {"resolution": [512, 448], "count": 3}}, "mean_img_ar_error": 0.02},
)


def test_everything_that_sd_scripts_always_writes_is_there():
    written = build_metadata(_facts(dataset=FOLDERS))
    assert {f"ss_{name}" for name in (*ALWAYS.split(), *FOLDER_RUN.split())} <= written.keys()
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in written.items())
    assert list(written) == sorted(written)


def test_values_are_written_as_python_prints_them():
    written = build_metadata(
        _facts(dataset=FOLDERS, learning_rate=1e-4, unet_lr=None, v2=True, clip_skip=2, text_encoder_lr=[5e-5])
    )
    expected = {
        "ss_learning_rate": "0.0001",
        "ss_unet_lr": "None",
        "ss_v2": "True",
        "ss_clip_skip": "2",
        "ss_text_encoder_lr": "[5e-05]",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "16",
        "ss_network_alpha": "1.0",
        "ss_resolution": "(512, 512)",
        "ss_flip_aug": "True",
    }
    assert {key: written[key] for key in expected} == expected


def test_json_values_have_the_shapes_programs_decode():
    written = build_metadata(_facts(dataset=FOLDERS, network_args={"conv_dim": "8"}, network_dropout=0.1))
    assert json.loads(written["ss_tag_frequency"]) == {"10_cat": {"cat": 3, "ほうき": 1}}
    assert json.loads(written["ss_dataset_dirs"]) == {"10_cat": {"n_repeats": 10, "img_count": 3}}
    assert json.loads(written["ss_bucket_info"])["buckets"]["0"] == {"resolution": [512, 448], "count": 3}
    assert json.loads(written["ss_network_args"]) == {"conv_dim": "8", "dropout": 0.1}
    assert written["ss_reg_dataset_dirs"] == "{}"
    assert "ss_datasets" not in written


def test_a_run_with_a_dataset_file_and_without_network_args():
    written = build_metadata(_facts(dataset=DatasetFacts(datasets=[{"is_dreambooth": True, "resolution": [512, 512]}])))
    assert json.loads(written["ss_datasets"]) == [{"is_dreambooth": True, "resolution": [512, 512]}]
    assert not written.keys() & {"ss_network_args", "ss_resolution", "ss_bucket_info", "ss_reg_dataset_dirs"}


def test_base_model_entries_are_there_when_known():
    assert not any("hash" in key and "commit" not in key for key in build_metadata(_facts()))
    model = BaseModelFacts(sd_model_name="base.safetensors", sd_model_hash="0123abcd", new_sd_model_hash="f" * 64)
    written = build_metadata(_facts(base_model=model))
    assert written["ss_sd_model_name"] == "base.safetensors"
    assert written["ss_sd_model_hash"] == "0123abcd"
    assert written["ss_new_sd_model_hash"] == "f" * 64
    assert "ss_vae_name" not in written


def test_model_specification():
    spec = ModelSpecFacts(
        architecture="stable-diffusion-v2-768-v/lora",
        date="2026-03-01T12:00:00",
        resolution=(768, 512),
        prediction_type="v",
        encoder_layer=2,
        timestep_range=(0, 500),
        tags="a,b",
        implementation_version="maulstick/0.1.0",
    )
    written = {key: value for key, value in build_metadata(_facts(model_spec=spec)).items() if "modelspec." in key}
    assert written == {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v2-768-v/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.implementation_version": "maulstick/0.1.0",
        "modelspec.title": "style",
        "modelspec.date": "2026-03-01T12:00:00",
        "modelspec.resolution": "768x512",
        "modelspec.prediction_type": "v",
        "modelspec.encoder_layer": "2",
        "modelspec.timestep_range": "0,500",
        "modelspec.tags": "a,b",
    }


def test_no_metadata_keeps_the_minimum():
    written = build_metadata(_facts(dataset=FOLDERS, network_args={"conv_dim": "8"}), no_metadata=True)
    assert {key for key in written if key.startswith("ss_")} == {
        "ss_v2",
        "ss_base_model_version",
        "ss_network_module",
        "ss_network_dim",
        "ss_network_alpha",
        "ss_network_args",
    }
    assert "modelspec.architecture" in written


def test_equal_facts_give_equal_text_whatever_their_order():
    first = _facts(dataset=replace(FOLDERS, tag_frequency={"a": {"x": 1, "y": 2}, "b": {}}))
    second = _facts(dataset=replace(FOLDERS, tag_frequency={"b": {}, "a": {"y": 2, "x": 1}}))
    assert build_metadata(first) == build_metadata(second)
    assert build_metadata(first) != build_metadata(replace(second, session_id=1))


def test_an_oversized_tag_list_keeps_the_most_frequent(monkeypatch):
    monkeypatch.setattr(module, "MAX_TAG_FREQUENCY_BYTES", 400)
    tags = {f"sentence number {n} in words": n for n in range(1, 101)}
    written = build_metadata(_facts(dataset=DatasetFacts(tag_frequency={"10_a": tags, "5_b": {"rare": 1}})))
    text = written["ss_tag_frequency"]
    kept = json.loads(text)
    assert 300 < len(text) <= 400
    assert kept["5_b"] == {}
    assert kept["10_a"] == {f"sentence number {n} in words": n for n in range(101 - len(kept["10_a"]), 101)}


@pytest.mark.parametrize(
    ("v2", "v", "version", "architecture"),
    [
        (False, False, "sd_v1", "stable-diffusion-v1/lora"),
        (False, True, "sd_v1_v", "stable-diffusion-v1/lora"),
        (True, False, "sd_v2", "stable-diffusion-v2-512/lora"),
        (True, True, "sd_v2_v", "stable-diffusion-v2-768-v/lora"),
    ],
)
def test_names_of_model_versions(v2, v, version, architecture):
    assert base_model_version(v2=v2, v_parameterization=v) == version
    assert sd_architecture(v2=v2, v_parameterization=v) == architecture


def test_blocks_names_and_metadata_load_without_torch():
    script = (
        "import sys; import maulstick.adapters.blocks, maulstick.adapters.key_names, maulstick.adapters.metadata; "
        "assert not {'torch', 'peft', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    source = Path(module.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": str(source)})
