"""‖F_AᵀF_B‖_F² for all pairs of factors at once, by the cheaper of two routes.

*Direct*: multiply the factors, square, and sum each block: 2·p·q·q' operations per pair for factors of p×q and p×q'.

*Gram*: ‖F_AᵀF_B‖_F² = ⟨F_AF_Aᵀ, F_BF_Bᵀ⟩, so all pairs are one matrix product of flattened Gram matrices. They are
symmetric, so half of each is enough: p² operations per pair, and q·p² to compute one. They are never stored completely:
one block of entries of all of them is computed, multiplied, added and discarded while another core does the next block.
Blocks on the diagonal count once, those above it twice.

Factors are stored transposed, (n, q, p): BLAS makes Gram matrices fastest this way, and the direct route copies none.

Products are float32; sums over blocks are float64, nearly exact, so that their order does not matter. Arrays may be
numpy arrays, or torch tensors that stay on their device until the end. (A device without float64 sums in float32.)

A torch device can multiply in bfloat16 ("cuda+bf16"), which has a relative error of at most u = 2⁻⁹. With two
numbers and their sum rounded, a kernel K of factors with Gram matrices G has an error of at most 3u‖G_A‖‖G_B‖ by the
Gram route (0.006·√(m·m') for PK), and of about 6u·√K·‖F_A‖‖F_B‖ by the direct route; typical errors are far smaller.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import numpy as np

from headspan.scoring.arrangement import Job, Key, Rectangle, arrange, length, moved, rectangles, taken_apart
from headspan.system.threads import cores, team
from headspan.vocabulary.errors import HeadspanError, missing_extra

Route = Literal["gram", "direct"]

_BLOCK = 256, 256  # largest block of Gram entries, rows and columns; larger ones do not fit in the cache
_PADDING = 16  # numbers between heads: rows at a power-of-two distance evict each other from the cache
_FEWEST_ROWS = 8
_DIAGONAL = 48  # rows of a square on the diagonal, whose lower half is not needed
_BLOCKS_A_CORE = 4  # at least this many rows of blocks, so that the cores finish at about the same time
_SMALL_KERNEL = 1e-5  # above it, an error of 6e-8 in a kernel is an error of at most 1e-5 in its square root
_HEADS_AT_ONCE, _COLUMNS_AT_ONCE = 16, 192  # heads per task of the direct route


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
    rooted: bool = False,
    tick: Callable[[float], None] = lambda share: None,
) -> list[np.ndarray]:
    """The kernel matrix of each job, float64, NaN outside its needed entries.

    factors: (n, p, q) arrays; arrays that are compared have the same p; q may differ.
    work_bytes: memory for intermediate arrays, in addition to factors and results.
    device: ``cpu`` uses numpy; anything else names a torch device ("cuda", "mps", "torch:cpu"), followed by "+bf16"
        for products in bfloat16.
    rooted: scores are square roots of the kernels, and factors have norm 1; small kernels then need relative accuracy.
    tick: called with the fraction of the work done since the last call.
    """
    for first, second, needed in jobs:
        a, b = factors[first].shape, factors[second].shape
        if a[1] != b[1] or needed.shape != (a[0], b[0]):
            raise HeadspanError(f"factors of shapes {a} and {b} cannot be compared over a {needed.shape} pair set")
    shapes = {key: factor.shape for key, factor in factors.items()}
    if route is None:
        route = cheaper_route(shapes, jobs)  # type: ignore[arg-type]
    run = _gram_route if route == "gram" else _direct_route
    sizes = sorted({factors[job.first].shape[1] for job in jobs})  # one, except for Linear CKA of unequal heads
    totals: dict[int, np.ndarray] = {}
    with _backend(device) as backend:
        for size in sizes:
            mine = {
                k: backend.to_device(np.ascontiguousarray(f.transpose(0, 2, 1), dtype=np.float32))
                for k, f in factors.items()
                if f.shape[1] == size
            }
            chosen = [i for i, job in enumerate(jobs) if factors[job.first].shape[1] == size]
            found = run(backend, mine, [jobs[i] for i in chosen], work_bytes, lambda share: tick(share / len(sizes)))
            totals |= zip(chosen, found, strict=True)
            if rooted and route == "gram":
                _make_small_again(backend, mine, {i: jobs[i] for i in chosen}, totals, work_bytes)
    for i, job in enumerate(jobs):
        np.maximum(totals[i], 0.0, out=totals[i])  # a sum of squares: only rounding can make it negative
        totals[i][~job.needed] = np.nan
    return [totals[i] for i in range(len(jobs))]


def _make_small_again(
    backend: Backend,
    factors: Mapping[Key, Any],
    jobs: Mapping[int, Job],
    totals: dict[int, np.ndarray],
    work_bytes: int,
) -> None:
    """Compute small kernels again by the direct route, which sums squares and so cannot cancel.

    The Gram route has an absolute error of about 1e-7, whose square root would be a large error in a score near 0.
    Trained models have few such pairs, if any.
    """
    again = {i: Job(*job[:2], job.needed & (totals[i] < _SMALL_KERNEL)) for i, job in jobs.items()}
    again = {i: job for i, job in again.items() if job.needed.any()}
    if again:
        made = _direct_route(backend, factors, list(again.values()), work_bytes, lambda share: None)
        for (i, job), kernels in zip(again.items(), made, strict=True):
            np.copyto(totals[i], kernels, where=job.needed)


def _gram_route(
    backend: Backend, factors: Mapping[Key, Any], jobs: Sequence[Job], work_bytes: int, tick: Callable[[float], None]
) -> list[np.ndarray]:
    xp, one = backend.xp, next(iter(factors.values()))
    arrangement = arrange({key: factor.shape[0] for key, factor in factors.items()}, jobs)
    runs, size = list(arrangement.runs), one.shape[2]
    heads = sum(map(len, arrangement.places.values()))
    sums = [backend.zeros((length(rows), length(columns))) for rows, columns in arrangement.pieces]
    blocks = _blocks(size, work_bytes // ((4 + backend.extra) * max(1, heads) * backend.workers), backend.workers)
    entries = max((length(rows) * length(columns) for rows, columns in blocks), default=0)
    buffers: SimpleQueue[Any] = SimpleQueue()  # one per core
    for _ in range(backend.workers):
        buffers.put(xp.empty(heads * (entries + _PADDING), dtype=one.dtype, device=one.device))
    adding = threading.Lock()

    def add(block: tuple[slice, slice]) -> float:
        mine = buffers.get()
        try:
            return add_with(mine, *block)
        finally:
            buffers.put(mine)

    def add_with(mine: Any, rows: slice, columns: slice) -> float:
        """Add the inner products of these Gram entries for all pairs; return their fraction of all entries."""
        shape, times = (length(rows), length(columns)), 1 if rows == columns else 2
        count = math.prod(shape)
        grams = xp.reshape(mine[: heads * (count + _PADDING)], (heads, -1))[:, :count]
        blocks = xp.reshape(grams, (heads, *shape))
        for key, own, place in runs:
            factor = factors[key][own]
            xp.matmul(xp.matrix_transpose(factor[:, :, rows]), factor[:, :, columns], out=blocks[place])
        grams = backend.rounded(grams)
        for piece, total in zip(arrangement.pieces, sums, strict=True):
            product = backend.widened(grams[piece.rows] @ grams[piece.columns].T)
            product *= times
            with adding:
                total += product
        return times * math.prod(shape) / size**2

    for share in backend.map(add, blocks):
        tick(share)
    return taken_apart(arrangement, [backend.to_numpy(total) for total in sums], jobs)


def _blocks(size: int, entries: int, workers: int) -> list[tuple[slice, slice]]:
    """Blocks of limited size that cover the upper triangle of a Gram matrix, the largest first.

    The triangle is halved recursively: two smaller triangles, and a square between them that is cut to size.
    """
    most_rows, most_columns = _BLOCK
    height = max(1, min(most_rows, max(_FEWEST_ROWS, size // (_BLOCKS_A_CORE * workers)), math.isqrt(entries)))
    width = max(1, min(most_columns, entries // height))
    found: list[tuple[slice, slice]] = []
    triangles = [slice(0, size)]
    while triangles:
        rows = triangles.pop()
        if length(rows) <= max(1, min(_DIAGONAL, height)):
            found.append((rows, rows))
            continue
        middle = (rows.start + rows.stop) // 2
        triangles += [slice(rows.start, middle), slice(middle, rows.stop)]
        found += [(r, c) for r in _parts(middle, height, rows.start) for c in _parts(rows.stop, width, middle)]
    return sorted(found, key=lambda block: -length(block[0]) * length(block[1]))


def _direct_route(
    backend: Backend, factors: Mapping[Key, Any], jobs: Sequence[Job], work_bytes: int, tick: Callable[[float], None]
) -> list[np.ndarray]:
    xp = backend.xp
    share = work_bytes // backend.workers
    totals = [backend.zeros(job.needed.shape) for job in jobs]

    def multiply(piece: tuple[Job, Any, Rectangle]) -> None:
        job, total, (r, c) = piece
        first, second = factors[job.first][r], factors[job.second][c]
        q, q2, p = first.shape[1], second.shape[1], first.shape[2]
        # The columns of all target heads side by side, times the columns of each source head in turn.
        right = backend.rounded(xp.reshape(second, (-1, p)).T)
        step = max(1, share // ((12 + backend.extra) * q * right.shape[1]))
        for part in _parts(first.shape[0], step):
            left = backend.rounded(xp.reshape(first[part], (-1, p)))
            product = backend.widened(xp.matmul(left, right))
            product = xp.reshape(product, (part.stop - part.start, q, second.shape[0], q2))
            sums = xp.sum(xp.sum(product * product, axis=3), axis=1)
            total[moved(part, r.start), c] = sums

    pieces = [
        (job, total, area)
        for job, total in zip(jobs, totals, strict=True)
        for area in rectangles(job.needed, _HEADS_AT_ONCE, _COLUMNS_AT_ONCE)
    ]
    for _ in backend.map(multiply, pieces):
        tick(1 / len(pieces))
    return [np.asarray(backend.to_numpy(total), dtype=np.float64) for total in totals]


def _parts(stop: int, size: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


class Backend(NamedTuple):
    """An array namespace, the transfers to its device and back, and how to run independent tasks."""

    xp: Any
    zeros: Callable[[tuple[int, ...]], Any]
    to_device: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    map: Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
    workers: int  # tasks that run at the same time
    rounded: Callable[[Any], Any] = lambda a: a  # to the type that products use
    widened: Callable[[Any], Any] = lambda a: a  # and back
    extra: int = 0  # bytes of a rounded number


@contextmanager
def _backend(device: str) -> Iterator[Backend]:
    name, *precision = device.removeprefix("torch:").split("+")
    if precision not in ([], ["bf16"]) or device == "cpu+bf16":
        raise HeadspanError(
            f"unknown device {device!r}. Choose cpu, cuda or mps; cuda+bf16 multiplies in bfloat16 (torch:cpu+bf16 on "
            "the processor)"
        )
    if device == "cpu":
        with team() as pool:  # numpy 2 implements the array API
            yield Backend(np, np.zeros, lambda a: a, lambda a: a, pool.map, cores())
        return
    try:
        import array_api_compat.torch as xp
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"the device {device}") from None
    try:
        place = torch.device(name)
        torch.zeros(1, device=place).cpu()  # there and back: "meta" tensors have no data
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:120]
        raise HeadspanError(f"the device {device!r} cannot be used here ({reason}). Choose cpu, cuda or mps") from None
    # The device is parallel itself, so tasks run one after another.
    dtype = torch.float32 if place.type == "mps" else torch.float64
    backend = Backend(
        xp,
        lambda shape: torch.zeros(shape, dtype=dtype, device=place),
        lambda a: torch.from_numpy(a).to(place),
        lambda t: t.cpu().numpy(),
        map,
        1,
    )
    if precision:
        backend = backend._replace(
            rounded=lambda t: t.to(torch.bfloat16), widened=lambda t: t.to(torch.float32), extra=2
        )
    yield backend
