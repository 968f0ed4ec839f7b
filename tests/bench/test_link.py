"""The rate at which a host copies out of mapped memory."""

from __future__ import annotations

import torch

from bench.link import HOST_PIECE_BYTES, host_copy_rates


def test_every_number_of_threads_has_a_rate() -> None:
    source = torch.ones(3 * HOST_PIECE_BYTES, dtype=torch.uint8)
    rates = host_copy_rates(source.data_ptr(), source.numel(), (1, 2))
    assert set(rates) == {1, 2}
    assert all(rate > 0 for rate in rates.values())


def test_less_than_one_piece_has_none() -> None:
    source = torch.ones(4096, dtype=torch.uint8)
    assert host_copy_rates(source.data_ptr(), source.numel()) == {}
