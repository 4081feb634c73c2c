"""Philox4x32-10 and the keep rule of dropout, written again from their definitions on integers:
what the kernels are held against.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF

# Random123's kat_vectors (Salmon et al., SC'11), the lines of philox4x32 with 10 rounds: counter,
# key, result.
KNOWN_ANSWERS = (
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox4x32_10(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """The four random words for each row of `counter`, [n, 4] int64 that holds 32-bit words."""
    x = [counter[:, i] for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        # Products wrap around at 2^64 as unsigned ones do; the masks take their halves.
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [((p1 >> 32) & MASK) ^ x[1] ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ x[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack(x, dim=1)


def dropout_bits(state: Tensor, size: int, first: int = 0) -> Tensor:
    """The 16 random bits of elements first .. first + size - 1 under [seed, offset]."""
    seed, offset = (int(word) & (1 << 64) - 1 for word in state)
    step = offset // 4
    groups = torch.arange(first // 8, (first + size + 7) // 8)
    counter = torch.stack(
        [
            torch.full_like(groups, step & MASK),
            torch.full_like(groups, step >> 32),
            groups & MASK,
            groups >> 32,
        ],
        dim=1,
    )
    words = philox4x32_10(counter, (seed & MASK, seed >> 32))
    bits = torch.stack([words & 0xFFFF, words >> 16], dim=2).flatten()
    return bits[first % 8 : first % 8 + size]


def keep_mask(state: Tensor, size: int, p: float) -> Tensor:
    """Which of the first `size` elements are kept under [seed, offset]."""
    return dropout_bits(state.cpu(), size) >= int(p * 65536 + 0.5)


def scaled(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x times the mask over 1 - p, rounded once to the type of sums and once to x's."""
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.tensor(0.0 if p == 1 else 1 / (1 - p), dtype=torch.float64).to(sums)
    factor = torch.where(keep.reshape(x.shape).to(x.device), scale, torch.zeros((), dtype=sums))
    return (x.to(sums) * factor).to(x.dtype)
