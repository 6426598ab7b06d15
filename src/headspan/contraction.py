"""‖F_AᵀF_B‖_F² for all pairs of factors at once, by the cheaper of two routes (SPEC §2).

*Direct*: multiply the factors, square, and sum each block: 2·p·q·q' operations a pair for factors of p×q and p×q'.

*Gram*: ‖F_AᵀF_B‖_F² = ⟨F_AF_Aᵀ, F_BF_Bᵀ⟩, so all pairs are one matrix product of flattened Gram matrices. They are
symmetric: half of each is enough, p² operations a pair, and q·p² for making one. They are never held whole: rows
r₀…r₁ of all of them are made, multiplied, added up and forgotten. Of these rows the columns r₀…r₁ form a square that
counts once, and the columns from r₁ on a rectangle that counts twice.

Products are float32, sums over row chunks float64. Arrays may be of numpy or of torch on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from headspan.errors import HeadspanError

Route = Literal["gram", "direct"]
Key = Hashable

# Products narrower than this waste the processor; wider ones compute more pairs than the pair set needs.
_COLUMN_GROUP = 48
_MOST_ROWS, _LEAST_ROWS = 64, 4


class Job(NamedTuple):
    """One kernel matrix to fill: factors of ``first`` against factors of ``second`` where ``needed`` is true."""

    first: Key
    second: Key
    needed: np.ndarray


def route_cost(shapes: Mapping[Key, tuple[int, int, int]], jobs: Sequence[Job]) -> dict[Route, float]:
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


def cheaper_route(shapes: Mapping[Key, tuple[int, int, int]], jobs: Sequence[Job]) -> Route:
    cost = route_cost(shapes, jobs)
    return "gram" if cost["gram"] < cost["direct"] else "direct"


def contract(
    factors: Mapping[Key, np.ndarray],
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
    xp, to_device, to_numpy = _backend(device)
    on_device = {key: to_device(np.ascontiguousarray(f, dtype=np.float32)) for key, f in factors.items()}
    totals = [np.zeros(job.needed.shape) for job in jobs]
    run = _gram_route if route == "gram" else _direct_route
    sizes = sorted({factors[job.first].shape[1] for job in jobs})  # one, but for Linear CKA of unequal heads
    for size in sizes:
        chosen = [i for i, job in enumerate(jobs) if factors[job.first].shape[1] == size]
        mine = {key: factor for key, factor in on_device.items() if factor.shape[1] == size}
        for share in run(xp, to_numpy, mine, [jobs[i] for i in chosen], [totals[i] for i in chosen], work_bytes):
            tick(share / len(sizes))
    for total, job in zip(totals, jobs, strict=True):
        np.maximum(total, 0.0, out=total)  # a sum of squares: only rounding can make it negative
        total[~job.needed] = np.nan
    return totals


def rectangles(needed: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Rectangles that cover the needed entries: groups of columns, each with the rows it needs.

    For forward pairs in layer order this is a staircase, and little outside the pair set is computed.
    """
    for start in range(0, needed.shape[1], _COLUMN_GROUP):
        columns = slice(start, min(start + _COLUMN_GROUP, needed.shape[1]))
        rows = np.flatnonzero(needed[:, columns].any(axis=1))
        if rows.size:
            yield slice(int(rows[0]), int(rows[-1]) + 1), columns


def _gram_route(
    xp: Any, to_numpy: Any, factors: Mapping[Key, Any], jobs: Sequence[Job], totals: list[np.ndarray], work_bytes: int
) -> Iterator[float]:
    covers = [list(rectangles(job.needed)) for job in jobs]
    size = next(iter(factors.values())).shape[1]
    heads = sum(factor.shape[0] for factor in factors.values())
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, work_bytes // max(1, 4 * heads * size)))
    for low in range(0, size, rows):
        high = min(low + rows, size)
        # The square block counts each off-diagonal entry twice by itself; the rectangle beside it once, so twice.
        for weight, columns in ((1.0, slice(low, high)), (2.0, slice(high, size))):
            if columns.start == columns.stop:
                continue
            grams = {key: _flat_gram(xp, factor, slice(low, high), columns) for key, factor in factors.items()}
            for job, total, cover in zip(jobs, totals, covers, strict=True):
                first, second = grams[job.first], grams[job.second]
                for r, c in cover:
                    total[r, c] += weight * to_numpy(xp.matmul(first[r], xp.matrix_transpose(second[c])))
        yield ((size - low) ** 2 - (size - high) ** 2) / size**2


def _flat_gram(xp: Any, factor: Any, rows: slice, columns: slice) -> Any:
    """Entries [rows, columns] of F Fᵀ for each head, flattened: (n, rows·columns)."""
    block = xp.matmul(factor[:, rows, :], xp.matrix_transpose(factor[:, columns, :]))
    return xp.reshape(block, (factor.shape[0], -1))


def _direct_route(
    xp: Any, to_numpy: Any, factors: Mapping[Key, Any], jobs: Sequence[Job], totals: list[np.ndarray], work_bytes: int
) -> Iterator[float]:
    work = [(job, total, r, c) for job, total in zip(jobs, totals, strict=True) for r, c in rectangles(job.needed)]
    everything = sum((r.stop - r.start) * (c.stop - c.start) for _, _, r, c in work) or 1
    for job, total, r, c in work:
        first, second = factors[job.first], factors[job.second]
        p, q, q2 = first.shape[1], first.shape[2], second.shape[2]
        # All columns of the target heads side by side; the source heads in slices that fit the memory.
        right = xp.reshape(xp.permute_dims(second[c], (1, 0, 2)), (p, -1))
        step = max(1, work_bytes // (8 * q * right.shape[1]))
        for start in range(r.start, r.stop, step):
            part = slice(start, min(start + step, r.stop))
            n = part.stop - part.start
            left = xp.reshape(xp.matrix_transpose(first[part]), (n * q, p))
            product = xp.reshape(xp.matmul(left, right), (n, q, c.stop - c.start, q2))
            total[part, c] = to_numpy(xp.sum(xp.sum(product * product, axis=3), axis=1))
            yield n * (c.stop - c.start) / everything


def _backend(device: str) -> tuple[Any, Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]:
    """The array namespace of a device, and the ways there and back."""
    if device == "cpu":
        import array_api_compat.numpy as xp

        return xp, lambda array: array, lambda array: array
    try:
        import array_api_compat.torch as xp
        import torch
    except ImportError:
        from headspan.errors import missing_extra

        raise missing_extra("torch", "torch", f"the device {device}") from None
    name = device.removeprefix("torch:")
    try:
        place = torch.device(name)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise HeadspanError(f"the device {device!r} cannot be used here ({reason}): choose cpu, cuda or mps") from None
    return xp, lambda array: torch.from_numpy(array).to(place), lambda tensor: tensor.cpu().numpy()
