"""Weight files as they lie on disk: what is in them, and reading them without a second copy in memory."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maulstick.errors import ModelError

# A mapped page counts as memory in use until its mapping ends; files that are only read through are therefore mapped
# anew after this many bytes.
_REMAP_AFTER_BYTES = 256 * 2**20


class WeightFile(ABC):
    """One file of named tensors.

    Attributes:
        path: the file.
        shapes: name -> shape of every tensor in it.
        metadata: the file's own key-value header, empty where the format has none.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]

    @abstractmethod
    def read(self, names: Sequence[str], consume: Callable[[str, Tensor], None]) -> None:
        """Call ``consume`` with each named tensor, on the CPU and usually a view of the mapped file.

        The order is the file's own. What ``consume`` keeps of a view stays mapped.
        """


class SafetensorsFile(WeightFile):
    """A safetensors file; opening it checks that the header is sound and the file complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                self._order = {name: place for place, name in enumerate(file.offset_keys())}
                self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self.metadata = dict(file.metadata() or {})
        except SafetensorError as error:
            raise ModelError(_explain_bad_safetensors(path, error)) from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error

    def read(self, names: Sequence[str], consume: Callable[[str, Tensor], None]) -> None:
        file = safe_open(self.path, framework="pt", device="cpu")
        mapped = 0
        for name in sorted(names, key=self._order.__getitem__):
            tensor = file.get_tensor(name)
            consume(name, tensor)
            mapped += tensor.nbytes
            if mapped > _REMAP_AFTER_BYTES:
                file = safe_open(self.path, framework="pt", device="cpu")
                mapped = 0


class PickleFile(WeightFile):
    """A ``.ckpt``/``.bin``/``.pt`` file, read as plain tensors only; nothing in it is ever executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = {}
        self._is_mappable = _first_bytes(path, 2) == b"PK"
        tensors = self._load()
        if not tensors:
            raise ModelError(f"{path} holds no weights.")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        # The old format cannot be mapped, so it is read once and kept.
        self._kept = None if self._is_mappable else tensors

    def read(self, names: Sequence[str], consume: Callable[[str, Tensor], None]) -> None:
        tensors = self._kept or self._load()
        wanted = set(names)
        mapped = 0
        for name in [name for name in self.shapes if name in wanted]:
            consume(name, tensors[name])
            mapped += tensors[name].nbytes
            if mapped > _REMAP_AFTER_BYTES and self._kept is None:
                tensors = self._load()
                mapped = 0

    def _load(self) -> dict[str, Tensor]:
        content = _load_pickle(self.path, mmap=self._is_mappable)
        nested = content.get("state_dict") if isinstance(content, Mapping) else None
        tensors = nested if isinstance(nested, Mapping) else content
        if not isinstance(tensors, Mapping):
            raise ModelError(f"{self.path} holds a {type(content).__name__}, not named weights.")
        if tensors and all(isinstance(part, Mapping) for part in tensors.values()):
            # IP-Adapters come as a dict of two dicts.
            tensors = {f"{part}.{name}": value for part, inner in tensors.items() for name, value in inner.items()}
        return {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}


class ShardedFile(WeightFile):
    """Several safetensors files that an index file joins into one."""

    def __init__(self, index: Path) -> None:
        self.path = index
        self.metadata = {}
        try:
            shard_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, OSError) as error:
            raise ModelError(f"{index} is not an index of weight files: {error}.") from error
        for name in sorted(set(shard_of.values())):
            if not (index.parent / name).is_file():
                raise ModelError(f"{index} names {name}, which is not in {index.parent}. Download that part too.")
        self._shards = [SafetensorsFile(index.parent / name) for name in sorted(set(shard_of.values()))]
        self.shapes = {name: shape for shard in self._shards for name, shape in shard.shapes.items()}

    def read(self, names: Sequence[str], consume: Callable[[str, Tensor], None]) -> None:
        wanted = set(names)
        for shard in self._shards:
            shard.read([name for name in shard.shapes if name in wanted], consume)


