"""The numeric part of the NumPy twin: optimizer steps, initial records, the digest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planaria.kernels.types import (
    NO_ROW,
    Distribution,
    Floats,
    Index,
    Keys,
    OptimizerKind,
    OptimizerRule,
    Records,
)

LANES = 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)

Doubles = NDArray[np.float64]


def fold(terms: Floats) -> Floats:
    """Sums over the last axis: sixteen running sums, then halves onto halves."""
    n, dim = terms.shape
    padded = np.zeros((n, -(-dim // LANES) * LANES), np.float32)
    padded[:, :dim] = terms
    sums = np.zeros((n, LANES), np.float32)
    for at in range(0, padded.shape[1], LANES):
        sums += padded[:, at : at + LANES]
    half = LANES // 2
    while half:
        sums = sums[:, :half] + sums[:, half:]
        half //= 2
    return sums[:, 0]


def power(x: float, n: NDArray[np.uint32]) -> Doubles:
    """x ** n by squaring: the same multiplications on every machine, unlike libm's pow."""
    result = np.ones(len(n))
    base = np.float64(x)
    rest = n.copy()
    while rest.any():
        result = np.where(rest & 1, result * base, result)
        base = base * base
        rest >>= 1
    return result


def step_records(rule: OptimizerRule, old: Records, dim: int, grads: Floats) -> Records:
    """The records after one optimizer step, in torch.optim's order of operations."""
    minus_lr, eps = np.float32(-rule.lr), np.float32(rule.eps)
    new = old.copy()
    floats = new.view(np.float32)
    weights, state = floats[:, :dim], floats[:, dim:]
    if rule.weight_decay:
        grads = grads + np.float32(rule.weight_decay) * weights
    if rule.kind == OptimizerKind.SGD:
        weights += minus_lr * grads
    elif rule.kind == OptimizerKind.MOMENTUM:
        state[:] = state * np.float32(rule.beta1) + grads
        weights += minus_lr * state
    elif rule.kind == OptimizerKind.ADAGRAD:
        state += grads * grads
        weights += minus_lr * grads / (np.sqrt(state) + eps)
    elif rule.kind == OptimizerKind.ROWWISE_ADAGRAD:
        state += (fold(grads * grads) / np.float32(dim))[:, None]
        weights += minus_lr / (np.sqrt(state) + eps) * grads
    else:
        _adam(rule, new, dim, grads)
    return new


def _adam(rule: OptimizerRule, new: Records, dim: int, grads: Floats) -> None:
    floats = new.view(np.float32)
    weights, mean, square = (floats[:, i * dim : (i + 1) * dim] for i in range(3))
    step = new[:, 3 * dim]
    step += 1
    step_size = rule.lr / (1.0 - power(rule.beta1, step))
    correction = np.sqrt(1.0 - power(rule.beta2, step)).astype(np.float32)[:, None]
    mean += np.float32(1 - rule.beta1) * (grads - mean)
    square[:] = square * np.float32(rule.beta2) + np.float32(1 - rule.beta2) * grads * grads
    denominator = np.sqrt(square) / correction + np.float32(rule.eps)
    weights += (-step_size).astype(np.float32)[:, None] * mean / denominator


