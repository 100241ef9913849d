"""The four faults that other finders miss, and what else the probes must see: each named with module and direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from maulstick.autopsy import Direction, Report, examine


class Reciprocal(nn.Module):
    """Divides by what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


class SafeRoot(nn.Module):
    """A root whose slope at 0 is infinite; the value is fine. On the way back, the square makes NaN of the Inf."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sqrt()


class _NanOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class NanBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _NanOnTheWayBack.apply(x)


class Model(nn.Module):
    """in -> the fault -> out; ``wrap`` puts the fault's result into a dataclass, as diffusers' models do."""

    def __init__(self, fault: nn.Module, wrap: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.fault = fault
        self.last = nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        x = self.fault(self.first(x))
        return self.last(x[0] if self.wrap else x)


def loss_of(model: nn.Module, x: Tensor | None = None) -> Callable[[], Tensor]:
    given = torch.ones(3, 4) if x is None else x
    return lambda: (model(given) ** 2).mean()


def with_zero_activation(model: Model) -> Model:
    """Make the first unit of the first layer exactly 0."""
    with torch.no_grad():
        model.first.weight[0] = 0
        model.first.bias[0] = 0
    return model


def place(report: Report) -> tuple[str | None, str | None, str]:
    assert report.finding is not None
    return str(report.finding.direction), report.finding.module, report.finding.tensor.kind


def test_a_nan_made_in_the_forward_pass():
    class ZeroByZero(nn.Module):
        def forward(self, x):
            return x / x

    model = with_zero_activation(Model(ZeroByZero()))
    report = examine(loss_of(model), model)
    assert place(report) == ("forward", "fault", "NaN")
    finding = report.finding
    assert (finding.op, finding.module_class) == ("aten.div.Tensor", "ZeroByZero")
    assert finding.tensor.nan == 3
    assert finding.tensor.shape == (3, 4)
    assert [operand.zeros for operand in finding.operands] == [3, 3]
    assert [row.module for row in finding.before] == ["first"]
    assert math.isnan(report.loss)


def test_a_nan_made_only_in_the_backward_pass():
    model = Model(NanBackward())
    report = examine(loss_of(model), model)
    assert place(report) == ("backward", "fault", "NaN")
    assert report.finding.node == "_NanOnTheWayBackBackward"
    assert report.finding.custom_node
    assert math.isfinite(report.loss)


def test_an_infinity_made_only_in_the_backward_pass():
    """detect_anomaly says nothing of the Inf and blames what turns it into NaN."""
    model = with_zero_activation(Model(SafeRoot()))
    report = examine(loss_of(model), model)
    assert place(report) == ("backward", "fault", "Inf")
    assert report.finding.node == "SqrtBackward0"
    assert report.finding.tensor.nan == 0
    assert report.causes[0].id == "infinite_slope"


def test_a_weight_that_is_nan_already():
    model = Model(nn.ReLU())
    with torch.no_grad():
        model.last.weight[0, 2] = math.nan
    report = examine(loss_of(model), model)
    assert place(report) == ("weight", "last", "NaN")
    assert report.finding.tensor.name == "last.weight"
    assert report.finding.tensor.nan == 1
    assert report.causes[0].id == "poisoned_weight"


def test_a_healthy_run_is_healthy_and_ranks_its_modules():
    model = Model(nn.ReLU())
    with torch.no_grad():
        model.last.weight.mul_(1e4)
    report = examine(loss_of(model), model)
    assert report.healthy
    assert report.causes == ()
    rows = {row.module: row for row in report.tightest}
    assert set(rows) == {"first", "fault", "last"}
    assert report.tightest[0].module == "last"
    expected = float(model(torch.ones(3, 4)).abs().max())
    assert rows["last"].amax == pytest.approx(expected)
    assert rows["last"].factor_in_fp16 == pytest.approx(65504 / expected)
    assert report.loss == pytest.approx(float(loss_of(model)()))


@dataclass
class PlainOutput:
    sample: Tensor
    count: int = 1

    def __getitem__(self, place: int) -> Tensor:
        return self.sample


@pytest.mark.parametrize(
    "wrapped", [lambda x: (x,), lambda x: [x], PlainOutput, lambda x: BaseModelOutput(last_hidden_state=x)]
)
@pytest.mark.parametrize("backward", [False, True])
def test_outputs_are_seen_into(wrapped, backward):
    """In the backward pass the module is known from the graph behind its output, whatever that is wrapped in."""

    class Wrapping(nn.Module):
        def forward(self, x):
            return wrapped(x.square().sqrt() if backward else 1 / x)

    model = with_zero_activation(Model(Wrapping(), wrap=True))
    assert place(examine(loss_of(model), model)) == ("backward" if backward else "forward", "fault", "Inf")


def test_what_happens_between_modules_belongs_to_the_innermost_one_around_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.log(self.inner(x) * 0) * self.inner(x)

    model = Model(Block())
    report = examine(loss_of(model), model)
    assert place(report) == ("forward", "fault", "Inf")
    assert report.finding.op == "aten.log"
    assert [path for path, _ in report.finding.chain] == ["", "fault"]


def test_what_happens_outside_of_all_modules_is_said_so():
    model = Model(nn.ReLU())
    report = examine(lambda: model(torch.ones(3, 4)).mean() / torch.zeros(()), model)
    assert place(report) == ("forward", None, "Inf")
    assert "outside of all modules" in report.finding.where
    backward = examine(lambda: (model(torch.ones(3, 4)).mean() * 0).sqrt(), model)
    assert place(backward) == ("backward", None, "Inf")


def test_masks_of_minus_infinity_are_no_fault():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("causal", torch.full((4, 4), -math.inf).triu(1))

        def forward(self, x):
            scores = x @ x.T + self.causal[:3, :3]
            scores = scores.masked_fill(torch.eye(3, dtype=torch.bool).roll(-1, 1), -math.inf)
            return scores.softmax(-1) @ x.sqrt()

    model = with_zero_activation(Model(Attention()))
    with torch.no_grad():
        model.first.weight.abs_()
        model.first.bias.abs_()
    report = examine(loss_of(model), model)
    assert place(report) == ("backward", "fault", "Inf")
    assert report.finding.node == "SqrtBackward0"


def test_a_value_masked_in_the_loss_but_not_in_the_gradient():
    class Masked(nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x.sqrt(), 0.0)

    model = Model(Masked())
    with torch.no_grad():
        model.first.bias[0] = -9
    report = examine(loss_of(model), model)
    assert report.finding.masked
    assert report.finding.module == "fault"
    assert report.causes[0].id == "masked_in_forward"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_named_right(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), SafeRoot())
            nn.init.zeros_(self.body[0].weight)
            nn.init.zeros_(self.body[0].bias)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model = Model(Checkpointed())
    assert place(examine(loss_of(model), model)) == ("backward", "fault.body.1", "Inf")


def test_everything_is_afterwards_what_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model(torch.randn(3, 4)) ** 2).mean().backward()
    optimizer.step()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    random = torch.random.get_rng_state()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    examine(loss_of(model, torch.randn(3, 4, generator=torch.Generator())), model, optimizer=optimizer)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, after, strict=True))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 0


def test_a_fresh_optimizer_is_fresh_again():
    model = Model(nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert examine(loss_of(model), model, optimizer=optimizer).healthy
    assert len(optimizer.state) == 0


def test_an_error_of_the_run_leaves_no_hooks():
    model = Model(nn.ReLU())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        examine(loss_of(model, torch.ones(3, 5)), model)
    assert not model.first._forward_hooks
    assert not model.first._forward_pre_hooks


def test_several_roots_and_inputs_by_name():
    model, other = Model(nn.ReLU()), nn.Linear(4, 4)
    x = torch.ones(3, 4)
    x[1, 2] = math.nan
    report = examine(
        lambda: model(other(x)).mean(), {"unet": model, "text": other}, inputs={"batch": {"latents": x}, "n": 1}
    )
    assert place(report) == ("input", "text", "NaN")
    assert report.finding.direction is Direction.INPUT
    assert report.finding.tensor.name == "batch.latents"
    assert report.causes[0].id == "nan_latents"
