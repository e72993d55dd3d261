"""Whose a file is, and who else may write to it. Imports no jax."""

from __future__ import annotations

import os
import stat

_ROOT = 0


def resolve(owner: str | int) -> int:
    """Returns the number of a user given by name or number.

    Raises:
      ValueError: there is no such user here.
    """
    if isinstance(owner, int) and not isinstance(owner, bool) and owner >= 0:
        return owner
    if isinstance(owner, str):
        import pwd

        try:
            return pwd.getpwnam(owner).pw_uid
        except KeyError:
            pass
    raise ValueError(f"Trust.owner({owner!r}): no such user here.")


def find_distrust(status: os.stat_result, path: str, more_owners: frozenset[int]) -> str:
    """Returns why a file may have been written by someone else than us, root or `more_owners`; "" where it was not.

    A group may write where it is the owner's private one, as distributions with the umask 002 make it.
    """
    if status.st_uid not in {os.geteuid(), _ROOT, *more_owners}:
        return (
            f"{path} belongs to {_user_name(status.st_uid)}, neither to us ({_user_name(os.geteuid())}) nor to root. "
            "Name the owner in Trust.owner(...), or sign the step"
        )
    mode = stat.S_IMODE(status.st_mode)
    others = bool(mode & stat.S_IWOTH)
    group = bool(mode & stat.S_IWGRP) and not _is_private_group(status, path)
    if others or group:
        return f"{path} can be written by {'others' if others else 'its group'} (mode {mode:04o}). Run chmod go-w on it"
    return ""


def _user_name(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _is_private_group(status: os.stat_result, path: str) -> bool:
    """Whether the group of a file has no other members than its owner, as far as the user database tells."""
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(status.st_uid)
        group = grp.getgrgid(status.st_gid)
        # With an access list the group's bits are the list's mask, and say nothing about who may write.
        listed = "system.posix_acl_access" in os.listxattr(path, follow_symlinks=False)
    except (KeyError, OSError, AttributeError):
        return False
    alone = set(group.gr_mem) <= {owner.pw_name}
    return alone and group.gr_name == owner.pw_name and owner.pw_gid == group.gr_gid and not listed
