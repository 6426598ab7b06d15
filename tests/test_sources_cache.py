"""Parts of hub models on this machine: the command that shows and clears them, and their limit."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from headspan.checkpoints.hub.chunks import locked
from local_hub import serving
from range_hub import REPO, Hub, repository, run, scores_are_right


def bytes_in(folder: Path) -> int:
    """What parts take on disk, whole or half written; some may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder / "ranges"):
        for name in names:
            with suppress(OSError):
                total += 0 if name.endswith(".json") else os.stat(os.path.join(place, name)).st_size
    return total


def test_looking_and_clearing(hub: Hub, home: Path) -> None:
    assert "nothing is cached" in run(hub, home, "cache").stderr
    assert run(hub, home).returncode == 0
    (row,) = json.loads(run(hub, home, "cache", "--json").stdout)
    assert row["file"] == f"{REPO}/model.safetensors" and 0 < row["mb"] < row["of_mb"] and row["days_unused"] < 1
    folder = next(path for path in (home / "ours" / "ranges").iterdir() if path.is_dir())
    (folder / "mine.txt").write_text("not of the program")
    assert json.loads(run(hub, home, "cache", "elsewhere", "--json").stdout) == []
    run(hub, home, "cache", "WIDE", "--clear")
    assert sorted(path.name for path in folder.iterdir()) == ["headspan-ranges.json", "mine.txt"]
    (folder / "mine.txt").unlink()
    run(hub, home, "cache", "--clear")
    assert not list((home / "ours" / "ranges").iterdir())
    offline = run(hub, home, HF_HUB_OFFLINE="1")
    assert (
        offline.returncode == 2 and f"the weights of the hub model {REPO} are not in the local cache" in offline.stderr
    )


def test_the_title_counts_in_words_and_units_that_fit(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    listed = run(hub, home, "cache", HEADSPAN_CACHE_LIMIT="")
    assert re.match(r"partial hub files: 1 file, \d\.\d+ MB; the limit is 50 GB", listed.stdout)


def test_what_a_killed_run_left_is_counted_and_removed(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    before = bytes_in(home / "ours")
    folder = next(path for path in (home / "ours" / "ranges").iterdir() if path.is_dir())
    left = [folder / f".{'a' * 16}.tmp", folder.parent / f".{'b' * 16}.tmp"]
    for path in left:
        path.write_bytes(bytes(5_000_000))
    (row,) = json.loads(run(hub, home, "cache", "--json").stdout)
    assert round(row["mb"] * 1e6) == before + 5_000_000
    assert run(hub, home).returncode == 0 and all(path.exists() for path in left)  # somebody may be writing them
    for path in left:
        os.utime(path, (0, 0))
    assert run(hub, home).returncode == 0 and not any(path.exists() for path in left)


def test_the_cache_stays_under_its_limit(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    size = bytes_in(home / "ours")
    small = run(hub, home, HEADSPAN_CACHE_LIMIT="2MB", HEADSPAN_CACHE_DIR=str(home / "b"))
    assert small.returncode == 2 and "set HEADSPAN_CACHE_LIMIT to more" in small.stderr
    assert re.search(r"\d\.\d+ MB, .*limited to 2 MB", small.stderr)
    assert bytes_in(home / "b") <= 2_000_000
    hub.files = repository(seed=2)  # another content: the one that was not used for longest goes
    assert run(hub, home, HEADSPAN_CACHE_LIMIT=str(int(1.5 * size))).returncode == 0
    assert scores_are_right(home, hub.files)
    assert bytes_in(home / "ours") == size
    wrong = run(hub, home, "cache", HEADSPAN_CACHE_LIMIT="much")
    assert wrong.returncode == 2 and "not a size like 50GB" in wrong.stderr


def test_a_lower_limit_holds_where_everything_is_there(hub: Hub, home: Path) -> None:
    first = hub.files
    for hub.files in (repository(seed=2), first):
        assert run(hub, home).returncode == 0
    size, asked = bytes_in(home / "ours") // 2, len(hub.sent)
    assert run(hub, home, HEADSPAN_CACHE_LIMIT=str(size)).returncode == 0
    assert bytes_in(home / "ours") == size and len(hub.sent) == asked
    refused = run(hub, home, HEADSPAN_CACHE_LIMIT=str(size - 1))
    assert refused.returncode == 2 and "set HEADSPAN_CACHE_LIMIT to more" in refused.stderr


def test_what_is_read_on_the_way_counts_too(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    limit = bytes_in(home / "ours") + 1_000_000  # too little for the embedding, of which four more parts are needed
    done = run(hub, home, "tokens", REPO, "L0H0", "--role", "O", HEADSPAN_CACHE_LIMIT=str(limit))
    assert done.returncode == 2 and "set HEADSPAN_CACHE_LIMIT to more" in done.stderr
    assert bytes_in(home / "ours") <= limit


def test_two_processes_together_stay_under_the_limit(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(hub, home).returncode == 0
    limit, shared = int(1.2 * bytes_in(home / "ours")), home / "shared"
    homes, most = (home, home.with_name("other")), 0
    with serving(Hub(repository(seed=1))) as other, ThreadPoolExecutor(2) as pool:
        hub.delay = other.delay = 0.1
        settings = {"HEADSPAN_CACHE_DIR": str(shared), "HEADSPAN_CACHE_LIMIT": str(limit)}
        runs = [pool.submit(run, *who, **settings) for who in zip((hub, other), homes, strict=True)]
        monkeypatch.setenv("HEADSPAN_CACHE_DIR", str(shared))
        while not all(each.done() for each in runs):
            with locked():  # to see all folders at one moment
                most = max(most, bytes_in(shared))
            time.sleep(0.01)
        assert [each.result().returncode for each in runs] == [0, 0], [each.result().stderr for each in runs]
        assert all(scores_are_right(place, who.files) for place, who in zip(homes, (hub, other), strict=True))
    assert 0 < most <= limit and bytes_in(shared) <= limit
