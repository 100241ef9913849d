"""Cache files of one tensor that prove what they are: whole, made for exactly this key, and unchanged since."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from maulstick.files_io import atomic_write


class CacheMismatch(Exception):
    """A cache file is damaged or holds something else; ``str()`` says what. It must be made anew."""


@dataclass(frozen=True)
class ProvenFormat:
    """A kind of cache file.

    Attributes:
        name: what the file says it is.
        tensor: name of its tensor.
        what: what it holds, for people.
    """

    name: str
    tensor: str
    what: str

    def write(self, path: Path, key: str, tensor: Tensor) -> None:
        """Keep a tensor, on the CPU and contiguous, atomically. Raises OSError where the folder cannot be written."""
        metadata = {"format": self.name, "key": key, "tensor_sha256": _tensor_hash(tensor)}
        atomic_write(path, save({self.tensor: tensor}, metadata))

    def read(self, path: Path, key: str, explain: Callable[[str], str]) -> Tensor | None:
        """Return the tensor kept in ``path``, or None where there is no such file.

        ``explain`` says how another key differs.

        Raises:
            CacheMismatch: the file is not whole, was not made for exactly ``key``, or its tensor has not the hash that
                was taken when it was written.
        """
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != self.name:
                    raise CacheMismatch(f"not a {self.what} cache of this program's format")
                if metadata.get("key") != key:
                    raise CacheMismatch(explain(metadata.get("key", "")))
                if list(file.keys()) != [self.tensor]:
                    raise CacheMismatch("it holds other tensors than expected")
                tensor = file.get_tensor(self.tensor).clone()  # its own memory, not the file's pages
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            raise CacheMismatch(f"damaged ({error})") from error
        if _tensor_hash(tensor) != metadata.get("tensor_sha256"):
            raise CacheMismatch("its values are not those that were written")
        return tensor


def _tensor_hash(tensor: Tensor) -> str:
    shape = json.dumps(list(tensor.shape)).encode()
    return sha256(shape + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def key_difference(found: str, key: str, meanings: dict[str, str]) -> str:
    """Say how the key of a file, a JSON object, differs from the one that is wanted."""
    try:
        other = json.loads(found)
        names = [name for name, value in json.loads(key).items() if other.get(name) != value]
    except (ValueError, AttributeError):
        return "its key cannot be read"
    return ", ".join(meanings.get(name, f"it was made with another {name}") for name in names) or "its key differs"