def mix(x: Keys) -> Keys:
    """The finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * FIRST_MULTIPLIER
    x = (x ^ (x >> np.uint64(27))) * SECOND_MULTIPLIER
    return x ^ (x >> np.uint64(31))


def init_records(
    seed: int,
    table_ids: Index,
    first_rows: Index,
    distributions: Index,
    parameters: Floats,
    rows: int,
    row: Index,
    state: NDArray[np.uint32],
    out: Records,
) -> None:
    out[:] = 0
    dim = out.shape[1] - len(state)
    real = np.flatnonzero((row >= 0) & (row < rows))
    table = np.searchsorted(first_rows, row[real], side="right") - 1
    start = mix(np.array([seed], np.uint64) + GOLDEN)
    table_key = mix(start + table_ids[table].astype(np.uint64))
    key = mix(table_key + (row[real] - first_rows[table]).astype(np.uint64))
    pairs = np.arange(1, (dim + 1) // 2 + 1, dtype=np.uint64) * GOLDEN
    words = mix(key[:, None] + pairs[None, :])
    halves = np.stack([words, words >> np.uint64(32)], axis=2).astype(np.uint32)
    bits = halves.reshape(len(real), 2 * len(pairs))[:, :dim]
    weights = np.zeros((len(real), dim), np.float32)
    for distribution in (Distribution.UNIFORM, Distribution.NORMAL):
        some = np.flatnonzero(distributions[table] == distribution)
        draw = _uniform if distribution == Distribution.UNIFORM else _normal
        a, b = parameters[table[some]].T[:, :, None]
        weights[some] = draw(bits[some], a, b)
    out[real, :dim] = weights.view(np.uint32)
    out[real, dim:] = state


def _uniform(bits: Records, low: Floats, high: Floats) -> Floats:
    share = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return low + (high - low) * share


def _normal(bits: Records, mean: Floats, std: Floats) -> Floats:
    p = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return mean + std * normal_quantile(p).astype(np.float32)


def log_exact(x: Doubles) -> Doubles:
    """Natural logarithm of positive normal numbers from + - * / alone, good to about 1e-15."""
    bits = x.view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.int64) - 1023
    fraction = ((bits & np.uint64(0x000FFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000)).view(
        np.float64
    )
    large = fraction > 1.4142135623730951
    fraction = np.where(large, fraction * 0.5, fraction)
    exponent = exponent + large
    z = (fraction - 1.0) / (fraction + 1.0)
    z2 = z * z
    series = np.zeros_like(z)
    for n in range(21, 0, -2):
        series = series * z2 + 1.0 / n
    return 2.0 * z * series + exponent.astype(np.float64) * 0.6931471805599453


# Wichura's algorithm AS 241 (PPND16): numerator and denominator for the middle, the tail and the
# far tail; ascending powers.
_MIDDLE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
     1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
     3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
     5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
     3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
     2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
     2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
     2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def _horner(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def normal_quantile(p: Doubles) -> Doubles:
    q = p - 0.5
    result = np.empty_like(q)
    middle = np.abs(q) <= 0.425
    r = 0.180625 - q[middle] * q[middle]
    result[middle] = q[middle] * _horner(_MIDDLE[0], r) / _horner(_MIDDLE[1], r)
    root = np.sqrt(-log_exact(np.where(q < 0, p, 1.0 - p)[~middle]))
    near, far = root - 1.6, root - 5.0
    tail = np.where(
        root <= 5.0,
        _horner(_TAIL[0], near) / _horner(_TAIL[1], near),
        _horner(_FAR_TAIL[0], far) / _horner(_FAR_TAIL[1], far),
    )
    result[~middle] = np.where(q[~middle] < 0, -tail, tail)
    return result


def digest(records: Records, keys: Keys) -> tuple[int, int]:
    real = keys != NO_ROW
    records, keys = records[real], keys[real]
    if records.shape[1] % 2:
        records = np.concatenate([records, np.zeros((len(records), 1), np.uint32)], axis=1)
    words = records[:, 0::2].astype(np.uint64) | records[:, 1::2].astype(np.uint64) << np.uint64(32)
    first, second = mix(keys + GOLDEN), mix(keys + GOLDEN + GOLDEN)
    for word in words.T:
        first = (first ^ word) * FIRST_MULTIPLIER
        first ^= first >> np.uint64(32)
        second = (second ^ word) * SECOND_MULTIPLIER
        second ^= second >> np.uint64(29)
    return int(np.sum(mix(first), dtype=np.uint64)), int(np.sum(mix(second), dtype=np.uint64))
