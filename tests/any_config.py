"""Any configuration, with all keys, and the keys' paths: what the tests of the door share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from planaria.config import Config
from planaria.optimizers import NAMES


def flat(values: dict[str, Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {}
        pairs |= {f"{name}.{key}": found for key, found in inner.items()} or {name: value}
    return pairs


def nested(path: str, value: object) -> dict[str, object]:
    section, dot, name = path.partition(".")
    return {section: {name: value}} if dot else {path: value}


DEFAULTS = flat(Config().to_dict())

whole = st.integers(1, 1000)
positive = st.floats(1e-30, 1e30)
fraction = st.floats(0, 0.999)
layers = st.lists(whole, max_size=16)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, object]:
    """Right ones, with all keys."""
    parity = draw(st.integers(0, 4))
    k = draw(st.none() | st.integers(1, 64))
    trainers = draw(st.integers(1, 1024))
    tables = draw(st.integers(1, 40))
    steps = draw(st.integers(1, 10**9))
    heartbeat = draw(st.integers(1, 10**6))
    every_s = draw(st.none() | st.just("auto") | positive)
    return {
        "strategy": draw(st.sampled_from(["erasure", "none"])),
        "servers": draw(st.integers(parity + (k or 1), 1024)),
        "parity": parity,
        "k": k,
        "scatter": draw(st.none() | st.integers(2 * (64 + 4), 1024)),
        "spares": draw(st.integers(0, 1024)),
        "trainers": trainers,
        "steps": steps,
        "batch": draw(st.integers(trainers, 2**24)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "reproducible": draw(st.sampled_from(["same", "portable", "off"])),
        "tables": None,
        "optimizer": {
            "name": draw(st.sampled_from(NAMES)),
            "lr": draw(positive),
            "weight_decay": draw(st.just(0.0) | positive),
            "eps": draw(st.none() | positive),
            "momentum": draw(fraction),
            "beta1": draw(fraction),
            "beta2": draw(fraction),
            "initial_accumulator": draw(st.just(0.0) | positive),
            "schedule": draw(st.sampled_from(["constant", "linear", "inverse_sqrt"])),
            "warmup_steps": draw(st.integers(0, steps - 1)),
        },
        "model": {
            "name": "dlrm",
            "dim": draw(whole),
            "tables": tables,
            "rows": draw(
                st.integers(1, 2**40)
                | st.lists(st.integers(1, 2**40), min_size=tables, max_size=tables)
            ),
            "bottom": draw(layers),
            "top": draw(layers),
        },
        "data": {
            "source": "synthetic",
            "path": None,
            "schema": None,
            "epochs": None,
            "shuffle": draw(st.sampled_from(["on", "off"])),
            "validation": draw(st.floats(0, 0.5)),
            "zipf": draw(st.floats(0, 1.5)),
            "test_samples": draw(st.integers(0, 2**40)),
        },
        "script": {
            "spares": draw(st.integers(0, 1024)),
            "resume": draw(st.sampled_from(["on", "off"])),
            "parameters": draw(st.none() | st.integers(0, 2**40)),
            "ids": draw(st.integers(0, 2**40)),
        },
        "cluster": {
            "transport": draw(st.sampled_from(["ipc", "tcp"])),
            "host": draw(st.sampled_from(["127.0.0.1", "::1", "node-7.rack_2", "10.0.0.1"])),
            "encryption": draw(st.sampled_from(["auto", "on", "off"])),
            "domains": None,
            "require": "server",
            "early_answers": draw(st.sampled_from(["on", "off"])),
            "heartbeat_ms": heartbeat,
            "heartbeat_limit_ms": draw(st.integers(heartbeat + 1, 10**7)),
            "retry_ms": draw(st.integers(1, 999)),
            "deadline_s": draw(st.floats(1, 1e6)),
            "join_s": draw(st.floats(1, 1e6)),
            "hang_limit_s": draw(positive),
        },
        "wire": {
            "packing": draw(st.sampled_from(["auto", "on", "off"])),
            "lookups": draw(st.sampled_from(["exact", "fp16", "bf16", "lossy"])),
            "tables": None,
            "encoder": draw(st.sampled_from(["auto", "none", "huffman", "vector-lz", "zstd"])),
            "encoders": None,
            "bandwidth": draw(st.sampled_from(["auto", "1Gbit", "300Mbit/s", "2.5Gbps"])),
            "bounds": draw(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3)),
            "decay_steps": draw(st.integers(0, 10**9)),
            "sample_steps": draw(whole),
            "gradients": draw(st.sampled_from(["exact", "fp16"])),
        },
        "rebuild": {
            "priority": draw(st.sampled_from(["training", "balanced", "redundancy"])),
            "chunk": draw(whole),
            "jobs": draw(whole),
            "bytes_per_s": draw(st.integers(0, 2**50)),
            "by": "replacement",
        },
        "history": {"steps": draw(whole)},
        "tier": draw(
            st.sampled_from([{"ram": 10**9, "path": "/mnt/nvme"}, {"ram": None, "path": None}])
        ),
        "scrub": {"every_steps": draw(st.integers(0, 10**9))},
        "checkpoint": {
            "path": draw(st.sampled_from(["checkpoints", "/var/job 7", "s3://bucket/job"])),
            "every_steps": draw(st.integers(0, 10**9)) if every_s is None else 0,
            "keep_last": draw(whole),
            "bits": draw(st.sampled_from([32, 8, 4, 3, 2])),
            "mode": draw(st.sampled_from(["async", "sync"])),
            "policy": draw(st.sampled_from(["full", "one-shot", "consecutive", "intermittent"])),
            "every_s": every_s,
            "last_step": draw(st.sampled_from(["save", "if_due"])),
            "stall_s": draw(positive),
        },
        "threads": {"server": draw(whole), "trainer": draw(whole)},
        "trainer": {
            "device": draw(st.sampled_from(["cpu", "cuda", "cuda:3", "mps", "xpu:0"])),
            "elastic": draw(st.sampled_from(["on", "off"])),
        },
        "cpr": {
            "variant": draw(st.sampled_from(["vanilla", "scar", "mfu", "ssu"])),
            "target_pls": draw(st.floats(1e-6, 1)),
            "rho": draw(st.floats(1e-6, 1)),
            "large_share": draw(st.floats(0, 1)),
        },
        "failures": {
            "mtbf_s": draw(st.none() | positive),
            "save_s": draw(st.none() | positive),
            "load_s": draw(st.none() | positive),
            "reschedule_s": draw(positive),
        },
    }
