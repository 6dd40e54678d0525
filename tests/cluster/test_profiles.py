"""The networks of the box as data: paths, and the rates that flows can have."""

from itertools import pairwise

import pytest

from howdah.base.errors import UserError


@pytest.fixture
def profiles(modules):
    (found,) = modules("profiles")
    return found


def test_every_pair_of_hosts_has_a_path_over_wires_that_are_there(profiles):
    for profile in profiles.PROFILES.values():
        ends = {w.ends for w in profiles.wires(profile, 7)}
        ends |= {(b, a) for a, b in ends}
        for a in range(7):
            for b in set(range(7)) - {a}:
                path = profiles.path(profile, a, b)
                assert {*path} <= ends
                assert [path[0][0], path[-1][1]] == [f"host{a}", f"host{b}"]
                assert all(one[1] == two[0] for one, two in pairwise(path))


def test_a_tree_at_full_bisection_gives_each_half_its_rate(profiles):
    flows = [(0, 2), (1, 3), (2, 0), (3, 1)]
    rates = {
        name: profiles.fair_rates(profile, 4, flows) for name, profile in profiles.PROFILES.items()
    }
    assert rates == {
        "flat-1g": [1000] * 4,
        "spine-leaf": [250] * 4,  # 4:1
        "fat-tree": [1000] * 4,
        "edge-100m": [100] * 4,
        "slow-card": [1000, 250, 1000, 250],
        "flat-10g": [10_000] * 4,
    }


def test_what_one_flow_leaves_goes_to_the_others(profiles):
    flat, slow = profiles.PROFILES["flat-1g"], profiles.PROFILES["slow-card"]
    assert profiles.fair_rates(flat, 3, [(0, 2), (1, 2)]) == [500, 500]
    assert profiles.fair_rates(slow, 3, [(0, 2), (1, 2)]) == [750, 250]


def test_the_files_of_a_profile_name_what_is_wrong(profiles):
    for name, hosts, told in (
        ("flat-1G", 2, "no profile 'flat-1G'; did you mean 'flat-1g'"),
        ("flat-1g", 0, "--hosts is 0; a box has 1 to 64"),
        ("flat-1g", 65, "--hosts is 65"),
        ("slow-card", 1, "slow card in host 1: take 2 hosts or more"),
    ):
        with pytest.raises(UserError, match=told):
            profiles.profile_named(name, hosts)


def test_a_wire_that_is_not_what_it_is_said_to_be_is_named(modules):
    (prove,) = modules("prove")
    flat, flows = prove.PROFILES["flat-1g"], [(0, 1), (1, 0)]
    for got, faults in (([950, 900], 0), ([950, 899], 2), ([1001, 950], 2)):
        assert len(prove.faults(prove.links(flat, flows, got, 2))) == faults


def test_bytes_that_went_elsewhere_are_named(modules):
    (prove,) = modules("prove")
    big = 100 << 20
    for counted, sent, told in (
        ({"tcp": big}, big + (5 << 20), ""),
        ({"tcp": big, "shared": 1}, big, "over tcp, shared, not tcp alone"),
        ({}, big, "over no link"),
        ({"tcp": big}, 1000, "its card sent 1,000"),
        ({"tcp": big}, 2 * big, "its card sent 209,715,200"),
    ):
        said = prove.crossed({"host": 1, "counted": counted, "sent": sent})
        assert (told in said) if told else not said
