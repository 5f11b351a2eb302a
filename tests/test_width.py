"""In a large cluster a server has few mates, also after losses and resizes."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from planaria.layout import choose_groups, default_scatter, moved_share, regroup
from planaria.layout.board import count_meetings
from planaria.layout.near import few_meet

Groups = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


def mates_and_holders(groups: Groups, k: int) -> tuple[Counts, Counts]:
    """Of each server, how many others share groups with it, and to how many it sends deltas."""
    places, flat = np.unique(groups, return_inverse=True)
    members = flat.reshape(groups.shape).astype(np.int64)
    shared = count_meetings(members, members, places.size)
    sent = count_meetings(members[:, :k], members[:, k:], places.size)
    return np.count_nonzero(shared, axis=1) - 1, np.count_nonzero(sent, axis=1)


def checksum(groups: Groups) -> str:
    return hashlib.sha256(groups.astype("<i4").tobytes()).hexdigest()[:16]


def resize(groups: Groups, k: int, places: Sequence[int]) -> Groups:
    """Regroup; balance, and how much moves, are held as in small clusters."""
    after = regroup(groups, k, places)
    coming = len(set(places) - set(groups.ravel().tolist())) / len(places)
    going = float(np.mean(~np.isin(groups, places)))
    assert moved_share(groups, after) <= 1.1 * max(coming, going)
    assert set(after.ravel().tolist()) == set(places)
    assert all(len(set(group)) == len(group) for group in after.tolist())
    for kind in (after[:, :k], after[:, k:]):
        held = np.bincount(kind.ravel(), minlength=max(places) + 1)[list(places)]
        assert abs(held - kind.size / len(places)).max() < 1
    return after


@pytest.mark.parametrize(("k", "r"), [(4, 1), (4, 2)])
def test_losses_that_are_made_up_for_leave_nearly_the_mates_of_before(k: int, r: int) -> None:
    width = default_scatter(k, r)
    places = list(range(200))
    groups = choose_groups(200, k, r)
    for number, lost in enumerate((17, 120, 23, 121, 20)):
        places.remove(lost)
        groups = resize(groups, k, places)
        mates, _ = mates_and_holders(groups, k)
        assert mates.max() <= 2 * width
        assert mates.mean() <= 1.2 * width
        places.append(200 + number)
        groups = resize(groups, k, places)
        mates, holders = mates_and_holders(groups, k)
        assert mates.max() <= 2 * width
        assert mates.mean() <= 1.1 * width
        assert holders.max() <= width
        assert holders.mean() <= 1.1 * 12


@pytest.mark.parametrize("servers", [81, 125, 100])
def test_growing_and_shrinking_keep_most_of_the_width(servers: int) -> None:
    groups = choose_groups(101, 4, 1)
    mates, holders = mates_and_holders(resize(groups, 4, range(servers)), 4)
    assert mates.max() <= 2 * 20
    assert mates.mean() <= 1.3 * 20
    assert holders.max() <= 2 * 12
    assert holders.mean() <= 1.3 * 12


def test_control_a_cluster_in_which_all_meet_has_no_width() -> None:
    for servers, scatter, few in ((60, None, True), (60, 59, False), (20, None, False)):
        groups = choose_groups(servers, 4, 1, scatter=scatter).astype(np.int64)
        everybody = list(range(servers))
        assert few_meet(groups, everybody, everybody) == few
    grown = resize(choose_groups(60, 4, 1, scatter=59), 4, range(61))
    assert mates_and_holders(grown, 4)[0].min() > 0.9 * 60


def test_domains_that_come_to_be_known_later_are_kept_apart_also_with_a_width() -> None:
    groups = choose_groups(60, 4, 1)
    domains = [place // 2 for place in range(61)]
    after = regroup(groups, 4, range(1, 61), domains)
    for group in after.tolist():
        assert len({domains[place] for place in group}) == len(group)
    assert mates_and_holders(after, 4)[0].mean() <= 1.5 * 20


@pytest.mark.parametrize(
    ("servers", "k", "r", "lost", "back", "more", "fewer"),
    [
        (60, 4, 1, "b7759224e2f36433", "ee1e81fcafce7441", "31a8795cb7bb6094", "fd7e9180c6ca6b2d"),
        (100, 8, 2, "7ce110bbc443b7c3", "ce36dae9c2f3b7c1", "3bbcfb3cc917da38", "2bb79a2e67acafaa"),
    ],
)
def test_groups_after_resizes_are_a_format_and_never_change(
    servers: int, k: int, r: int, lost: str, back: str, more: str, fewer: str
) -> None:
    groups = choose_groups(servers, k, r)
    without = [place for place in range(servers) if place != 7]
    one_less = regroup(groups, k, without)
    assert checksum(one_less) == lost
    assert checksum(regroup(one_less, k, [*without, servers])) == back
    assert checksum(regroup(groups, k, range(servers + 10))) == more
    assert checksum(regroup(groups, k, range(servers - 10))) == fewer
