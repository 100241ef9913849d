"""The probe's own options, beside those of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from maulstick.errors import OptionError
from maulstick.options.probe import ProbeOptions, load_probe_options
from maulstick.tools.probe import options_to_probe

REQUIRED = ["--pretrained_model_name_or_path", "m", "--train_data_dir", "d", "--output_dir", "o"]


def test_options_of_both_kinds_may_stand_in_any_order() -> None:
    own = ["--probe_lr", "2e-4", "--json", "--probe_output=there", "--probe_steps", "3"]
    lists = ["--block_lr", "down.4=0.5", "mid=0", "--optimizer_args", "betas=0.9,0.95", "weight_decay=0"]
    for arguments in ([*own, *REQUIRED, *lists], [*lists, *own, *REQUIRED], [*REQUIRED, *lists, *own]):
        asked = load_probe_options(arguments)
        assert asked.probe == ProbeOptions(probe_lr=2e-4, probe_output=Path("there"), probe_steps=3)
        assert asked.as_json
        assert asked.loaded.options.network.block_lr == ["down.4=0.5", "mid=0"]
        assert asked.loaded.options.optimizer.optimizer_args == ["betas=0.9,0.95", "weight_decay=0"]
    assert load_probe_options(REQUIRED).probe == ProbeOptions()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--probe_image", "3"], "Did you mean 'probe_images'"),
        (["--network_dimm", "3"], "network_dim"),
        (["--probe_steps", "0"], "probe_steps = 0: expected at least 1"),
        (["--probe_lr", "0"], "probe_lr = 0: expected a number above 0"),
        (["--probe_lr", "inf"], "probe_lr = inf"),
        (["--probe_images", "many"], "probe_images"),
        (["--network_weights", "w.safetensors"], "starts every trial from the base model"),
        (["--network_train_text_encoder_only"], "nothing to probe"),
        (["--network_type", "ip_adapter", "--image_encoder", "clip"], "says nothing about an IP-Adapter"),
        (["--optimizer_type", "Prodigy", "--learning_rate", "1"], "Give --probe_lr"),
    ],
)
def test_what_cannot_be_probed_is_refused(arguments: list[str], message: str) -> None:
    def load() -> None:
        asked = load_probe_options([*REQUIRED, *arguments])
        options_to_probe(asked.loaded, asked.probe)

    with pytest.raises(OptionError, match=message):
        load()


def test_what_is_set_aside_is_named() -> None:
    asked = load_probe_options([*REQUIRED, "--up_lr_weight", "0.5", "--rank_dropout", "0.1", "--network_dim", "8"])
    loaded, notes = options_to_probe(asked.loaded, asked.probe)
    network = loaded.options.network
    assert (network.up_lr_weight, network.rank_dropout, network.network_dim) == (None, None, 8)
    assert network.network_train_unet_only
    text = "\n".join(notes)
    assert "up_lr_weight: not used here" in text
    assert "rank_dropout: not used here" in text
    assert "text encoder is not measured" in text
