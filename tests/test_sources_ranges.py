"""Hub models read by byte ranges: what is read, which failures are survived, and that versions are never mixed."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from range_hub import REPO, Hub, repository, run, scores_are_right, tensors


def assert_changed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2 and "changed on the hub" in done.stderr


def test_only_attention_is_read_and_the_numbers_are_those_of_the_files(hub: Hub, home: Path) -> None:
    size = len(hub.files["model.safetensors"])
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files)
    read = sum(end - begin for _, begin, end in hub.sent)
    assert not hub.whole and read < 0.6 * size
    before = len(hub.sent)
    assert run(hub, home).returncode == 0 and len(hub.sent) == before  # everything is there
    assert not list((home / "hf").rglob("*model.safetensors*"))


def test_two_shards_of_which_each_is_read_in_part(hub: Hub, home: Path) -> None:
    hub.files = repository(shards=2)
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)
    assert {name for name, _, _ in hub.sent} == {n for n in hub.files if n.endswith(".safetensors")} and not hub.whole


def test_whole_files_where_they_are_wanted(hub: Hub, home: Path) -> None:
    words = ("score", REPO, "--out", "r.safetensors", "--metric", "pk", "--pairing", "flow", "--download")
    assert run(hub, home, *words).returncode == 0
    assert hub.whole == ["model.safetensors"] and not hub.sent
    assert scores_are_right(home, hub.files)
    assert run(hub, home).returncode == 0 and not hub.sent  # the whole file serves later runs too


@pytest.mark.parametrize("how", ["no ranges", "no etags"])
def test_a_server_whose_files_can_only_be_read_whole_sends_each_once(hub: Hub, home: Path, how: str) -> None:
    hub.ranges, hub.etags = how != "no ranges", "sha256" if how == "no ranges" else "none"
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)
    # What was asked for first is left where it is: a few buffers full of it at most.
    assert hub.whole_bytes < 1.7 * len(hub.files["model.safetensors"])


@pytest.mark.parametrize("code", [200, 416])
def test_a_server_that_stops_sending_ranges_is_asked_for_the_whole_file(hub: Hub, home: Path, code: int) -> None:
    hub.stops = 1, code
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files) and "model.safetensors" in hub.whole


def test_the_whole_file_must_be_the_one_whose_ranges_were_read(hub: Hub, home: Path) -> None:
    hub.stops, hub.later = (1, 416), repository(seed=1)
    assert_changed(run(hub, home))
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


def test_several_files_are_asked_at_once_for_their_headers_and_for_tensors(hub: Hub, home: Path) -> None:
    hub.files, hub.together = repository(shards=3), threading.Barrier(3)
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert sum(begin < 1 << 21 for _, begin, _ in hub.sent) == 6 and not hub.alone
    assert scores_are_right(home, hub.files)


def test_a_missing_shard_is_named(hub: Hub, home: Path) -> None:
    hub.files = repository(shards=2)
    del hub.files["model-00002-of-00002.safetensors"]
    done = run(hub, home)
    assert done.returncode == 2 and "model-00002-of-00002.safetensors of the hub model" in done.stderr
    assert "there is no such file" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("how", ["503", "429", "drop"])
@pytest.mark.parametrize("what", ["model.safetensors", "config.json"])
def test_file_metadata_is_requested_from_the_hub_again(hub: Hub, home: Path, what: str, how: str) -> None:
    hub.trouble = {what: [how, how]}
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files) and not hub.trouble[what]


def test_a_busy_hub_is_asked_again_for_its_list_of_files(hub: Hub, home: Path) -> None:
    hub.trouble = {REPO: ["503", "429"]}
    assert run(hub, home).returncode == 0


def test_an_answer_that_does_not_say_how_large_the_file_is_will_do(hub: Hub, home: Path) -> None:
    hub.total = False
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


@pytest.mark.parametrize("trouble", [{"drops": 3}, {"busy": 3}, {"expired": 2}, {"delay": 0.2, "drops": 1}])
def test_trouble_on_the_way_is_overcome(hub: Hub, home: Path, trouble: dict[str, float]) -> None:
    for name, value in trouble.items():
        setattr(hub, name, value)
    done = run(hub, home)
    assert done.returncode == 0, done.stderr
    assert scores_are_right(home, hub.files)


def test_a_run_that_gives_up_leaves_what_came(hub: Hub, home: Path) -> None:
    hub.drops = 10**6
    done = run(hub, home)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "kept: run again" in done.stderr and "Traceback" not in done.stderr
    hub.drops = 0
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


@pytest.mark.parametrize("size", ["same", "other"])
def test_a_file_that_changes_in_between_is_refused(hub: Hub, home: Path, size: str) -> None:
    later = repository(seed=1)
    if size == "other":
        later["model.safetensors"] = save(tensors(1) | {"more": np.zeros(10, np.float32)})
    hub.later = later
    assert_changed(run(hub, home))
    assert not (home / "r.safetensors").exists()
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, later)


@pytest.mark.parametrize("redirect", [True, False])
def test_a_file_that_changes_before_its_first_range_is_refused(hub: Hub, home: Path, redirect: bool) -> None:
    hub.redirect, hub.store = redirect, repository(seed=1)
    assert_changed(run(hub, home))
    assert not list((home / "ours").rglob("0*"))
    hub.store = None
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files)


@pytest.mark.parametrize("etags", ["md5", "xet"])
def test_other_kinds_of_etags_of_the_store_are_not_a_change(hub: Hub, home: Path, etags: str) -> None:
    hub.etags = etags
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.files) and not hub.whole


@pytest.mark.parametrize("etags", ["md5", "xet"])
def test_a_file_that_is_here_to_the_last_byte_is_what_the_hub_says(hub: Hub, home: Path, etags: str) -> None:
    small = [save({"a": np.full(4, value, np.float32)}) for value in (0, 1)]
    hub.etags, hub.files["model.safetensors"], hub.store = etags, small[0], {"model.safetensors": small[1]}
    assert_changed(run(hub, home))
    assert not list((home / "ours").rglob("0*"))


def test_parts_of_two_runs_are_of_one_version(hub: Hub, home: Path) -> None:
    hub.etags, hub.stops = "md5", (2, 400)
    done = run(hub, home)
    assert done.returncode == 2 and "answer 400" in done.stderr
    hub.stops, hub.store = None, repository(seed=1)
    before = len(hub.sent)
    assert_changed(run(hub, home))
    assert len(hub.sent) > before  # the first run left something to ask for
    assert run(hub, home).returncode == 0
    assert scores_are_right(home, hub.store)  # nothing of the first run


def test_a_private_model_needs_the_token_and_only_the_hub_hears_it(hub: Hub, home: Path) -> None:
    hub.token = "hf_secret"
    refused = run(hub, home)
    assert refused.returncode == 2 and "private" in refused.stderr
    assert run(hub, home, HF_TOKEN="hf_secret").returncode == 0
    assert scores_are_right(home, hub.files)
    assert not hub.leaked


def test_without_a_network_the_cache_serves(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    (home / "r.safetensors").unlink()
    assert run(hub, home, HF_HUB_OFFLINE="1").returncode == 0
    assert scores_are_right(home, hub.files)
    part = next(path for path in (home / "ours" / "ranges").rglob("0000000*"))
    part.unlink()
    done = run(hub, home, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "not in the local cache" in done.stderr


def test_damaged_and_foreign_parts_are_fetched_again(hub: Hub, home: Path) -> None:
    assert run(hub, home).returncode == 0
    parts = sorted(path for path in (home / "ours" / "ranges").rglob("0000000*"))
    content = bytearray(parts[1].read_bytes())
    content[1000] ^= 1
    parts[1].write_bytes(content)
    parts[2].write_bytes(parts[3].read_bytes())  # a sound part in a wrong place
    parts[0].write_bytes(b"")
    before = len(hub.sent)
    assert run(hub, home).returncode == 0
    assert len(hub.sent) > before
    assert scores_are_right(home, hub.files)
