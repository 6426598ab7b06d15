"""How much memory there is: the machine's, and the limits of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headspan.errors import HeadspanError
from headspan.system import memory


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_limits_of_nested_groups_of_version_2(tmp_path: Path) -> None:
    mount, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("0::/outer/inner\n")
    group(mount / "outer", max=4000, current=3000, stat="anon 1\ninactive_file 500")
    group(mount / "outer" / "inner", max="max", current=100)
    assert memory._container_limits(groups, mount) == [(4000, 2500)]
    group(mount / "outer" / "inner", max=900, current=100)
    assert sorted(memory._container_limits(groups, mount)) == [(900, 100), (4000, 2500)]


def test_limits_of_version_1(tmp_path: Path) -> None:
    mount, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    # In a container the group of this process is mounted at the top under the host's name for it.
    group(mount / "memory", limit_in_bytes=7000, usage_in_bytes=2000, stat="total_inactive_file 1500")
    assert memory._container_limits(groups, mount) == [(7000, 500)]


@pytest.mark.parametrize("content", [None, "", "nonsense\n", "4:memory\n", "4:memory:/../../etc\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "self").write_text(content)
    assert memory._container_limits(tmp_path / "self", tmp_path / "cgroup") == []


def test_the_smallest_room_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_container_limits", list)
    assert memory.total_memory() == psutil.virtual_memory().total
    monkeypatch.setattr(memory, "_container_limits", lambda: [(2**30, 2**29), (2**31, 0)])
    assert (memory.total_memory(), memory.available_memory(), memory.default_memory()) == (2**30, 2**29, 2**28)
    monkeypatch.setattr(memory, "_container_limits", lambda: [(10, 20)])
    assert (memory.available_memory(), memory.default_memory()) == (0, 1)


@pytest.mark.parametrize("text", ["1e400", "-1", "9" * 400, "nan", "inf", "", "2 XB", "1.2.3GB", True, None, "0x10"])
def test_what_is_no_amount_of_memory(text: object) -> None:
    with pytest.raises(HeadspanError, match="is not an amount of memory"):
        memory.parse_memory(text)  # type: ignore[arg-type]
