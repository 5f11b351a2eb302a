"""Groups: balance, spread and fault domains, on a fresh cluster and after every resize."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from planaria.errors import LayoutError
from planaria.layout import Layout, choose_groups, default_k, default_scatter, moved_share, regroup
from planaria.layout.board import fair_shares

Groups = npt.NDArray[np.int32]
ALL = 10**6  # more mates than there are servers


def counts(groups: Groups, servers: int) -> npt.NDArray[np.int64]:
    """How often each server stands at each position, [k + r, servers]."""
    width = groups.shape[1]
    flat = groups + np.arange(width) * servers
    return np.bincount(flat.ravel(), minlength=width * servers).reshape(width, servers)


def shared(groups: Groups, servers: int) -> npt.NDArray[np.int64]:
    """How many groups each two different servers share; a repeated member is an error."""
    both = groups[:, :, None].astype(np.int64) * servers + groups[:, None, :]
    pairs = np.bincount(both.ravel(), minlength=servers * servers).reshape(servers, servers)
    assert np.trace(pairs) == groups.size, "a group names a server twice"
    return pairs[~np.eye(servers, dtype=np.bool_)]


def assert_balanced_and_spread(groups: Groups, servers: int) -> None:
    assert np.ptp(counts(groups, servers), axis=1).max() == 0, "a position is not balanced"
    pairs = shared(groups, servers)
    assert pairs.min() > 0, "two servers share no group"
    assert 5 * int(pairs.max()) * pairs.size <= 6 * int(pairs.sum()), "rebuilds are uneven"


@pytest.mark.parametrize("servers", range(2, 65))
def test_every_server_holds_the_same_and_rebuilds_spread_over_all_survivors(servers: int) -> None:
    for r in range(1, min(4, servers - 1) + 1):
        for k in range(1, servers - r + 1):
            groups = choose_groups(servers, k, r, scatter=ALL)
            assert_balanced_and_spread(groups, servers)
            assert len(groups) * (k + r) >= 64 * servers


@pytest.mark.parametrize(("k", "r"), [(1, 1), (4, 1), (8, 1), (8, 2), (6, 4)])
def test_a_server_has_as_many_mates_in_any_large_cluster(k: int, r: int) -> None:
    least = 2 * (k + r - 1)
    for scatter in (least, default_scatter(k, r), default_scatter(k, r) + 5):
        for servers in (scatter + 2, 3 * scatter + 1, 1000):
            groups = choose_groups(servers, k, r, scatter=scatter)
            assert np.ptp(counts(groups, servers), axis=1).max() == 0, "a position is not balanced"
            pairs = shared(groups, servers).reshape(servers, servers - 1)
            assert (np.count_nonzero(pairs, axis=1) == scatter // 2 * 2).all()
            busiest = pairs.max() / (pairs.sum() / (servers * scatter))
            # The nearest of few mates share most groups; the more there are, the evener it is.
            assert busiest < (2.1 if scatter == least else 1.7)
            assert len(groups) * (k + r) >= 64 * servers


def test_as_many_mates_as_there_are_others_are_all_of_them() -> None:
    for servers in (9, 20, 37):
        for scatter in (servers - 1, servers, ALL):
            every = choose_groups(servers, 4, 1, scatter=scatter)
            assert np.count_nonzero(shared(every, servers)) == servers * (servers - 1)


def test_the_default_scatter_width_leaves_small_clusters_as_they_are() -> None:
    for k, r in ((1, 1), (4, 1), (8, 2)):
        most = default_scatter(k, r) - 1
        assert np.array_equal(choose_groups(most, k, r), choose_groups(most, k, r, scatter=ALL))
        beyond = choose_groups(most + 1, k, r)
        assert not np.array_equal(beyond, choose_groups(most + 1, k, r, scatter=ALL))


def test_from_four_times_a_group_on_an_owner_has_as_many_holders_in_any_cluster() -> None:
    for k, r in ((1, 1), (4, 1), (8, 2)):
        first = 4 * (k + r)
        most = len(Layout.fresh(1000, r, k).holders(0))
        for servers in range(first, first + 5):
            assert len(Layout.fresh(servers, r, k).holders(0)) <= most + 1
        assert len(Layout.fresh(first - 1, r, k).holders(0)) == first - 2


def test_a_scatter_width_that_no_group_fits_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"of 15 is too small .* must be 16 or more"):
        choose_groups(100, 8, 1, scatter=15)


def test_control_rotating_the_order_alone_does_not_spread_rebuilds() -> None:
    rotated = (np.arange(12)[:, None] + np.arange(4)).astype(np.int32) % 12
    with pytest.raises(AssertionError, match="share no group"):
        assert_balanced_and_spread(rotated, 12)


def test_control_one_wrong_member_is_noticed() -> None:
    groups = choose_groups(8, 3, 1)
    absent = next(place for place in range(8) if place not in groups[0])
    unbalanced, repeated = groups.copy(), groups.copy()
    unbalanced[0, 0] = absent
    repeated[0, 0] = groups[0, 1]
    with pytest.raises(AssertionError, match="not balanced"):
        assert_balanced_and_spread(unbalanced, 8)
    with pytest.raises(AssertionError, match="server twice"):
        shared(repeated, 8)


@pytest.mark.parametrize(("servers", "k", "r"), [(10, 8, 1), (11, 8, 2), (12, 4, 2), (6, 1, 2)])
def test_deltas_go_to_all_other_servers_also_after_a_resize(servers: int, k: int, r: int) -> None:
    fresh = choose_groups(servers, k, r)
    for n, groups in ((servers, fresh), (servers + 2, regroup(fresh, k, range(servers + 2)))):
        way = groups[:, :k, None].astype(np.int64) * n + groups[:, None, k:]
        sent = np.bincount(way.ravel(), minlength=n * n).reshape(n, n)
        others = sent[~np.eye(n, dtype=np.bool_)]
        assert others.min() > 0
        assert others.max() <= 1.7 * others.mean()


@pytest.mark.parametrize(
    ("servers", "k", "r", "holders"), [(48, 8, 1, 19), (200, 8, 1, 19), (1000, 8, 2, 22)]
)
def test_in_a_large_cluster_an_owner_sends_to_few_holders_and_all_hold_as_much(
    servers: int, k: int, r: int, holders: int
) -> None:
    groups = choose_groups(servers, k, r)
    way = groups[:, :k, None].astype(np.int64) * servers + groups[:, None, k:]
    sent = np.bincount(way.ravel(), minlength=servers**2).reshape(servers, servers)
    assert (np.count_nonzero(sent, axis=1) == holders).all()
    assert len(set(sent.sum(axis=0))) == len(set(sent.sum(axis=1))) == 1
    assert sent.max() <= 2.5 * sent[sent > 0].mean()


def test_without_parity_data_is_still_balanced() -> None:
    for servers in (1, 2, 7, 16):
        for k in (1, servers):
            groups = choose_groups(servers, k, 0)
            assert np.ptp(counts(groups, servers), axis=1).max() == 0


def test_k_follows_from_the_number_of_servers() -> None:
    assert [default_k(servers, 1) for servers in (2, 3, 4, 9, 10, 64)] == [1, 1, 2, 7, 8, 8]
    assert [default_k(servers, 2) for servers in (3, 4, 5, 12)] == [1, 1, 2, 8]
    assert default_k(1, 0) == default_k(64, 0) == 1
    with pytest.raises(LayoutError, match="2 servers cannot hold 1 data and 2 parity"):
        default_k(2, 2)
    with pytest.raises(LayoutError, match="parity is -1"):
        default_k(2, -1)


@pytest.mark.parametrize(
    ("servers", "k", "r", "sentence"),
    [(3, 3, 1, "add 1"), (4, 0, 1, "k must be 1 or more"), (4, 2, -1, "r 0 or more")],
)
def test_sizes_that_do_not_fit_are_refused(servers: int, k: int, r: int, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        choose_groups(servers, k, r)


def checksum(groups: Groups) -> str:
    return hashlib.sha256(groups.astype("<i4").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("servers", "k", "r", "fresh", "one_more", "racks"),
    [
        (2, 1, 1, "a5269fb8bb4e2509", "1041c53d621fcc77", "a5269fb8bb4e2509"),
        (5, 3, 1, "9ba7274846b76d8e", "54627350ceed66fd", "cbeb119d948afa76"),
        (7, 4, 2, "e79b98b3e9a9a45b", "7f93281a17360d36", "096d75b877eb1590"),
        (12, 8, 2, "1a67dac5ea415a66", "29748c4d7df913ad", "90be1f8e211a303f"),
        (30, 8, 3, "0332cf224722dba8", "f84bf75c22b978d7", "56409f964a6690c1"),
        (64, 8, 2, "4eda5c0a6f481dee", "4e36e0ae341bff0e", "4884bce5c841fcf5"),
    ],
)
def test_groups_are_a_format_and_never_change(
    servers: int, k: int, r: int, fresh: str, one_more: str, racks: str
) -> None:
    groups = choose_groups(servers, k, r, scatter=ALL)
    assert checksum(groups) == fresh
    assert checksum(regroup(groups, k, range(servers + 1))) == one_more
    assert checksum(choose_groups(servers, k, r, [p % (k + r) for p in range(servers)])) == racks


@pytest.mark.parametrize(
    ("servers", "k", "r", "fresh"),
    [(64, 8, 2, "86a71b81ea5f209c"), (1000, 8, 1, "19856f2e4c64c9be")],
)
def test_nor_do_those_of_the_default_scatter_width(
    servers: int, k: int, r: int, fresh: str
) -> None:
    assert checksum(choose_groups(servers, k, r)) == fresh


@pytest.mark.parametrize(
    ("servers", "k", "r", "more", "moved", "lost", "back"),
    [
        (6, 4, 1, "82563f3558c132a5", "f260dbf7ff9bfba2", "d5cce507c492be29", "f7c2ddb719bccd15"),
        (9, 4, 2, "ac2dfef14e5a2213", "72bd197e355fc343", "855356a2bfeced44", "7c63aa21c920f820"),
        (12, 8, 1, "f9f11e6bc608616f", "611dd76439a8d507", "bd79deb5ef5abcb2", "db67d8c74754af7a"),
        (19, 4, 1, "83e6c598a1e01b94", "1898c6d25478dc22", "efd633172b7c16d9", "7f16d857d5eea2d5"),
        (40, 8, 2, "14a3968817355b13", "8fb0ac9bbf818f6d", "870747cc7f0e117f", "d11d7a792553245e"),
    ],
)
def test_nor_do_those_after_resizes_where_all_servers_meet(
    servers: int, k: int, r: int, more: str, moved: str, lost: str, back: str
) -> None:
    quarter = servers // 4
    end = servers + quarter
    gone = servers // 2 + quarter
    groups = choose_groups(servers, k, r, scatter=ALL)
    for places, expected in (
        (range(end), more),
        (range(quarter, end), moved),
        ([place for place in range(quarter, end) if place != gone], lost),
        ([place for place in range(quarter, end + 1) if place != gone], back),
    ):
        groups = regroup(groups, k, places)
        assert checksum(groups) == expected


@pytest.mark.parametrize(
    ("servers", "k", "r", "more", "moved"),
    [
        (6, 4, 1, "571785ecbadde362", "d760705baf29d4f5"),
        (9, 4, 2, "668b56c0b276430b", "430854b22c131869"),
        (19, 4, 1, "1512ac7de9089f4a", "226351f57dc784de"),
        (40, 8, 2, "06208944f61004f3", "69aa872cf621951e"),
    ],
)
def test_nor_do_those_after_resizes_with_fault_domains(
    servers: int, k: int, r: int, more: str, moved: str
) -> None:
    end = servers + servers // 4
    domains = [place % (k + r + 1) for place in range(end)]
    groups = choose_groups(servers + 1, k, r, domains[: servers + 1])
    assert checksum(regroup(groups, k, range(end), domains)) == more
    assert checksum(regroup(groups, k, range(1, end), domains)) == moved


# --- resizing ---


def unevenness(groups: Groups, k: int, places: Sequence[int], domains: Sequence[object]) -> float:
    """The furthest that a server's data or parity count is from its fair share."""
    width = groups.shape[1]
    labels = [domains[place] for place in places]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    shares = fair_shares([numbers[label] for label in labels], len(groups), width)
    furthest = 0.0
    for kind in (groups[:, :k], groups[:, k:]):
        for place, (share, parts) in zip(places, shares, strict=True):
            fair = kind.shape[1] * share / (width * parts)
            furthest = max(furthest, abs(np.count_nonzero(kind == place) - fair))
    return furthest


