"""What a job can bear: which places it cannot do without (rule 8)."""

from __future__ import annotations

from planaria.layout import Layout


def unbearable(layout: Layout, servers: int, whole: set[int]) -> str | None:
    """A sentence that names what is gone, if more is than the others can make good.

    whole: the places that live and hold all their records.
    """
    lost = [
        group
        for group, places in enumerate(layout.groups.tolist())
        if sum(place not in whole for place in places) > layout.r
    ]
    if not lost:
        return None
    gone = sorted(set(range(servers)) - whole)
    if not layout.r:
        named = ", ".join(f"server:{place}" for place in gone)
        return f"{named} was lost, and there is no parity to make that good"
    named = ", ".join(str(layout.groups[group].tolist()) for group in lost[:3])
    return (
        f"more than {layout.r} servers of a group were lost: places {gone} are gone or not "
        f"rebuilt, which {len(lost)} groups cannot bear, among them {named}"
    )
