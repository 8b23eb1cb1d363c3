"""Objects below a URL of this machine's own file system."""

from pathlib import Path

from rollback.ring.url.store import Store


def test_a_ring_in_a_directory_to_which_a_link_leads_takes_objects(tmp_path: Path) -> None:
    """A run directory follows none; where a URL leads is the operator's choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    store = Store(f"file://{tmp_path}/scratch/ring", patience=0.0)
    store.probe()
    store.put("record/x", b"there")
    assert (tmp_path / "disk/ring/record/x").read_bytes() == b"there"
