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
    1000: "C1 banner_pos site_category app_category device_type device_conn_type",
    10_000: "app_domain C14 C15 C16 C17 C18 C19 C20 C21",
    100_000: "site_id site_domain app_id device_model",
    1_000_000: "device_id device_ip",
}
AVAZU = Schema(
    label="click",
    # YYMMDDHH: the hour of the day is what comes again.
    sparse=(
        Sparse("hour", 100, "integer", modulo=100),
        *(Sparse(name, rows) for rows, names in _AVAZU_ROWS.items() for name in names.split()),
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
