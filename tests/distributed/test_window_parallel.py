"""Parallel equals single with wider windows of weights: gradients, the bytes that are sent and
moved, and the memory of the window, predicted and held; against plain PyTorch in float64.
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

SLOW = pytest.mark.slow
HOST = "weights=host optimizer=host gradients=host"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "window"),
    [
        (f"single x2 {HOST}", 3),
        ("dp2 zero3 x2", 4),
        ("dp2 zero3 x2 weights=disk optimizer=disk gradients=disk activations=disk", 3),
        *(
            pytest.param(words, window, marks=SLOW)
            for words, window in (
                ("dp2 zero3 x2", 3),
                ("dp3 zero3 x1 recompute=full", 3),
                ("dp2 zero3 release=step x2", 4),
                ("dp2 zero3 gather=broadcast x2", 3),
                (f"pp2 1f1b x3 {HOST}", 3),
                ("pp2 dp2 zero3 interleaved v2 x4", 4),
                ("pp2 zb-v x4 weights=disk optimizer=disk", 3),
                (f"dp2 tp2 zero3 x2 {HOST}", 5),
                ("dp2 cp2 zero3 x1", 3),
            )
        ),
    ],
)
def test_wider_windows_equal_one_device(workers, words, window):
    form = "untied" if "pp2" in words else "laptop"
    prove(replace(case_of(words, form=form), window=window), workers)
