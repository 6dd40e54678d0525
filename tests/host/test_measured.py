"""Memory that was used: of a card, tensors and what torch reserved, of the rank's own card."""

import pytest
import torch

from howdah.host import measured
from howdah.host.measured import left, most_held, peak_memory, reset_peak

CPU, CARD = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def card(monkeypatch):
    """Makes torch answer for card 3 alone; the calls that begin peaks anew."""
    resets = []
    answers = {
        "max_memory_allocated": 50,
        "max_memory_reserved": 70,
        "memory_reserved": 60,
        "memory_allocated": 40,
        "mem_get_info": (10, 100),
    }

    def answer(name):
        def of(device):
            assert device == CARD, "the numbers are those of the rank's own card"
            return answers[name]

        return of

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, answer(name))
    facts = type("Facts", (), {"total_memory": 100})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: {CARD: facts}[d])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    return resets


def test_of_a_card_tensors_and_what_is_reserved_are_two_numbers(card):
    assert peak_memory(CARD) == (50, 100, 70)
    reset_peak(CARD)
    assert card == [CARD]


def test_what_is_left_on_a_card_counts_what_torch_holds_unused(card):
    assert left(CARD) == 10 + 60 - 40


def test_of_a_cpu_nothing_is_asked_of_a_card(card):
    used = peak_memory(CPU)
    assert used.reserved is None and 1 << 20 < used.held <= most_held()
    reset_peak(CPU)
    assert card == []


def test_what_is_left_is_the_least_of_machine_and_control_group(monkeypatch):
    monkeypatch.setattr(measured, "memory", lambda: {"MemAvailable": 1 << 50})
    monkeypatch.setattr(measured, "memory_limit", lambda: None)
    assert left() == left(CPU) == 1 << 50
    monkeypatch.setattr(measured, "most_held", lambda: 7)
    monkeypatch.setattr(measured, "memory_limit", lambda: 12)
    assert left() == 5
