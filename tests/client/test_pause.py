from pathlib import Path

import pytest

from client.pause import pause, paused, resume
from federation.errors import StorageError


def test_a_site_is_paused_until_it_resumes(tmp_path: Path) -> None:
    """Each command says whether it changed anything."""
    assert not paused(tmp_path)
    assert (pause(tmp_path), pause(tmp_path), paused(tmp_path)) == (True, False, True)
    assert (resume(tmp_path), resume(tmp_path), paused(tmp_path)) == (True, False, False)


def test_a_pause_that_cannot_be_ended_says_what_to_remove(tmp_path: Path) -> None:
    """A folder stands where the file should be."""
    (tmp_path / "paused").mkdir()
    with pytest.raises(StorageError) as refused:
        resume(tmp_path)
    assert "the site stays paused" in str(refused.value)
    assert f"remove {tmp_path / 'paused'}" in str(refused.value)
