"""What the doctor says of made-up cards, and of none."""

from types import SimpleNamespace

import pytest
import torch

from howdah.host import card_findings
from howdah.host.card_findings import (
    Card,
    CardsHere,
    has_kernels,
    judge_cards,
    parse_driver,
    read_cards,
)
from howdah.host.devices import Cards
from howdah.host.finding import GIB

H200 = Card("NVIDIA H200", 139 * GIB, (9, 0))
T4 = Card("Tesla T4", 15 * GIB, (7, 5))
NEW = Card("NVIDIA GeForce RTX 5090", 31 * GIB, (12, 0))
EIGHT = CardsHere(
    cards=[H200] * 8,
    driver="570.86.15",
    built="12.8",
    nccl="2.27.3",
    kernels=["sm_75", "sm_80", "sm_90", "compute_90"],
)


def told(here):
    return {one.name: (one.value, one.lack) for one in judge_cards(here)}


def test_eight_equal_cards_are_four_lines_and_nothing_is_missing():
    assert told(EIGHT) == {
        "devices": ("8: NVIDIA H200, 139.0 GiB, capability 9.0", None),
        "driver": ("570.86.15; torch is built for CUDA 12.8, NCCL 2.27.3", None),
        "links": ("all 8 cards reach each other's memory", None),
        "ranks": ("a card for each, up to 8 on this machine; more share cards", None),
    }


def test_one_card_has_no_links_and_needs_no_nccl():
    found = told(EIGHT._replace(cards=[H200], nccl="", driver=""))
    assert list(found) == ["devices", "driver", "ranks"]
    assert found["driver"] == (
        "of unknown version; torch is built for CUDA 12.8, without NCCL",
        None,
    )


@pytest.mark.parametrize(
    ("lack", "value", "says"),
    [
        ("torch sees no CUDA device here; use device=cpu", "none; runs train on the CPU", None),
        (
            "the driver is too old for this torch",
            "none usable",
            "the driver is too old for this torch",
        ),
    ],
)
def test_of_a_machine_without_a_card_there_is_one_line(lack, value, says):
    assert told(CardsHere(lack=lack)) == {"devices": (value, says)}


@pytest.mark.parametrize(
    ("here", "name", "lack"),
    [
        (
            EIGHT._replace(cards=[H200, NEW], kernels=["sm_90"]),
            "devices",
            "no kernels for NVIDIA",
        ),
        (EIGHT._replace(cards=[T4, T4]), "devices", "Tesla T4 has no arithmetic in bf16: method."),
        (EIGHT._replace(cards=[H200, T4]), "devices", "Tesla T4 has no arithmetic in bf16"),
        (
            EIGHT._replace(cards=[H200, H200._replace(memory=GIB)]),
            *("devices", "the cards differ: in a step, all ranks wait for those on the slowest"),
        ),
        (EIGHT._replace(nccl=""), "driver", "this torch has no NCCL, so what ranks send goes"),
        (EIGHT._replace(apart=[(0, 4)]), "links", "cards 0 and 4 do not: what they send goes"),
        (EIGHT._replace(apart=[(0, 4), (1, 5)]), "links", "cards 0 and 4 and 1 more pairs do not:"),
    ],
)
def test_what_is_missing_is_one_sentence_with_a_way_out(here, name, lack):
    found = told(here)[name][1]
    assert lack in found and "\n" not in found and not found.endswith(".")


def test_several_kinds_are_counted():
    value, _ = told(EIGHT._replace(cards=[H200, T4, H200]))["devices"]
    assert value.startswith("3: 2 x NVIDIA H200, 139.0 GiB, capability 9.0, 1 x Tesla T4, 15.0 GiB")
    assert told(EIGHT._replace(apart=[(0, 4), (1, 5)]))["links"][0].startswith("26 of 28 pairs")


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((12, 0), ["sm_90a", "sm_100", "sm_120"], True),
        ((12, 0), ["sm_90", "sm_100", "compute_100"], True),
        ((12, 0), ["sm_90a", "sm_100"], False),
        ((9, 4), ["gfx942"], True),  # AMD's names are not looked at
    ],
)
def test_kernels_run_on_their_own_generation(capability, kernels, runs):
    assert has_kernels(capability, kernels) == runs


def test_the_driver_s_version_is_read():
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
    )
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    assert [parse_driver(one) for one in (text, opened, "")] == ["550.54.15", "570.86.15", ""]


def test_cards_are_read_from_torch(monkeypatch):
    facts = SimpleNamespace(name="NVIDIA H200", total_memory=139 * GIB, major=9, minor=0)
    monkeypatch.setattr(card_findings, "find_cards", lambda: Cards(3))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 2))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    here = read_cards()
    assert list(here.cards) == [H200] * 3
    assert (here.nccl, here.apart, here.built) == ("2.27.3", [(0, 2)], "12.8")


def test_a_torch_without_nccl_is_read_too(monkeypatch):
    monkeypatch.setattr(card_findings, "find_cards", lambda: Cards(0, "none"))
    assert read_cards() == CardsHere(lack="none")
