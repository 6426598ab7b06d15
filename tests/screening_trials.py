"""How often a certificate of screening is wrong, on models of many kinds: ``python tests/screening_trials.py``.

Every trial draws a small model and screens it for its four strongest pairs, with 8 of 160 pairs compared exactly, so
that all others depend on their bounds. It then looks for a certified pair with a wrong rank. The true values are
computed with numpy's longdouble. Where that has no more digits than float64, conditions above 1e6 are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

import headspan as hs
from headspan.scoring import screening
from headspan.subspaces.bases import rank_tolerance
from headspan.subspaces.sketches import gaussian_sketch
from headspan.system import threads
from headspan.vocabulary.heads import parse_pairings

D, M, LAYERS, HEADS = 96, 8, 5, 4
SIZE, K, EXACT = 40, 4, 8  # columns of the sketch, pairs asked for, pairs compared exactly
TIE = 1e-5  # pairs that are closer have one place
EXTENDED = np.finfo(np.longdouble).eps < 1e-18

Arrays = dict[str, np.ndarray]


class Count(NamedTuple):
    """The outcome of the trials of one kind."""

    trials: int
    certifying: int  # trials that certified anything
    certified: int  # pairs, of four in a trial
    compared: int  # pairs compared exactly, of 160 in a trial
    wrong: int  # trials with a certified pair at a wrong place


# ------------------------------------------------------------------------------------------------------- models


def planted(rng: np.random.Generator, edges: int = 3, least: float = 0.5, most: float = 1.0) -> Arrays:
    """Random weights in which some heads write much of what later heads read."""
    arrays = {role: rng.normal(size=(LAYERS, HEADS, D, M)) for role in "QKVO"}
    for _ in range(edges):
        a, b = sorted(rng.choice(LAYERS, 2, replace=False))
        share = rng.uniform(least, most)
        mixed = share * arrays["O"][a, rng.integers(HEADS)] + (1 - share) * rng.normal(size=(D, M))
        arrays["K"][b, rng.integers(HEADS)] = mixed
    return arrays


def conditioned(rng: np.random.Generator, condition: float, dtype: type) -> Arrays:
    """The same spans, in weights of this condition: weak directions few or many, and anywhere in the span."""
    arrays = planted(rng)
    for role in "OK":
        for place in np.ndindex(LAYERS, HEADS):
            basis = np.linalg.qr(arrays[role][place])[0] @ rotation(rng)
            weak = rng.integers(1, M)
            values = [np.geomspace(1, 1 / condition, M), np.where(np.arange(M) < weak, 1, 1 / condition)]
            arrays[role][place] = basis * values[rng.integers(2)] @ rotation(rng)
    return {role: array.astype(dtype) for role, array in arrays.items()}


def rotation(rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(M, M)))[0]


def rank_deficient(rng: np.random.Generator) -> Arrays:
    """Half of the heads have fewer directions than columns, some none."""
    arrays = planted(rng)
    for role in "OK":
        for place in np.ndindex(LAYERS, HEADS):
            if rng.random() < 0.5:
                rank = rng.integers(0, M)
                arrays[role][place] = arrays[role][place][:, :rank] @ rng.normal(size=(rank, M))
    return arrays


def duplicated(rng: np.random.Generator) -> Arrays:
    """Repeated heads, unchanged or in another basis: many pairs of exactly equal strength."""
    arrays = planted(rng)
    for role in "OK":
        for _ in range(4):
            places = [(rng.integers(LAYERS), rng.integers(HEADS)) for _ in range(2)]
            arrays[role][places[0]] = arrays[role][places[1]] @ (np.eye(M) if rng.random() < 0.5 else rotation(rng))
    return arrays


def hide(arrays: Arrays, rng: np.random.Generator, seed: int) -> Arrays:
    """The same with an edge of the largest possible PK in the null space of the sketch of a seed."""
    _, _, rows = np.linalg.svd(gaussian_sketch(D, SIZE, seed).astype(np.float64))
    hidden = rows[SIZE:].T @ np.linalg.qr(rng.normal(size=(D - SIZE, M)))[0]
    found = {role: array.copy() for role, array in arrays.items()}
    found["O"][0, 0], found["K"][LAYERS - 1, 0] = hidden @ rotation(rng), hidden @ rotation(rng)
    return found


def own_seed(arrays: Arrays) -> int:
    return screening.sketch_seed(hs.open(arrays).fingerprint())


def hidden_from_its_own(rng: np.random.Generator) -> Arrays:
    """Hidden from the model's current seed, five times in a row, since each change gives it another seed."""
    arrays = planted(rng)
    for _ in range(5):
        arrays = hide(arrays, rng, own_seed(arrays))
    return arrays


