"""The dashboard that the head's store keeps in Ray's folder for Grafana."""

import json
from pathlib import Path

import pytest

from raykv.actors.store import dashboard_keeper
from raykv.actors.store.dashboard_keeper import LOOK_S, DashboardKeeper
from raykv.metrics import dashboard_files
from raykv.metrics.dashboard import DASHBOARD, PANELS


class World:
    """The head with Ray's folder, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.head, self.asked = folder, 1000.0, True, 0
        monkeypatch.setenv(dashboard_files.FOLDER, str(folder))
        monkeypatch.setattr(dashboard_keeper.time, "monotonic", lambda: self.now)  # type: ignore[attr-defined]
        monkeypatch.setattr(dashboard_keeper, "_on_head", self.on_head)
        self.keeper = DashboardKeeper()

    def on_head(self) -> bool:
        self.asked += 1
        return self.head

    def look(self, after: float = LOOK_S) -> list[str]:
        """Have the keeper look after some seconds. Returns the names of files in the folder."""
        self.now += after
        self.keeper.look()
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "dashboards", monkeypatch)


def test_it_is_written_at_start_and_again_when_ray_wiped_the_folder(world: World) -> None:
    world.folder.mkdir()
    (world.folder / DASHBOARD).write_text("of an older version")
    assert world.look() == sorted(dashboard_files.NAMES)
    assert len(json.loads((world.folder / DASHBOARD).read_text())["panels"]) == len(PANELS)
    for name in dashboard_files.NAMES:
        (world.folder / name).unlink()
    assert world.look(LOOK_S - 1) == [], "it looks once a minute"
    assert world.look(1) == sorted(dashboard_files.NAMES)
    (world.folder / DASHBOARD).write_text("a user's")
    world.look()
    assert (world.folder / DASHBOARD).read_text() == "a user's" and world.asked == 1


def test_it_is_written_on_the_head_only(world: World) -> None:
    world.folder.mkdir()
    world.head = False
    assert world.look() == world.look() == [] and world.asked == 1


def test_a_folder_that_is_not_there_or_not_ours_does_no_harm(world: World) -> None:
    assert world.look() == [], "Ray runs without its dashboard"
    world.folder.mkdir()
    (world.folder / DASHBOARD).mkdir()  # so no file can be renamed to this name
    world.look()
    (world.folder / DASHBOARD).rmdir()
    assert set(dashboard_files.NAMES) <= set(world.look())