def least_share(groups: Groups, places: Sequence[int]) -> float:
    """The smallest share of memberships that any resize to `places` has to change."""
    coming = len(set(places) - set(groups.ravel().tolist())) / len(places)
    going = float(np.mean(~np.isin(groups, places)))
    return max(coming, going)


def resize(groups: Groups, k: int, places: Sequence[int]) -> Groups:
    """Regroup and hold the promises that every resize makes."""
    after = regroup(groups, k, places)
    assert after.shape == groups.shape
    assert set(after.ravel().tolist()) == set(places)
    pairs = shared(np.searchsorted(places, after).astype(np.int32), len(places))
    assert unevenness(after, k, places, range(max(places) + 1)) < 1
    # All pairs meet, unless there are hardly more meetings than pairs; none meets far too often.
    assert np.mean(pairs > 0) >= (1 if pairs.mean() >= 1.5 else 0.97)
    assert pairs.max() <= max(1.5 * pairs.mean(), pairs.mean() + 2)
    assert moved_share(groups, after) <= 1.1 * least_share(groups, places)
    return after


SIZES = [
    *[(2, 1, 1), (3, 1, 1), (4, 1, 2), (4, 2, 1), (5, 4, 1), (6, 1, 4), (6, 3, 2), (8, 5, 2)],
    *[(10, 8, 1), (10, 5, 4), (11, 8, 2), (16, 4, 2), (16, 15, 1), (20, 8, 2), (24, 8, 4)],
    *[(33, 1, 1), (40, 8, 2), (12, 3, 0)],
]


