"""Every file and directory of a run directory is opened, made and removed here: somebody else may have written it.

No link is followed in any part of a path, so nothing outside of the run directory is read or changed. The path to the
run directory itself may contain links: `RunPaths` resolves them. Only regular files are opened, and no open waits. In a
directory that everybody may write, a file must belong to this user, to root or to the directory's owner. With the
sticky bit (1777) a directory must too, from the run directory down. A file that is written must have no other name (a
hard link) elsewhere. Removal goes entry by entry, by the names that rollback writes.

All functions raise OSError, in words for people where a file is not what it should be.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import resource
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_OPENAT2, _AT_FDCWD, _RESOLVE_NO_SYMLINKS = 437, -100, 0x04  # alike on all architectures
_WRITING = os.O_WRONLY | os.O_RDWR
OF_A_CHECKPOINT = re.compile(
    r"\.?(rank-\d{5,9}\.safetensors|pack-\d{5,9}-\d{5,9}\.shards|(manifest|record)\.json)(\.[\w-]{1,64})?"
)
"""Names in a checkpoint's directory, including files that were still being written."""
WRITES = "rollback.write"
"""Audit event (`sys.addaudithook`) with the whole path of a file that is about to be made or opened for writing."""


_run_directories: set[Path] = set()


class NotAFileOfOurs(OSError):
    """Something else has the name of one of our files: a link, a pipe, a device, a directory, a stranger's file."""


def know_run_directory(root: Path) -> None:
    """From here down a stranger's directory counts as little as his file. Whose the run directory itself is, and where
    it lies (in `/tmp`, say), is the choice of whoever names it."""
    _run_directories.add(root)


def _made_for(of_a_file: int, umask: int) -> int:
    """The mode of a new file or directory (`of_a_file`: 0o6, 0o7) under a umask.

    Only the owner has access, unless the umask lets the group (0o002) or everybody (0o000) write, which no umask does
    by accident: they then get the owner's access.
    """
    shared = [of_a_file << shift for shift, bit in ((3, 0o020), (0, 0o002)) if not umask & bit]
    return (of_a_file << 6) | sum(shared)


def _umask() -> int:
    """The umask, read without setting it: another thread would notice a change."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration, ValueError):
        return 0o077


def file_mode() -> int:
    """The mode of a file that is made now."""
    return _made_for(0o6, _umask())


@contextlib.contextmanager
def directory(path: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory, for paths below it. make: make it and its parents, where they are missing."""
    try:
        fd = _open_directory(path)
    except FileNotFoundError:
        if not make:
            raise
        with directory(path.parent, make=True) as above:
            sys.audit(WRITES, str(path))
            with contextlib.suppress(FileExistsError):
                _mkdir(path, above)
        fd = _open_directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_directory(path: Path) -> int:
    """Open with one kernel call where the kernel has it (5.6), else part by part, which also finds the faulty part."""
    how = struct.pack("QQQ", _DIRECTORY, 0, _RESOLVE_NO_SYMLINKS)
    fd = int(_LIBC.syscall(_SYS_OPENAT2, _AT_FDCWD, os.fsencode(path), how, len(how)))
    if fd >= 0:
        return fd
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM, errno.ELOOP, errno.ENOTDIR):
        return _walk_to(path)
    raise OSError(number, os.strerror(number), str(path))


def _walk_to(path: Path) -> int:
    fd = os.open("/" if path.is_absolute() else ".", _DIRECTORY)
    for part in path.parts[1:] if path.is_absolute() else path.parts:
        try:
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
        except OSError as error:
            if isinstance(error, NotADirectoryError) and stat.S_ISLNK(os.lstat(part, dir_fd=fd).st_mode):
                raise NotAFileOfOurs(errno.ELOOP, "a symbolic link is in its path", str(path)) from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(fd)
        fd = inner
    return fd


def make_directory(path: Path) -> None:
    """Make a directory and its parents, where they are missing."""
    with directory(path, make=True):
        pass


def make_new_directory(path: Path) -> None:
    """Make a directory that must not exist yet; make its parents where they are missing."""
    with directory(path.parent, make=True) as fd:
        sys.audit(WRITES, str(path))
        _mkdir(path, fd)


def _mkdir(path: Path, above: int) -> None:
    try:
        os.mkdir(path.name, _made_for(0o7, _umask()), dir_fd=above)
    except OSError as error:
        raise _refused(error, path, above) from None


