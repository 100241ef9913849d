"""A small model that trains with any optimizer of the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maulstick.train.optim import RateGroup, build_optimizer

RATES = {"Prodigy": 1.0, "ProdigyPlusScheduleFree": 1.0, "DAdaptAdam": 1.0}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Toy:
    """Two layers and an optimizer; ``step(n)`` trains on the n-th batch, always the same for the same n."""

    def __init__(self, optimizer_type: str = "AdamW", *arguments: str, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        group = RateGroup("all", RATES.get(optimizer_type, 1e-2), list(self.model.parameters()))
        self.optimizer = build_optimizer(optimizer_type, arguments, [group])
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self.scaler = scaler

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        loss = (self.model(torch.randn(5, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def bytes_of_weights(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model.parameters())


def everything(toy: Toy) -> list[Any]:
    """Weights, optimizer state and groups as values that can be compared to the bit."""

    def value(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.dtype, item.shape, item.detach().double().tolist()
        return item

    groups = [
        {key: value(item) for key, item in group.items() if key not in ("params", "lr", "initial_lr")}
        for group in toy.optimizer.param_groups
    ]
    parameters = list(toy.model.parameters())
    states = [
        {key: value(item) for key, item in toy.optimizer.state[each].items()}
        for each in parameters
        if each in toy.optimizer.state
    ]
    return [toy.weights().tolist(), groups, states]
