"""The offsets of two memory words of a tensor. Native code reads the words instead of calling torch three times.

Each call of ``is_neg()``, ``is_conj()`` and ``requires_grad`` takes some 100 ns. Torch reads the answers from two words
of the tensor's C++ object (``c10/core/TensorImpl.h``). One word is the set of the tensor's dispatch keys. The other
word is the pointer to the autograd data. The pointer is null if the tensor has no such data. The offsets of these words
are no part of torch's interface. So :func:`find` looks for the words in tensors for which the answers are known. If the
function finds no offsets, native code calls torch.
"""

from __future__ import annotations

from ctypes import c_uint64
from functools import cache
from typing import NamedTuple

import torch

from aiocomms.ops.buffers import arange, zeros
from aiocomms.ops.modes import unaffected

WORDS = 24
"""The number of words of each ``TensorImpl`` that the search reads.

If a pointer has 8 bytes, every ``TensorImpl`` has at least this number of words.
"""


class TensorWords(NamedTuple):
    """The offsets at which native code finds a tensor's words, in bytes, and the dispatch keys of a plain tensor."""

    impl: int
    """The offset of the pointer to the C++ object in the Python object."""
    keys: int
    """The offset of the dispatch keys in the C++ object."""
    autograd: int
    """The offset of the pointer to the autograd data in the C++ object."""
    plain: int
    """The keys of a dense CPU tensor that is not lazily conjugated, not lazily negated, and not from inference mode."""


@cache
def find() -> TensorWords | None:
    """Return the offsets of both words in a tensor's C++ object; None if the search finds no offsets."""
    try:
        return _found()
    except (AttributeError, TypeError, RuntimeError):
        return None


@unaffected
def _found() -> TensorWords | None:
    plain = [zeros(size, dtype=kind, device="cpu") for size, kind in ((2, torch.float32), (3, torch.complex64))]
    plain.append(arange(4, "cpu"))
    special = [torch._neg_view(plain[0]), plain[1].conj(), plain[0].to_sparse()]
    tracked, other = (zeros(1, dtype=torch.float32, device="cpu") for _ in range(2))
    before = _words(tracked)
    tracked.requires_grad_()
    views = [plain[0][:1], other.requires_grad_()]
    impls = _common([_places(_read(id(it), type(it).__basicsize__ // 8), it._cdata) for it in plain])
    keys = _common([_places(_words(it), _keys(it)) for it in plain + special])
    changed = [place for place, pair in enumerate(zip(before, _words(tracked), strict=True)) if pair[0] != pair[1]]
    if not len(impls) == len(keys) == len(changed) == 1:
        return None
    autograd = changed[0]
    known = {_keys(it) for it in plain}
    differ = known.isdisjoint(map(_keys, special)) and len(known) == 1
    null = all(_words(it)[autograd] == 0 for it in plain) and all(_words(it)[autograd] for it in [tracked, *views])
    return TensorWords(8 * impls[0], 8 * keys[0], 8 * autograd, known.pop()) if differ and null else None


def _keys(tensor: torch.Tensor) -> int:
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _words(tensor: torch.Tensor) -> list[int]:
    return _read(tensor._cdata, WORDS)


def _read(address: int, words: int) -> list[int]:
    return list((c_uint64 * words).from_address(address))


def _places(words: list[int], value: int) -> set[int]:
    return {place for place, word in enumerate(words) if word == value}


def _common(places: list[set[int]]) -> list[int]:
    return sorted(set.intersection(*places))
