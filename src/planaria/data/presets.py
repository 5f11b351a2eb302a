"""Schemas for files that many people have."""

from __future__ import annotations

from planaria.data.schema import Dense, Schema, Sparse

CRITEO = Schema(
    label="label",
    dense=tuple(Dense(f"I{n}", log=True) for n in range(1, 14)),
    sparse=tuple(Sparse(f"C{n}", 1_000_000, "hex") for n in range(1, 27)),
    delimiter="\t",
    columns=("label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))),
)
"""Criteo's click logs as text without a header, or as Parquet with these columns: the same rows
and numbers as planaria.data.CriteoFile has."""

_AVAZU_ROWS = {
    **{"C1": 1000, "banner_pos": 1000, "site_id": 100_000, "site_domain": 100_000},
    **{"site_category": 1000, "app_id": 100_000, "app_domain": 10_000, "app_category": 1000},
    **{"device_id": 1_000_000, "device_ip": 1_000_000, "device_model": 100_000},
    **{"device_type": 1000, "device_conn_type": 1000},
    **{f"C{n}": 10_000 for n in range(14, 22)},
}
AVAZU = Schema(
    label="click",
    # YYMMDDHH: the hour of the day is what comes again.
    sparse=(
        Sparse("hour", 100, "integer", modulo=100),
        *(Sparse(name, rows) for name, rows in _AVAZU_ROWS.items()),
    ),
)
"""Avazu's train.csv."""


def _movielens(user: str, item: str, rows: int, delimiter: str, *columns: str) -> Schema:
    """A rating of 4 or more counts as a click."""
    return Schema(
        label="rating",
        positive_from=4.0,
        sparse=(Sparse(user, rows, "integer"), Sparse(item, rows, "integer")),
        delimiter=delimiter,
        columns=columns,
    )


PRESETS = {
    "criteo": CRITEO,
    "avazu": AVAZU,
    # ratings.csv of MovieLens 20M and later, ratings.dat of 1M and 10M, u.data of 100K
    "movielens": _movielens("userId", "movieId", 1_000_000, ","),
    "movielens-dat": _movielens(
        "user", "item", 500_000, "::", "user", "item", "rating", "timestamp"
    ),
    "movielens-100k": _movielens(
        "user", "item", 20_000, "\t", "user", "item", "rating", "timestamp"
    ),
}
