"""Which device a rank takes, what is said where there is none, and where ranks share a card.

The machine has no card: `torch.cuda` is made to answer as it does on machines that have some.
"""

import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from howdah.base.errors import UserError
from howdah.host import facts
from howdah.host.devices import (
    Cards,
    device_lines,
    find_cards,
    own_device,
    require_cards,
    sharing,
    why_none,
)
from howdah.host.facts import has_card

# What torch warns of (c10/cuda/CUDAFunctions.cpp), with the end that its warnings have.
OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please"
    " update your GPU driver by downloading and installing a new version from the URL: http://www."
    "nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to install a PyTorch "
    "version that has been compiled with your version of the CUDA driver. (Triggered internally at "
    "/pytorch/c10/cuda/CUDAFunctions.cpp:109.)"
)
OLDER = "install a torch that was built for an older CUDA, or use device=cpu"
UNKNOWN = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment"
    ", e.g. changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the available "
    "devices to be zero. (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:109.)"
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes torch answer as on a machine with so many cards; the calls that reached CUDA."""
    calls = []

    def make(count, *, built="13.0", warned="", present=True):
        def available():
            if warned:
                warnings.warn(warned, UserWarning, stacklevel=1)
            return count > 0

        (tmp_path / "card").touch()
        monkeypatch.setattr(facts, "CARDS", [tmp_path / ("card" if present else "none")])
        monkeypatch.setattr(facts.shutil, "which", lambda _: None)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name in ("set_device", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda d, name=name: calls.append((name, str(d))))
        return calls

    return make


def test_what_this_machine_has():
    """Of whatever kind it is: cards, or the reason for none."""
    found = find_cards()
    assert found.usable == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert bool(found.lack) == (found.usable == 0)


@pytest.mark.parametrize(
    ("warned", "built", "present", "visible", "told"),
    [
        ("", None, False, None, "torch sees no CUDA device here; use device=cpu"),
        ("", "CUDA 13.0", False, None, "torch sees no CUDA device here; use device=cpu"),
        (
            *("", None, True, None),
            "this torch was built for the CPU alone; install a build with CUDA for the card that "
            "is here, or use device=cpu",
        ),
        (
            *(OLD, "CUDA 13.0", True, None),
            "the driver (for CUDA 12.4) is too old for this torch, which was built for CUDA 13.0; "
            f"update the driver, {OLDER}",
        ),
        (
            *(OLD.replace("(found version 12040)", ""), "CUDA 13.0", True, None),
            "the driver is too old for this torch, which was built for CUDA 13.0; update the "
            f"driver, {OLDER}",
        ),
        (
            *(UNKNOWN, "CUDA 13.0", True, None),
            "torch, built for CUDA 13.0, cannot open the card that is here (CUDA unknown error - "
            "this may be due to an incorrectly set up environment, e.g); see that the driver works "
            "(nvidia-smi) and that this user may use it, or use device=cpu",
        ),
        (
            *("", "CUDA 13.0", True, None),
            "torch, built for CUDA 13.0, cannot open the card that is here; see that the driver "
            "works (nvidia-smi) and that this user may use it, or use device=cpu",
        ),
        (
            *("", "CUDA 13.0", True, ""),
            "CUDA_VISIBLE_DEVICES is '', which leaves torch no card of this machine; name some of "
            "its cards there, or use device=cpu",
        ),
    ],
)
def test_the_reason_for_no_card_is_half_a_sentence(warned, built, present, visible, told):
    assert why_none(warned, built, present=present, visible=visible) == told


def test_a_driver_that_is_too_old_is_told_from_what_torch_warns_of(machine, monkeypatch):
    """NVML still counts the cards: `device_count` alone would have said two."""
    machine(0, warned=OLD)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_cards().usable == 0
    sentence = (
        r"^device is cuda, but the driver \(for CUDA 12\.4\) is too old for this torch, which"
    )
    for ask in (lambda: require_cards(1), lambda: own_device("cuda", 0)):
        with pytest.raises(UserError, match=sentence):
            ask()


def test_other_warnings_are_no_reason(machine):
    machine(0, warned="a package is old", present=False)
    assert find_cards() == Cards(0, "torch sees no CUDA device here; use device=cpu")


@pytest.mark.parametrize(("count", "taken"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (8, range(4))])
def test_a_rank_takes_its_card_before_anything_else(machine, count, taken):
    calls = machine(count)
    for rank, card in enumerate(taken):
        calls.clear()
        assert own_device("cuda", rank) == own_device("cuda", rank) == torch.device("cuda", card)
        assert calls == [("set_device", f"cuda:{card}"), ("synchronize", f"cuda:{card}")] * 2


def test_a_rank_on_the_cpu_asks_nothing_of_cuda(machine):
    calls = machine(2)
    assert own_device("cpu", 3) == torch.device("cpu") and calls == []


def test_a_card_that_cannot_be_opened_is_a_sentence(machine, monkeypatch):
    machine(1)
    busy = "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might"

    def refuse(_):
        raise RuntimeError(busy)

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(UserError) as told:
        own_device("cuda", 1)
    assert str(told.value) == (
        "rank 1 of this machine cannot open cuda:0 (CUDA error: all CUDA-capable devices are busy "
        "or unavailable): start no more ranks than its memory and its mode allow (nvidia-smi)"
    )


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes an nvidia-smi that prints the given mode for each card."""

    def make(*modes):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!{sys.executable}\nprint({chr(10).join(modes)!r})\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_cards_of_one_process_each_are_not_shared(machine, smi):
    machine(2)
    smi("Default", "Exclusive_Process")
    require_cards(2)
    with pytest.raises(UserError) as told:
        require_cards(3)
    assert str(told.value) == (
        "3 ranks of this machine would share 2 cards, which the driver gives to one process each "
        "(Exclusive_Process): start 2, or set nvidia-smi -c DEFAULT"
    )
    smi("Default", "Default")
    require_cards(3)


def test_without_nvidia_smi_cards_can_be_shared(machine, monkeypatch, tmp_path):
    machine(1)
    monkeypatch.setenv("PATH", str(tmp_path))
    require_cards(3)


def test_what_a_run_tells_of_its_device(machine, monkeypatch):
    machine(2)
    h200 = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    assert device_lines(torch.device("cpu"), 4) == []
    assert device_lines(torch.device("cuda", 0), 2) == ["device      NVIDIA H200, 139.0 GiB"]
    assert device_lines(torch.device("cuda", 0), 5)[1] == (
        "device      5 ranks of this machine share 2 cards, up to 3 on one: they compute in turns, "
        "and share its memory"
    )
    assert "share 1 card, up to 2 on one" in sharing(2, 1) and sharing(8, 8) == ""


def test_a_system_has_a_card_where_its_driver_is(machine, monkeypatch):
    machine(0)
    assert has_card()
    machine(0, present=False)
    assert not has_card()
    monkeypatch.setattr(facts.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert has_card()
