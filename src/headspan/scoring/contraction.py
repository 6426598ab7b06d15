"""‖F_AᵀF_B‖_F² for all pairs of factors at once, by the cheaper of two routes.

*Direct*: multiply the factors, square, and sum each block: 2·p·q·q' operations a pair for factors of p×q and p×q'.

*Gram*: ‖F_AᵀF_B‖_F² = ⟨F_AF_Aᵀ, F_BF_Bᵀ⟩, so all pairs are one matrix product of flattened Gram matrices. They are
symmetric: half of each is enough, p² operations a pair, and q·p² for making one. They are never held whole: rows
r₀…r₁ of all of them are made, multiplied, added up and forgotten. Of these rows the columns r₀…r₁ form a square that
counts once, and the columns from r₁ on a rectangle that counts twice.

Products are float32, sums over row chunks float64. Arrays may be of numpy or of torch on any device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from headspan.errors import HeadspanError, missing_extra
from headspan.system.threads import cores, team

Route = Literal["gram", "direct"]
Key = Hashable

# Narrow products waste the processor; wide ones compute more pairs than the pair set needs. A sixth of the columns
# keeps a staircase within a few per cent of its pairs.
_LEAST_COLUMNS, _MOST_COLUMNS = 48, 192
_MOST_SOURCES = 288  # rows of one product, so that there is work for every core
_MOST_ROWS, _LEAST_ROWS = 64, 4
_HEADS_AT_ONCE = 16  # heads of one piece of work


class Job(NamedTuple):
    """One kernel matrix to fill: factors of ``first`` against factors of ``second`` where ``needed`` is true."""

    first: Key
    second: Key
    needed: np.ndarray


class Piece(NamedTuple):
    """A rectangle of one job's kernel matrix, and the array its values go to."""

    job: Job
    total: np.ndarray
    rows: slice
    columns: slice


def route_cost(shapes: Mapping[Key, tuple[int, int, int]], jobs: Iterable[Job]) -> dict[Route, float]:
    """Floating-point operations of each route, for factors of shapes (n, p, q).

    >>> job = Job("O", "Q", np.ones((144, 144), dtype=bool))
    >>> cost = route_cost({"O": (144, 768, 64), "Q": (144, 768, 64)}, [job])
    >>> round(cost["direct"] / cost["gram"], 1)
    5.6
    """
    gram = float(sum(n * q * p**2 for n, p, q in shapes.values()))
    direct = 0.0
    for first, second, needed in jobs:
        pairs = float(np.count_nonzero(needed))
        (_, p, q), (_, _, q2) = shapes[first], shapes[second]
        gram += pairs * p**2
        direct += pairs * 2 * p * q * q2
    return {"gram": gram, "direct": direct}


def cheaper_route(shapes: Mapping[Key, tuple[int, int, int]], jobs: Iterable[Job]) -> Route:
    cost = route_cost(shapes, jobs)
    return "gram" if cost["gram"] < cost["direct"] else "direct"


def contract(
    factors: Mapping[Any, np.ndarray],
    jobs: Sequence[Job],
    *,
    route: Route | None = None,
    work_bytes: int = 256 * 2**20,
    device: str = "cpu",
    tick: Callable[[float], None] = lambda share: None,
) -> list[np.ndarray]:
    """The kernel matrix of each job, float64, NaN outside its needed entries.

    factors: (n, p, q) arrays; two that are compared share p, q may differ.
    work_bytes: memory for intermediate arrays, besides factors and results.
    device: ``cpu`` works in numpy; anything else names a torch device ("cuda", "mps", "torch:cpu").
    tick: told the share of the work done since the last call.
    """
    for first, second, needed in jobs:
        a, b = factors[first].shape, factors[second].shape
        if a[1] != b[1] or needed.shape != (a[0], b[0]):
            raise HeadspanError(f"factors of shapes {a} and {b} cannot be compared over a {needed.shape} pair set")
    shapes = {key: factor.shape for key, factor in factors.items()}
    if route is None:
        route = cheaper_route(shapes, jobs)  # type: ignore[arg-type]
    totals = [np.zeros(job.needed.shape) for job in jobs]
    run = _gram_route if route == "gram" else _direct_route
    sizes = sorted({factors[job.first].shape[1] for job in jobs})  # one, but for Linear CKA of unequal heads
    with _backend(device) as backend:
        for size in sizes:
            mine = {
                k: backend.to_device(np.ascontiguousarray(f, dtype=np.float32))
                for k, f in factors.items()
                if f.shape[1] == size
            }
            chosen = [i for i, job in enumerate(jobs) if factors[job.first].shape[1] == size]
            for share in run(backend, mine, [jobs[i] for i in chosen], [totals[i] for i in chosen], work_bytes):
                tick(share / len(sizes))
    for total, job in zip(totals, jobs, strict=True):
        np.maximum(total, 0.0, out=total)  # a sum of squares: only rounding can make it negative
        total[~job.needed] = np.nan
    return totals


