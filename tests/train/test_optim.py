"""The optimizer registry: what its rows claim is measured."""

import importlib.util

import pytest
import torch

from maulstick.errors import OptionError
from maulstick.options.values import parse_arguments
from maulstick.train.optim import OPTIMIZERS, RateGroup, build_optimizer

INSTALLED = [name for name, info in OPTIMIZERS.items() if importlib.util.find_spec(info.class_path.split(".")[0])]


def two_groups(first_rate: float, second_rate: float) -> list[RateGroup]:
    first, second = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    return [RateGroup("unet", first_rate, [first]), RateGroup("textencoder", second_rate, [second])]


def moved_distances(optimizer, groups, steps=10):
    generator = torch.Generator().manual_seed(0)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(steps):
        gradient = torch.randn(8, 8, generator=generator)
        for group in groups:
            group.parameters[0].grad = gradient.clone()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return [float((group.parameters[0].detach() - 1).norm()) for group in groups]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_tenth_of_the_rate_moves_a_tenth_of_the_way(name):
    info = OPTIMIZERS[name]
    rate = 1.0 if info.estimates_rate else 1e-3
    if not info.honours_group_rates:
        with pytest.raises(OptionError, match=r"unet .*textencoder .*use (ProdigyPlusScheduleFree|AdamW)"):
            build_optimizer(name, [], two_groups(rate, rate / 10))
        return
    groups = two_groups(rate, rate / 10)
    first, second = moved_distances(build_optimizer(name, [], groups), groups)
    assert second / first == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("name", [name for name in INSTALLED if not OPTIMIZERS[name].honours_group_rates])
def test_the_row_is_right_that_the_bare_class_ignores_group_rates(name):
    from maulstick.train.optim import load_optimizer_class

    groups = two_groups(1.0, 0.1)
    parameter_groups = [{"params": list(group.parameters), "lr": group.learning_rate} for group in groups]
    first, second = moved_distances(load_optimizer_class(name, OPTIMIZERS[name])(parameter_groups), groups)
    assert second / first == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in INSTALLED if not OPTIMIZERS[name].honours_group_rates])
def test_equal_rates_become_one_group(name):
    optimizer = build_optimizer(name, [], two_groups(1.0, 1.0))
    assert [group["name"] for group in optimizer.param_groups] == ["unet+textencoder"]


def test_arguments_are_python_values():
    assert parse_arguments(["weight_decay=0.01", "betas=0.9,0.99", "amsgrad=True", "mode=fast"], "optimizer_args") == {
        "weight_decay": 0.01,
        "betas": (0.9, 0.99),
        "amsgrad": True,
        "mode": "fast",
    }


def test_adafactor_takes_the_arguments_of_the_usual_presets():
    """The first step of Adafactor is the gradient by its root mean square of rows and columns: for equal ones 1."""
    usual = ["scale_parameter=False", "relative_step=False", "warmup_init=False"]
    for arguments, moved in ((usual, 4e-4), ([], 4e-4 * 2)):
        [group] = [RateGroup("unet", 4e-4, [torch.nn.Parameter(torch.full((8, 4), 2.0))])]
        optimizer = build_optimizer("AdaFactor", arguments, [group])
        group.parameters[0].grad = torch.full((8, 4), 3.0)
        optimizer.step()
        # Without scale_parameter=False the rate is multiplied by the weight's root mean square, here 2.
        assert 2 - group.parameters[0][0, 0].item() == pytest.approx(moved, rel=1e-3)
    with pytest.raises(OptionError, match=r"Adafactor refused its arguments: .*relative_step=True"):
        build_optimizer("Adafactor", ["relative_step=True"], two_groups(1e-3, 1e-3))


@pytest.mark.skipif("Prodigy" not in INSTALLED, reason="needs maulstick[optim]")
def test_prodigy_takes_the_arguments_of_the_usual_presets():
    usual = ["decouple=False", "use_bias_correction=True", "safeguard_warmup=True", "d_coef=2", "betas=0.9,0.99"]
    [group] = build_optimizer("prodigy", usual, two_groups(1.0, 1.0)).param_groups
    assert (group["weight_decouple"], group["bias_correction"], group["d_coef"]) == (False, True, 2)
    with pytest.raises(OptionError, match="'decouple' and 'weight_decouple' are the same argument"):
        build_optimizer("prodigy", ["decouple=True", "weight_decouple=True"], two_groups(1.0, 1.0))


def test_arguments_reach_the_optimizer():
    optimizer = build_optimizer("adamw", ["weight_decay=0.25", "betas=(0.8,0.9)"], two_groups(1e-3, 1e-4))
    assert [(g["weight_decay"], g["betas"], g["lr"]) for g in optimizer.param_groups] == [
        (0.25, (0.8, 0.9), 1e-3),
        (0.25, (0.8, 0.9), 1e-4),
    ]


@pytest.mark.parametrize(
    "optimizer_type, arguments, message",
    [
        ("AdamW", ["wieght_decay=0.1"], "'wieght_decay' is not an argument of AdamW.*Did you mean 'weight_decay'"),
        ("AdamW", ["lr=0.1"], "'lr' is set by learning_rate"),
        ("AdamW", ["weight_decay"], "'weight_decay' is not of the form key=value"),
        ("AdamW", ["eps=1e-8", "eps=1e-6"], "'eps' is given twice"),
        ("AdamW", ["betas=0.9"], "AdamW refused its arguments"),
        ("AdamV", [], "optimizer_type 'AdamV' is unknown.*Did you mean 'Adam"),
        ("torch.optim.NoSuch", [], "has no class 'NoSuch'"),
        ("no_such_module.Adam", [], "needs 'no_such_module'"),
    ],
)
def test_what_is_wrong_is_named(optimizer_type, arguments, message):
    with pytest.raises(OptionError, match=message):
        build_optimizer(optimizer_type, arguments, two_groups(1e-3, 1e-3))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(OptionError, match=r"pip install 'maulstick\[cuda\]'.*optimizer_type = AdamW,"):
        build_optimizer("AdamW8bit", [], two_groups(1e-3, 1e-3))
