"""The order of heads in a contraction: every needed pair is computed once, with few others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headspan.scoring import arrangement
from headspan.scoring.arrangement import Arrangement, Job, arrange, length, rectangles
from headspan.scoring.contraction import contract
from headspan.vocabulary.heads import Pairing, pair_mask
from headspan.vocabulary.ports import PortTable


def computed(pieces: list, shape: tuple[int, int]) -> np.ndarray:
    """How often each pair is computed."""
    times = np.zeros(shape, dtype=int)
    for rows, columns in pieces:
        times[rows, columns] += 1
    return times


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(1, 90), st.floats(0, 1), st.integers(1, 60),
    st.integers(1, 60),
)  # fmt: skip
def test_any_pairs_are_covered_once_within_the_sizes_allowed(
    seed: int, height: int, width: int, share: float, most_rows: int, most_columns: int
) -> None:
    needed = np.random.default_rng(seed).random((height, width)) < share
    pieces = rectangles(needed, most_rows, most_columns)
    times = computed(pieces, needed.shape)
    assert times.max(initial=0) <= 1
    assert times[needed].all()
    assert all(length(rows) <= most_rows and length(columns) <= most_columns for rows, columns in pieces)


def flow_jobs(layers: int, heads: int, kv: int) -> tuple[dict[str, int], list[Job]]:
    ports = PortTable.regular(range(layers), heads, kv)
    jobs = [
        Job(role, "O", pair_mask(Pairing.parse("O" + role), ports.of("O"), ports.of(role), "forward").T)
        for role in "QKV"
    ]
    return {role: len(ports.of(role)) for role in "QKVO"}, jobs


@pytest.mark.parametrize(("layers", "heads", "kv", "most"), [(12, 12, 12, 1.2), (32, 32, 32, 1.1), (30, 9, 3, 1.2)])
def test_forward_pairs_of_all_roles_are_one_staircase(layers: int, heads: int, kv: int, most: float) -> None:
    counts, jobs = flow_jobs(layers, heads, kv)
    found = arrange(counts, jobs)
    area = sum(length(rows) * length(columns) for rows, columns in found.pieces)
    assert area < most * sum(np.count_nonzero(job.needed) for job in jobs)
    assert len(found.pieces) < 2 * layers
    places_are_a_permutation(found, counts)


def places_are_a_permutation(found: Arrangement, counts: dict[str, int]) -> None:
    everything = np.sort(np.concatenate(list(found.places.values())))
    np.testing.assert_array_equal(everything, np.arange(sum(counts.values())))
    runs = list(found.runs)
    in_runs = np.concatenate([np.arange(place.start, place.stop) for _, _, place in runs])
    in_pieces = {place for piece in found.pieces for part in piece for place in range(part.start, part.stop)}
    assert len(in_runs) == len(in_pieces) and set(in_runs.tolist()) == in_pieces  # heads without pairs are left out
    for key, own, place in runs:
        np.testing.assert_array_equal(found.places[key][own], np.arange(place.start, place.stop))


def test_all_pairs_are_one_triangle() -> None:
    rng = np.random.default_rng(0)
    counts = {"a": 200, "b": 150, "c": 170}
    jobs = [Job(x, y, rng.random((counts[x], counts[y])) < 0.9) for x, y in ("aa", "ab", "cb", "ac", "cc")]
    found = arrange(counts, jobs)
    places_are_a_permutation(found, counts)
    times = computed(found.pieces, (520, 520))
    times = np.where(times + times.T > 0, 1, 0)
    for job in jobs:
        assert times[np.ix_(found.places[job.first], found.places[job.second])][job.needed].all()
    # squares on the diagonal cost half: with what is needed nearly everywhere, so does the whole
    cost = sum(length(rows) * length(columns) / (2 if rows == columns else 1) for rows, columns in found.pieces)
    assert cost < 0.55 * 520**2


@pytest.mark.parametrize("jobs", ["apart", "triangle", "both ways"])
@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("many", [False, True])
def test_kernels_come_back_to_the_pair_that_they_belong_to(
    jobs: str, device: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """many: in pieces of a few pairs, as those of thousands of heads are cut."""
    rng = np.random.default_rng(1)
    if many:
        monkeypatch.setattr(arrangement, "_TRIANGLE", 4)
        monkeypatch.setattr(arrangement, "_EDGE", 0)
    factors = {key: rng.normal(size=(n, 20, q)) for key, n, q in (("a", 7, 3), ("b", 5, 4), ("c", 9, 2))}
    pairs = {"apart": ("ab", "cb"), "triangle": ("aa", "ba", "bc", "cc"), "both ways": ("ab", "ba", "cc")}[jobs]
    given = [Job(x, y, rng.random((len(factors[x]), len(factors[y]))) < 0.6) for x, y in pairs]
    for job, kernel in zip(given, contract(factors, given, route="gram", device=device), strict=True):
        expected = [[np.square(x.T @ y).sum() for y in factors[str(job.second)]] for x in factors[str(job.first)]]
        np.testing.assert_allclose(kernel, np.where(job.needed, expected, np.nan), rtol=1e-5)


def test_pairs_that_are_not_needed_are_missing() -> None:
    factors = {"a": np.ones((3, 4, 2)), "b": np.ones((2, 4, 2))}
    (kernel,) = contract(factors, [Job("a", "b", np.zeros((3, 2), dtype=bool))], route="gram")
    assert np.isnan(kernel).all()
