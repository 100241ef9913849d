"""What every kind of adapter needs to be put on a model through peft: patterns, checks, and starts that are repeatable.

peft is told module by module what to do with regular expressions, one per distinct rank and per distinct alpha.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maulstick.adapters.fp8 import whole_weight
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.targets import LoraTarget
from maulstick.errors import ModelError, OptionError
from maulstick.garbage import uncollected

DEFAULT_ADAPTER = "default"


class AdapterParameter(NamedTuple):
    """One trained tensor: ``path`` is the module it adapts, ``name`` path and part together.

    ``role`` is ``up`` for the factor that starts at zero and that LoRA+ lets learn faster; every other is something
    else (``down``, ``magnitude``, …).
    """

    name: str
    parameter: nn.Parameter
    path: str
    role: str


class LoadReport(NamedTuple):
    """Paths of the modules whose weights were loaded, and of those the state had nothing for."""

    loaded: list[str]
    missing: list[str]


class RankSettings(NamedTuple):
    """Ranks and alphas of many modules as peft takes them."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: str


def rank_settings(targets: Sequence[LoraTarget]) -> RankSettings:
    """Say in peft's terms which modules get which rank: one pattern per distinct rank and per distinct alpha."""
    dims = Counter(target.dim for target in targets)
    alphas = Counter(target.alpha for target in targets)
    rank, alpha = dims.most_common(1)[0][0], alphas.most_common(1)[0][0]

    def pattern(chosen: Callable[[LoraTarget], bool]) -> str:
        # "^" forbids peft's own optional prefix, so that a pattern means these paths and no longer ones.
        return "^" + path_pattern([target.path for target in targets if chosen(target)])

    return RankSettings(
        rank,
        alpha,
        {pattern(lambda target, dim=dim: target.dim == dim): dim for dim in dims if dim != rank},  # type: ignore[misc]
        {pattern(lambda target, a=a: target.alpha == a): a for a in alphas if a != alpha},  # type: ignore[misc]
        path_pattern([target.path for target in targets]),
    )


def path_pattern(paths: Iterable[str]) -> str:
    """One regular expression for exactly these dotted paths, factored by path component.

    peft matches every pattern against every module, and Python keeps 512 compiled ones: one pattern per module took a
    minute on SDXL. Factoring keeps the matching itself linear in the path's length.
    """
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        ends_here = "" in node
        choices = []
        for part, below in node.items():
            if part:
                rest = expression(below)
                choices.append(re.escape(part) + (rest if rest.startswith("(?:\\.") or not rest else f"\\.{rest}"))
        if not choices:
            return ""
        joined = choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
        return f"(?:\\.{joined})?" if ends_here else joined

    return expression(tree)


def refuse_no_targets(root: nn.Module, targets: Sequence[LoraTarget], adapter_name: str) -> None:
    """Raise ``OptionError`` when there is nothing to attach, or the adapter's name is taken."""
    if not targets:
        raise OptionError("The LoRA has no module at all: every block was given rank 0 or learning rate 0.")
    if adapter_name in getattr(root, "peft_config", {}):
        raise OptionError(f"The model already carries an adapter named '{adapter_name}'; give this one another name.")


def inject(build: Callable[[], Any]) -> None:
    """Call peft's injection without its warning about several adapters on one model, which are meant.

    Nor does it work out how the factors start: all of them are made anew afterwards.
    """
    from transformers.initialization import no_init_weights

    with warnings.catch_warnings(), uncollected(), no_init_weights():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        build()


def refuse_unplanned(attached: Mapping[str, tuple[int, float]], targets: Sequence[LoraTarget]) -> None:
    """Raise ``ModelError`` when what was attached (path -> rank, alpha) is not what was planned."""
    planned = {target.path: target for target in targets}
    wrong = [f"'{path}' was not planned" for path in attached.keys() - planned.keys()]
    for path, target in planned.items():
        if path not in attached:
            wrong.append(f"'{path}' got no adapter")
        elif attached[path] != (target.dim, target.alpha):
            rank, alpha = attached[path]
            wrong.append(f"'{path}' got rank {rank}, alpha {alpha} instead of rank {target.dim}, alpha {target.alpha}")
    if wrong:
        raise ModelError(
            f"The LoRA could not be attached as planned ({len(wrong)} of {len(planned)} modules differ): "
            f"{'; '.join(sorted(wrong)[:3])}. This points to an untested version of peft."
        )


def start_tensor(
    shape: Sequence[int],
    device: torch.device,
    target: LoraTarget,
    seed: int,
    fill: Callable[[Tensor, Any], Any],
    *part: str,
) -> nn.Parameter:
    """Return an fp32 parameter that ``fill(tensor, generator)`` has filled on the CPU.

    The generator comes from ``seed``, the component, the path and ``part``: the start of a module does not depend on
    which other modules are trained, and torch's global generator is left as it was.
    """
    # The path differs between versions of transformers by this part only.
    path = target.path.removeprefix("text_model.")
    digest = hashlib.sha256("\n".join([str(seed), target.component, path, *part]).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    start = torch.empty(tuple(shape), dtype=torch.float32, device="cpu" if device.type != "meta" else "meta")
    fill(start, generator)
    return nn.Parameter(start.to(device))


def base_weight(module: Any) -> Tensor:
    """The frozen weight below a peft layer; restored, where it is kept in eight bits."""
    return whole_weight(module.get_base_layer())


def set_dropout(module: Any, target: LoraTarget, adapter_name: str, dropout: LoraDropout) -> None:
    """Let the adapter's forward drop parts of it; refuse layers that peft built itself (quantised ones)."""
    if not hasattr(module, "lora_noise"):
        raise OptionError(
            f"network_dropout, rank_dropout and module_dropout do not work on '{target.path}', whose base weight is "
            f"{type(module.get_base_layer()).__name__}; leave them at 0 for a quantised base model."
        )
    module.lora_noise[adapter_name] = dropout