def rectangles(needed: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Rectangles that cover the needed entries: groups of columns, each with the rows it needs.

    For forward pairs in layer order this is a staircase, and little outside the pair set is computed.
    """
    width = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, needed.shape[1] // 6))
    for columns in _parts(needed.shape[1], width):
        rows = np.flatnonzero(needed[:, columns].any(axis=1))
        if rows.size:
            yield slice(int(rows[0]), int(rows[-1]) + 1), columns


def _pieces(jobs: Sequence[Job], totals: Sequence[np.ndarray], most_rows: int) -> list[Piece]:
    """Independent pieces of work, the largest first so that no core waits long for another at the end."""
    pieces = [
        Piece(job, total, slice(rows.start + part.start, rows.start + part.stop), columns)
        for job, total in zip(jobs, totals, strict=True)
        for rows, columns in rectangles(job.needed)
        for part in _parts(rows.stop - rows.start, most_rows)
    ]
    return sorted(pieces, key=lambda p: (p.rows.start - p.rows.stop) * (p.columns.stop - p.columns.start))


def _gram_route(
    backend: Backend, factors: Mapping[Key, Any], jobs: Sequence[Job], totals: list[np.ndarray], work_bytes: int
) -> Iterator[float]:
    xp = backend.xp
    pieces = _pieces(jobs, totals, _MOST_SOURCES)
    size = next(iter(factors.values())).shape[1]
    heads = sum(factor.shape[0] for factor in factors.values())
    at_once = min(size, _MOST_ROWS, max(_LEAST_ROWS, work_bytes // max(1, 4 * heads * size)))
    slices = [(key, part) for key, factor in factors.items() for part in _parts(factor.shape[0], _HEADS_AT_ONCE)]
    buffers = {key: xp.empty(f.shape[0] * at_once * size, dtype=f.dtype, device=f.device) for key, f in factors.items()}
    for rows in _parts(size, at_once):
        # The square block holds each of its off-diagonal entries twice; the rectangle beside it once, so it counts 2.
        for weight, columns in ((1.0, rows), (2.0, slice(rows.stop, size))):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            if shape[1] == 0:
                continue
            grams = {
                key: xp.reshape(buffers[key][: f.shape[0] * shape[0] * shape[1]], (f.shape[0], *shape))
                for key, f in factors.items()
            }
            backend.for_each(partial(_fill_grams, xp, factors, grams, rows, columns), slices)
            backend.for_each(partial(_add_products, backend, grams, weight), pieces)
        yield ((size - rows.start) ** 2 - (size - rows.stop) ** 2) / size**2


def _fill_grams(
    xp: Any, factors: Mapping[Key, Any], grams: Mapping[Key, Any], rows: slice, columns: slice, item: tuple[Key, slice]
) -> None:
    """Entries [rows, columns] of F Fᵀ for some heads of one factor array."""
    key, part = item
    factor = factors[key][part]
    xp.matmul(factor[:, rows, :], xp.matrix_transpose(factor[:, columns, :]), out=grams[key][part])


def _add_products(backend: Backend, grams: Mapping[Key, Any], weight: float, piece: Piece) -> None:
    """Inner products of these Gram entries for one rectangle of pairs; no two items write to the same place."""
    job, total, r, c = piece
    first, second = (backend.xp.reshape(grams[key], (grams[key].shape[0], -1)) for key in (job.first, job.second))
    total[r, c] += weight * backend.to_numpy(first[r] @ second[c].T)


def _direct_route(
    backend: Backend, factors: Mapping[Key, Any], jobs: Sequence[Job], totals: list[np.ndarray], work_bytes: int
) -> Iterator[float]:
    xp = backend.xp
    share = work_bytes // cores()

    def multiply(piece: Piece) -> None:
        job, total, r, c = piece
        first, second = factors[job.first][r], factors[job.second][c]
        p, q, q2 = first.shape[1], first.shape[2], second.shape[2]
        # Columns of all the target heads side by side, times the columns of one source head after another.
        right = xp.reshape(xp.permute_dims(second, (1, 0, 2)), (p, -1))
        step = max(1, share // (12 * q * right.shape[1]))
        for part in _parts(first.shape[0], step):
            left = xp.reshape(xp.matrix_transpose(first[part]), (-1, p))
            product = xp.reshape(xp.matmul(left, right), (part.stop - part.start, q, second.shape[0], q2))
            sums = xp.sum(xp.sum(product * product, axis=3), axis=1)
            total[r.start + part.start : r.start + part.stop, c] = backend.to_numpy(sums)

    pieces = _pieces(jobs, totals, _HEADS_AT_ONCE)
    for some in _parts(len(pieces), 4 * cores()):
        backend.for_each(multiply, pieces[some])
        yield (some.stop - some.start) / len(pieces)


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class Backend(NamedTuple):
    """An array namespace, the ways to its device and back, and how to run independent pieces of work."""

    xp: Any
    to_device: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    for_each: Callable[[Callable[[Any], None], Sequence[Any]], object]


@contextmanager
def _backend(device: str) -> Iterator[Backend]:
    if device == "cpu":
        with team() as pool:  # numpy 2 speaks the array API itself
            yield Backend(np, lambda a: a, lambda a: a, lambda function, items: deque(pool.map(function, items), 0))
        return
    try:
        import array_api_compat.torch as xp
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"the device {device}") from None
    name = device.removeprefix("torch:")
    try:
        place = torch.device(name)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise HeadspanError(f"the device {device!r} cannot be used here ({reason}): choose cpu, cuda or mps") from None
    # The device is parallel by itself: one piece after another.
    yield Backend(
        xp,
        lambda a: torch.from_numpy(a).to(place),
        lambda t: t.cpu().numpy(),
        lambda function, items: deque(map(function, items), 0),
    )