def open_weights(path: Path) -> WeightFile:
    """Open a weight file of any supported format.

    Raises:
        ModelError: it is no weight file, is damaged, or would need code to be run.
    """
    head = _first_bytes(path, 64)
    if head.startswith(b"GGUF"):
        raise ModelError(
            f"{path} is a GGUF file (quantised for inference). Training needs the original .safetensors model."
        )
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model itself. Fetch the real file with 'git lfs pull'.")
    if head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise ModelError(f"{path} is a web page, not a model: the download went wrong. Download the file itself.")
    if path.name.endswith(".index.json"):
        return ShardedFile(path)
    if path.suffix.lower() == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix.lower() in (".ckpt", ".pt", ".pth", ".bin"):
        return PickleFile(path)
    raise ModelError(f"{path}: expected a .safetensors or .ckpt file, or a diffusers folder.")


Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a module comes from: a name in a file, and what to do with it on the way."""

    source: str
    shape: tuple[int, ...]
    transform: Transform | None = None


@dataclass(frozen=True)
class NamedWeights:
    """The weights of one component under the names that its module gives them.

    Attributes:
        file: where they lie.
        slots: name in the module -> where it comes from.
        leftover: names in the file that belong to this component but to nothing that the module could have.
    """

    file: WeightFile
    slots: Mapping[str, Slot]
    leftover: tuple[str, ...] = ()
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    def tensors(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return name -> CPU tensor; floating-point ones in ``dtype`` where given.

        A tensor that has the wanted dtype already stays a copy-on-write view of the file: it costs no time now and
        memory only where it is used, and several processes on a machine share it.
        """
        result: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            wanted = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            result[name] = tensor.to(wanted)

        self._each(keep)
        return result

    def content_hash(self) -> str:
        """Return a hex digest over names, shapes, dtypes and every byte of the weights (about 1.5 GB per second)."""
        if not self._hash:
            digests: dict[str, bytes] = {}

            def add(name: str, tensor: Tensor) -> None:
                digest = hashlib.sha256(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                digests[name] = digest.digest()

            self._each(add)
            self._hash.append(hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest())
        return self._hash[0]

    def renamed(self, rename: Callable[[str], str]) -> NamedWeights:
        """Return the same weights under other names."""
        return NamedWeights(self.file, {rename(name): slot for name, slot in self.slots.items()}, self.leftover)

    def _each(self, use: Callable[[str, Tensor], None]) -> None:
        targets: dict[str, list[str]] = {}
        for name, slot in self.slots.items():
            targets.setdefault(slot.source, []).append(name)

        def distribute(source: str, tensor: Tensor) -> None:
            for name in targets[source]:
                transform = self.slots[name].transform
                use(name, tensor if transform is None else transform(tensor))

        self.file.read(list(targets), distribute)


def _first_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def _explain_bad_safetensors(path: Path, error: SafetensorError) -> str:
    if "not fully covered" in str(error) or "header length" in str(error):
        return f"{path} is not complete ({path.stat().st_size:,} bytes; {error}). Download or copy it again."
    return f"{path} is not a safetensors file, or is damaged ({error})."


def _load_pickle(path: Path, *, mmap: bool) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as error:
        raise ModelError(_explain_refused_pickle(path, error)) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{path} cannot be read as a checkpoint; it may be incomplete ({reason}).") from error


def _explain_refused_pickle(path: Path, error: UnpicklingError) -> str:
    names = sorted(set(_globals_named_in(str(error))))
    if not names:
        # torch's own text advises to read it without protection, which is the one thing not to do.
        return f"{path} cannot be read as a checkpoint: it is damaged, or holds other things than weights."
    return (
        f"{path} holds more than weights ({', '.join(names)}), and reading that could run code hidden in the file. "
        "It was not loaded. Use the .safetensors version of this model, or convert it with a tool you trust."
    )


def _globals_named_in(message: str) -> Iterator[str]:
    words = message.split()
    for place, word in enumerate(words[:-1]):
        if word == "GLOBAL":
            yield words[place + 1]