@pytest.mark.parametrize(("servers", "k", "r"), SIZES)
def test_a_resize_moves_hardly_more_than_it_must(servers: int, k: int, r: int) -> None:
    groups = choose_groups(servers, k, r, scatter=ALL)  # test_width.py has the others
    quarter = max(2, servers // 4)
    more = resize(groups, k, range(servers + 1))
    resize(groups, k, range(servers + quarter))
    resize(more, k, [*range(1), *range(2, servers + 1)])
    if servers > k + r:
        fewer = resize(groups, k, [p for p in range(servers) if p != servers // 2])
        resize(fewer, k, range(servers))
        resize(groups, k, range(1, servers + 1))
    if servers - quarter >= k + r:
        resize(groups, k, range(quarter, servers))


def test_growing_one_by_one_stays_balanced_and_spread() -> None:
    groups = choose_groups(6, 4, 1)
    for servers in range(7, 17):
        groups = resize(groups, 4, range(servers))
    for servers in range(15, 5, -1):
        groups = resize(groups, 4, range(servers))


def test_control_choosing_afresh_moves_nearly_everything() -> None:
    groups = choose_groups(16, 4, 2)
    afresh = choose_groups(17, 4, 2)[: len(groups)]
    assert moved_share(groups, afresh) > 5 * least_share(groups, range(17))


def test_nothing_to_do_moves_nothing_and_places_may_be_any_numbers() -> None:
    groups = choose_groups(9, 4, 2)
    assert moved_share(groups, regroup(groups, 4, range(9))) == 0
    assert moved_share(groups, groups[::-1]) > 0
    resize(groups, 4, [0, 2, 3, 4, 5, 6, 7, 8, 1000])


def test_impossible_resizes_are_refused() -> None:
    groups = choose_groups(6, 4, 2)
    with pytest.raises(LayoutError, match="5 servers are too few for groups of 4 data"):
        regroup(groups, 4, range(5))
    with pytest.raises(LayoutError, match="places must be numbers from 0"):
        regroup(groups, 4, range(-1, 6))
    with pytest.raises(LayoutError, match="do not fit k = 7"):
        regroup(groups, 7, range(6))
    with pytest.raises(LayoutError, match="cannot be compared"):
        moved_share(groups, groups[1:])


# --- fault domains ---


def racks(sizes: Sequence[int]) -> list[str]:
    """Racks of the given sizes, dealt out in turn so that neighbours stand in different ones."""
    turns = [[f"rack {n}" for n, size in enumerate(sizes) if size > t] for t in range(max(sizes))]
    return [rack for turn in turns for rack in turn]


def assert_domains_hold(
    groups: Groups, k: int, places: Sequence[int], domains: Sequence[str]
) -> None:
    for group in groups.tolist():
        assert len({domains[place] for place in group}) == len(group), "two share a domain"
    assert unevenness(groups, k, places, domains) < 1


SHAPES = [
    *[([2] * 6, 4, 2), ([4] * 4, 2, 1), ([4] * 16, 8, 2), ([3] * 11, 8, 2), ([4] * 4, 3, 0)],
    *[([8, 4, 2, 1], 2, 1), ([8, 4, 2, 1], 2, 2), ([10, 1, 1], 1, 1), ([5, 1, 1, 3, 1, 1], 3, 1)],
    *[([9, 7, 5, 3, 1, 1, 1, 1], 4, 2), ([3, 1, 1, 4, 6, 3, 2, 1], 5, 2), ([6, 2, 6, 1], 2, 1)],
]


@pytest.mark.parametrize(("sizes", "k", "r"), SHAPES)
def test_no_two_members_share_a_domain_and_load_is_as_even_as_can_be(
    sizes: list[int], k: int, r: int
) -> None:
    domains = racks(sizes)
    assert_domains_hold(choose_groups(len(domains), k, r, domains), k, range(len(domains)), domains)


def test_equal_racks_spread_rebuilds_over_all_servers_of_other_racks() -> None:
    domains = racks([4] * 6)
    groups = choose_groups(24, 4, 1, domains)
    pairs = np.zeros((24, 24))
    np.add.at(pairs, (groups[:, :, None], groups[:, None, :]), 1)
    apart = np.array([[a != b for b in domains] for a in domains])
    assert pairs[apart].min() > 0
    assert pairs[apart].max() <= 1.5 * pairs[apart].mean()


@pytest.mark.parametrize(("sizes", "k", "r"), SHAPES)
def test_resizing_keeps_domains_apart(sizes: list[int], k: int, r: int) -> None:
    domains = [*racks(sizes), "rack 0", "a new rack"]
    servers = len(domains) - 2
    groups = choose_groups(servers, k, r, domains[:servers])
    for places in (range(servers + 1), range(servers + 2), [*range(1, servers + 1)]):
        assert_domains_hold(regroup(groups, k, places, domains), k, places, domains)


def test_one_server_more_in_equal_racks_moves_hardly_more_than_its_share() -> None:
    domains = {place: place % 8 for place in range(33)}
    groups = choose_groups(32, 4, 2, domains)
    after = regroup(groups, 4, range(33), domains)
    assert moved_share(groups, after) <= 1.1 * least_share(groups, range(33))


def test_domains_that_come_to_be_known_later_are_kept_apart_by_a_resize() -> None:
    domains = racks([3] * 5)
    groups = choose_groups(15, 3, 1)
    with pytest.raises(AssertionError, match="share a domain"):
        assert_domains_hold(groups, 3, range(15), domains)
    assert_domains_hold(regroup(groups, 3, range(15), domains), 3, range(15), domains)


def test_too_few_domains_are_refused_with_the_counts() -> None:
    with pytest.raises(LayoutError, match=r"8 servers stand in 4 fault domains, .* needs 5"):
        choose_groups(8, 4, 1, racks([2] * 4))
    with pytest.raises(LayoutError, match=r"no fault domain is given for the places \[6, 7\]"):
        choose_groups(8, 2, 1, ["a", "b", "c", "d", "e", "f"])
    with pytest.raises(LayoutError, match=r"no fault domain is given for the places \[3\]"):
        choose_groups(4, 2, 1, {0: "a", 1: "b", 2: "c"})


def test_a_domain_too_big_for_its_share_is_held_to_one_membership_per_group() -> None:
    # 10 + 1 + 1 servers in pairs: the big domain can stand in every group, but no oftener.
    shares = fair_shares([0] * 10 + [1, 2], groups=100, width=2)
    assert shares == [(100, 10)] * 10 + [(100, 2)] * 2