def _refused(error: OSError, path: Path, folder: int) -> OSError:
    """The same with the whole path, and with a word where a disk with room is full all the same: of files."""
    why = error.strerror
    if error.errno == errno.ENOSPC:
        disk = os.statvfs(folder)
        if disk.f_bavail and disk.f_files and not disk.f_favail:
            why = f"{why} for another file: it has room, but all of its inodes are in use (df -i {path.parent})"
    return OSError(error.errno, why, str(path))


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file. A new one gets the mode of `file_mode`."""
    writes = bool(flags & _WRITING)
    truncates, flags = flags & os.O_TRUNC, flags & ~os.O_TRUNC
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    mode = file_mode() if flags & os.O_CREAT else 0
    if writes:
        sys.audit(WRITES, str(path))
    with directory(path.parent) as folder:
        try:
            fd = os.open(path.name, flags, mode, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotAFileOfOurs(errno.ELOOP, "it is a symbolic link", str(path)) from None
            if error.errno in (errno.ENXIO, errno.EISDIR):
                raise NotAFileOfOurs(error.errno, "it is not a regular file", str(path)) from None
            raise _refused(error, path, folder) from None
        try:
            status, above = os.fstat(fd), os.fstat(folder)
            _require_ours(status, above, path, writes=writes)
            if above.st_uid not in (os.geteuid(), 0):
                _require_no_stranger_above(path)
            if truncates and status.st_size:
                os.ftruncate(fd, 0)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _is_a_stranger_s(status: os.stat_result, folder: os.stat_result) -> bool:
    """Of what is in a folder: whether anybody may have put it there."""
    return bool(folder.st_mode & stat.S_IWOTH) and status.st_uid not in (os.geteuid(), 0, folder.st_uid)


def _require_no_stranger_above(path: Path) -> None:
    """Raise where a directory on the way from the run directory was put there by anybody: all that it holds is his.

    Only where the sticky bit says that users are to be kept apart: with `umask 000` they share a run, and go on with
    each other's checkpoints.
    """
    root = next((above for above in path.parents if above in _run_directories), None)
    if root is None:
        return
    for folder in path.parents:
        if folder == root:
            return
        status, above = os.lstat(folder), os.lstat(folder.parent)
        if above.st_mode & stat.S_ISVTX and _is_a_stranger_s(status, above):
            fault = f"{folder} belongs to user {status.st_uid}, in a directory that everybody may write"
            raise NotAFileOfOurs(errno.EINVAL, fault, str(path))


def leave_room_for_others(fd: int) -> None:
    """Double the soft limit of open files where this descriptor is beyond half of it and the hard limit allows it.

    Who holds a thousand files open would else take from the other threads of the process what they need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or fd < soft // 2:
        return
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    with contextlib.suppress(OSError, ValueError):  # whoever needs more is told when it opens it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _require_ours(status: os.stat_result, folder: os.stat_result, path: Path, *, writes: bool) -> None:
    fault = None
    if not stat.S_ISREG(status.st_mode):
        fault = "it is not a regular file"
    elif _is_a_stranger_s(status, folder):
        fault = f"it belongs to user {status.st_uid}, in a directory that everybody may write"
    elif writes and status.st_nlink > 1:
        fault = "it has another name elsewhere (a hard link)"
    if fault:
        raise NotAFileOfOurs(errno.EINVAL, fault, str(path))


def size_of(path: Path) -> int:
    """Size of a file; 0 where there is none, or none that can be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def require_ours(path: Path) -> None:
    """Raise unless a file that another library opens for writing (a lock) may be written to, or is missing."""
    with contextlib.suppress(FileNotFoundError):
        os.close(open_file(path, os.O_WRONLY))


def rename(source: Path, target: Path) -> None:
    """Rename, within one directory or from one to another."""
    with directory(source.parent) as before, directory(target.parent) as after:
        os.rename(source.name, target.name, src_dir_fd=before, dst_dir_fd=after)


def unlink(path: Path) -> None:
    """Remove a file (for a link: the link itself), which may be missing."""
    with contextlib.suppress(FileNotFoundError), directory(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_directory(path: Path, ours: re.Pattern[str] = OF_A_CHECKPOINT) -> bool:
    """Remove a directory and the files in it whose names match. It may be missing.

    False: it holds something else, which stays, and so does the directory.
    """
    with contextlib.suppress(FileNotFoundError), directory(path.parent) as folder:
        with directory(path) as fd:
            for name in os.listdir(f"/proc/self/fd/{fd}"):
                if ours.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(name, dir_fd=fd)
        try:
            os.rmdir(path.name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
    return True


def is_locked(path: Path, wanted: int) -> bool:
    """Whether somebody has locked a file so that it cannot be locked as wanted (LOCK_EX, LOCK_SH)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, wanted | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
