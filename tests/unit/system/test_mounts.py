from pathlib import Path

from rollback.system.mounts import mount_of

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /mnt/with\\040space rw shared:2 - nfs4 server:/export rw
31 22 0:26 / /mnt rw - xfs /dev/sdb rw
33 22 0:28 / /srv/données\udcff rw - nfs4 server:/data rw
32 31 0:27 / /mnt rw - tmpfs over rw
not a mount
"""


def test_a_path_is_on_the_last_mount_of_the_longest_point() -> None:
    assert mount_of(Path("/home/x"), MOUNTS).kind == "ext4"
    assert mount_of(Path("/mnt/with space/runs"), MOUNTS).source == "server:/export"
    assert mount_of(Path("/srv/données\udcff/runs"), MOUNTS).source == "server:/data"
    assert mount_of(Path("/mnt/other"), MOUNTS).kind == "tmpfs"
    assert mount_of(Path("/mnts"), MOUNTS).kind == "ext4"


def test_the_type_of_a_file_system_is_known() -> None:
    assert mount_of(Path("/proc/self").resolve()).kind == "proc"
    assert mount_of(Path("/no/such/thing")).kind != "proc"
