from __future__ import annotations

import pytest

from bench.units import Latent, ModelShape, gib


def test_latent_is_three_counts() -> None:
    assert Latent.parse("5x60x104") == Latent(5, 60, 104)
    assert str(Latent(5, 60, 104)) == "5x60x104"
    assert ModelShape.parse("40x5120x13824") == ModelShape(40, 5120, 13824)


@pytest.mark.parametrize("text", ["", "5x60", "5x60x0", "5x60x104x1", "axbxc", "-1x2x3"])
def test_other_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="three counts such as 5x60x104"):
        Latent.parse(text)


def test_gib_has_two_decimals() -> None:
    assert gib(3 * 2**29) == "1.50"
