"""Which network arguments mean something to which kind of adapter: what has no effect is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from maulstick.errors import OptionError
from maulstick.options.schema import NetworkOptions

_DEFAULTS = vars(NetworkOptions())
_ONLY_FOR: Mapping[str, str] = {"factor": "lokr", "decompose_both": "lokr", "wd_on_output": "dora"}
_LORAPLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
_ALPHAS = ("network_alpha", "conv_alpha", "block_alphas", "conv_block_alphas")
_NO_UP = "LoRA+ lets the up factor learn faster, and there is none"
_NO_ACTIVATIONS = "there are no activations between factors; rank_dropout and module_dropout work"
_NO_RANKS = "the file does not tell the rank it was planned with; give network_dim and conv_dim"
_OF_LORA = "it belongs to LoRA and its kin, which have ranks and modules to choose from"
_NOT_OF_LORA_ALONE = {
    *("network_module", "network_type", "network_args", "network_weights", "network_train_unet_only"),
}
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "lora": {},
    "dora": {"scale_weight_norms": "the sizes of its weights are what it trains"},
    "loha": {**dict.fromkeys(_LORAPLUS, _NO_UP), "network_dropout": _NO_ACTIVATIONS},
    "lokr": {
        **dict.fromkeys(_LORAPLUS, _NO_UP),
        "network_dropout": _NO_ACTIVATIONS,
        "dim_from_weights": _NO_RANKS,
    },
    "oft": {
        **dict.fromkeys(_LORAPLUS, _NO_UP),
        **dict.fromkeys(_ALPHAS, "a turn has no scale; a smaller network_dim makes smaller blocks"),
        **dict.fromkeys(("network_dropout", "rank_dropout"), "only module_dropout works, which leaves turns out"),
        "scale_weight_norms": "a turn leaves the size of a weight as it is",
        "dim_from_weights": _NO_RANKS,
    },
    "ip_adapter": {name: _OF_LORA for name in _DEFAULTS if name not in _NOT_OF_LORA_ALONE},
}


def check_network_type(network: NetworkOptions, given: Collection[str]) -> None:
    """Refuse what the chosen kind of adapter has no use for.

    Raises:
        OptionError: an option was given, with another value than its default, that would do nothing.
    """
    kind = network.network_type
    for name, owner in _ONLY_FOR.items():
        if name in given and getattr(network, name) != _DEFAULTS[name] and kind != owner:
            raise OptionError(
                f"{name} belongs to network_type = {owner}, but network_type is {kind}. Remove it, or train a {owner}."
            )
    for name, reason in _REFUSED[kind].items():
        # Of a LoRA's options even the default would say something that is not so.
        means_something = getattr(network, name) != _DEFAULTS[name] or reason is _OF_LORA
        if name in given and means_something and getattr(network, name) is not False:
            raise OptionError(f"{name} does not work with network_type = {kind}: {reason}. Remove it.")
