"""The files of laps on disks that do not take them; what stands in them is in test_measured.py."""

import pytest
from full_disk import fill, small_disk

from howdah.sim.laps import Lap, Laps, read_laps, write_laps


def laps(count):
    return Laps("single x1", "here", [Lap(number, 0.0) for number in range(count)])


def test_a_draft_is_removed_when_it_cannot_take_its_place(tmp_path):
    (tmp_path / "rank-0.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_laps(tmp_path, 0, laps(1))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_a_file_in_the_place_of_the_folder_is_an_oserror(tmp_path):
    (tmp_path / "trace").write_text("")
    with pytest.raises(OSError, match="File exists"):
        write_laps(tmp_path / "trace", 0, laps(1))


@pytest.mark.root
def test_on_a_full_disk_the_earlier_laps_stay(tmp_path):
    with small_disk(tmp_path, 64 << 10):
        write_laps(tmp_path, 0, laps(2))
        fill(tmp_path)
        with pytest.raises(OSError, match="No space left on device"):
            write_laps(tmp_path, 0, laps(1000))
        assert read_laps(tmp_path, "single x1", 1) == [laps(2)]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["filler", "rank-0.json"]