def searched(rng: np.random.Generator, tries: int = 20) -> Arrays:
    """Of many models with a strong edge, the one whose own sketch shows it least."""
    plain, best, least = planted(rng), None, np.inf
    for _ in range(tries):
        made = hide(plain, rng, int(rng.integers(2**31)))
        sketch = gaussian_sketch(D, SIZE, own_seed(made))
        first, second = (np.linalg.qr(w)[0] for w in (made["O"][0, 0], made["K"][LAYERS - 1, 0]))
        shown = np.square(np.linalg.qr(sketch @ first)[0].T @ (sketch @ second)).sum()
        if shown < least:
            best, least = made, shown
    assert best is not None
    return best


KINDS: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "planted edges": planted,
    **{
        f"condition {condition:.0e}, {dtype.__name__}": partial(conditioned, condition=condition, dtype=dtype)
        for dtype in (np.float64, np.float32)
        for condition in (1e0, 1e3, 1e6, 1e9, 1e12)
        if EXTENDED or dtype is np.float32 or condition <= 1e6
    },
    "forty weak edges": partial(planted, edges=40, least=0.3, most=0.5),
    "rank-deficient heads": rank_deficient,
    "duplicated heads": duplicated,
    "edge hidden from seed 0": lambda rng: hide(planted(rng), rng, 0),
    "edge hidden from the model's own seed": hidden_from_its_own,
    "least visible of 20 models": searched,
}


# -------------------------------------------------------------------------------------------------------- truth


def basis(weight: np.ndarray) -> np.ndarray:
    """Columns that span what a (d, m) weight does, by its numerical rank; zeros beyond."""
    left, values, _ = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    rank = np.count_nonzero(values > rank_tolerance(weight.shape, np.linalg.norm(values), weight.dtype.name))
    if rank < M:
        return left * (np.arange(M) < rank)
    made = weight.astype(np.longdouble)
    for j in range(M):  # Gram and Schmidt, each vector three times
        for _ in range(3):
            made[:, j] -= made[:, :j] @ (made[:, :j].T @ made[:, j])
            made[:, j] /= np.sqrt(np.square(made[:, j]).sum())
    return made.astype(np.float64)


def true_pk(arrays: Arrays) -> np.ndarray:
    """PK of all forward OK pairs, (layer, head, layer, head); −1 elsewhere."""
    rows = [np.concatenate([basis(w).T for layer in arrays[role] for w in layer]) for role in "OK"]
    pk = np.square(rows[0] @ rows[1].T).reshape(LAYERS, HEADS, M, LAYERS, HEADS, M).sum(axis=(2, 5))
    order = np.arange(LAYERS)
    return np.where((order[:, None] < order)[:, None, :, None], pk, -1.0)


def trial(arrays: Arrays, seed: int | None = None) -> tuple[dict[str, int], bool]:
    """The counts of a certificate, and whether a certified pair has a wrong rank."""
    found = screening.screen(
        hs.open(arrays), parse_pairings("OK"), "default", K, memory=10**9, seed=seed, size=SIZE, exact=EXACT
    )
    about = found.provenance["screen"]["OK"]
    pk = true_pk(arrays)
    strongest = np.sort(pk.ravel())[::-1][: about["certified"]]
    edges = found["pk", "OK"].top(about["certified"])
    places = [(e.source.layer, e.source.index, e.target.layer, e.target.index) for e in edges]
    return about, any(abs(pk[place] - true) > TIE for place, true in zip(places, strongest, strict=True))


def count(make: Callable[[np.random.Generator], Arrays], trials: int, seed: int | None = None) -> Count:
    """The trials of a kind, always the same ones; ``seed`` is that of the sketch where it is given."""
    found = [trial(make(np.random.default_rng([number, M])), seed) for number in range(trials)]
    about = [certificate for certificate, _ in found]
    return Count(
        trials,
        sum(a["certified"] > 0 for a in about),
        sum(a["certified"] for a in about),
        sum(a["compared"] for a in about),
        sum(wrong for _, wrong in found),
    )


def resting_on_bounds() -> None:
    """One thread, and no second round of comparisons, which for models so small would be of all pairs."""
    threads.cores = lambda: 1
    screening._MORE = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300, help="of every kind")
    trials = parser.parse_args().trials
    resting_on_bounds()
    print("| kind | trials | with a certificate | certified pairs | compared exactly | wrong certificates |")
    print("|---|---|---|---|---|---|")
    rows = {name: partial(count, make, trials) for name, make in KINDS.items()}
    rows["hidden from seed 0, and seed 0 given"] = partial(count, KINDS["edge hidden from seed 0"], trials, 0)
    for name, run in rows.items():
        n, certifying, certified, compared, wrong = run()
        print(f"| {name} | {n:,} | {certifying:,} | {certified:,} | {compared / n:.1f} of 160 | {wrong} |", flush=True)


if __name__ == "__main__":
    main()
