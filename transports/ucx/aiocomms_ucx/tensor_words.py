"""The places of the words in a tensor that native code reads in place of three questions to torch.

``is_neg()``, ``is_conj()`` and ``requires_grad`` are calls of some 100 ns each. Torch answers them from two words of
the tensor's C++ object: the set of its dispatch keys, and the pointer to what autograd knows of it, which is null where
nothing was asked of autograd (``c10/core/TensorImpl.h``). Their places are no part of torch's interface. So
:func:`find` compares tensors whose answers are known, and native code asks the questions where it finds no place.
"""

from __future__ import annotations

from ctypes import c_uint64
from functools import cache
from typing import NamedTuple

import torch

WORDS = 24
"""The words that are looked at: no ``TensorImpl`` has fewer where pointers have 8 bytes."""


class TensorWords(NamedTuple):
    """Offsets in bytes, and the keys of a tensor about which there is nothing special."""

    impl: int
    """The place of the pointer to the C++ object in the Python object."""
    keys: int
    """The place of the dispatch keys in the C++ object."""
    autograd: int
    """The place of the pointer to what autograd knows in the C++ object."""
    plain: int
    """The keys of a dense tensor on the CPU that is neither lazily conjugated nor negated, nor of inference mode."""


@cache
def find() -> TensorWords | None:
    """Find the places; None: this torch has other ones, or does not show what they are found by."""
    try:
        return _found()
    except (AttributeError, TypeError, RuntimeError):
        return None


def _found() -> TensorWords | None:
    with torch.inference_mode(False):
        plain = [torch.ones(2), torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.complex64)]
        special = [torch._neg_view(plain[0]), plain[2].conj(), torch.zeros(1).to_sparse()]
        tracked, base = torch.ones(1), torch.ones(4)
        before = _words(tracked)
        tracked.requires_grad_()
        views = [base[:2], torch.ones(1, requires_grad=True)]
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
