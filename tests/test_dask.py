"""A real scheduler and real worker processes; one of them is killed during the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.scoring.run import score

distributed = pytest.importorskip("distributed")


@pytest.mark.slow
def test_cluster_agrees_with_local_when_a_worker_is_killed(gpt2_dir: Path, tmp_path: Path) -> None:
    weights = hs.open(gpt2_dir)
    # Few heads' worth of memory: many tiles, so that some are under way when the worker dies.
    options = {"metrics": ["pk"], "pairings": "flow", "memory": "330MB"}
    here = score(weights, **options)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        killed = []

        def kill_after_the_first_tile(done: int, total: int) -> None:
            if not killed:
                os.kill(victim, signal.SIGKILL)
                killed.append(done)

        there = score(
            weights,
            **options,
            dask=cluster.scheduler_address,
            out=tmp_path / "r.safetensors",
            progress=kill_after_the_first_tile,
        )
    assert killed and here.provenance["blocks"]["pk"] > 2
    for key in here.arrays:
        np.testing.assert_allclose(there[key].values, here[key].values, rtol=1e-6)


@pytest.mark.slow
def test_local_cluster_and_folded_weights(tmp_path: Path) -> None:
    weights = hs.fold(hs.open("demo"))
    here, there = score(weights, "pk", "flow"), score(weights, "pk", "flow", dask="local")
    for key in here.arrays:
        np.testing.assert_array_equal(there[key].values, here[key].values)


def test_what_a_cluster_cannot_do_is_said() -> None:
    arrays = {role: np.random.default_rng(0).normal(size=(2, 2, 8, 3)) for role in "QKVO"}
    with pytest.raises(hs.HeadspanError, match="a path or hub id, not arrays"):
        score(hs.open(arrays), "pk", dask="local")
    with pytest.raises(hs.HeadspanError, match="no Dask scheduler answers"):
        score(hs.open("demo"), "pk", dask="nonsense")
