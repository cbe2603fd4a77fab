"""A sandboxed process: the file system is copy-on-write, there is no network, and processes outside
cannot be seen or signalled.

Linux gives this without privileges (user, mount and network namespaces, overlayfs; Landlock beside
them). Where namespaces are refused, as in many containers, Landlock alone forbids every write
outside one folder. Elsewhere nothing of this is there, and only Python's own functions are guarded
(`scratch`). Must run while the process has one thread. Read from man-pages 6.9 (user_namespaces,
mount_namespaces, pivot_root, landlock) and Linux 6.12 Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NEWNS, NEWUSER, NEWNET = 0x20000, 0x10000000, 0x40000000  # sched.h
RDONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # mount.h
KEPT = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "relatime": 1 << 21}
DETACH = 2
SETATTR, AT_RECURSIVE, ATTR_RDONLY = 442, 0x8000, 1  # mount_setattr, the same number everywhere
RULESET, ADD_RULE, RESTRICT = 444, 445, 446  # landlock, the same
MOST_MOUNTS = 300
# Nothing that a program computes with lies there: kernel interfaces, other containers' files.
HIDDEN = ("/proc", "/sys", "/dev", "/run", "/var/run", "/var/lib/docker", "/var/lib/containers")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Where people keep what opens other doors, below their home.
SECRETS = (
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".kube",
    ".docker/config.json",
    ".netrc",
    ".pypirc",
    ".git-credentials",
    ".kaggle",
    ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
)
# CAP_KILL, _NET_ADMIN, _SYS_MODULE, _RAWIO, _PTRACE, _ADMIN, _BOOT, _MKNOD, _PERFMON, _BPF
POWERS = (5, 12, 16, 17, 19, 21, 22, 27, 38, 39)
# Rights to change something (linux/landlock.h); reading and running stay as they are.
WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # ABI 1
SINCE = {2: 1 << 13, 3: 1 << 14}  # REFER, TRUNCATE
TCP, SCOPED = 0b11, 0b11  # bind and connect (ABI 4); abstract sockets and signals (ABI 6)


class Refused(Exception):
    """This machine does not give it."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What was had: `files` is the folder of copies, `level` is `namespaces`, `landlock` or
    nothing."""

    level: str = ""
    files: str = ""
    network: bool = True
    why: str = ""  # no namespaces


# ------------------------------------------------------------------------------------ the kernel
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> int:
    given = [
        os.fsencode(one)
        if isinstance(one, str)
        else ctypes.c_long(one)
        if isinstance(one, int)
        else one
        for one in args
    ]
    found: int = getattr(libc(), name)(*given)
    if found < 0:
        number = ctypes.get_errno()
        raise Refused(f"{name}: {os.strerror(number).lower()}")
    return found


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    call("mount", source, target, kind, flags, data)


# ------------------------------------------------------------------------------------ namespaces
def namespaces(folder: str, *, network: bool, secrets: bool) -> Sandbox:
    """Enter them, with `folder` as the one place that is real."""
    here = os.getcwd()
    own(NEWUSER | NEWNS | (0 if network else NEWNET))
    mount(None, "/", None, REC | PRIVATE)
    if not network:
        loopback()
    root = f"{folder}/root"
    os.makedirs(root)
    mount("tmpfs", root, "tmpfs", 2 | 4, "mode=755")
    Tree(folder, root).build(network=network)
    if not secrets:
        hide(root, secret_places())
    os.makedirs(root + folder, exist_ok=True)
    mount(folder, root + folder, None, BIND | REC)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    os.chdir(here)
    return Sandbox(level="namespaces", files=f"{folder}/copies", network=network)


def own(flags: int) -> None:
    """New namespaces, in which everybody keeps their number. One who may gives all numbers a
    meaning there, so that other people's files can be copied."""
    users, groups = os.getuid(), os.getgid()
    ready, go = os.pipe()
    helper = os.fork() if users == 0 else 0
    if users == 0 and not helper:
        os.read(ready, 1)
        done = all(
            written(f"/proc/{os.getppid()}/{name}_map", "0 0 4294967295") for name in ("uid", "gid")
        )
        os._exit(not done)
    try:
        call("unshare", flags)
    finally:
        os.write(go, b".")
        os.close(go)
        os.close(ready)
        mapped = users == 0 and os.waitpid(helper, 0)[1] == 0
    if not mapped:
        written("/proc/self/setgroups", "deny")
        if not written("/proc/self/uid_map", f"{users} {users} 1") or not written(
            "/proc/self/gid_map", f"{groups} {groups} 1"
        ):
            raise Refused("user namespaces: numbers cannot be mapped")


def written(path: str, text: str) -> bool:
    try:
        Path(path).write_text(text, encoding="ascii")
    except OSError:
        return False
    return True


def loopback() -> None:
    """`lo` up: programs speak to themselves by it."""
    import fcntl
    import socket

    request = struct.pack("16sh", b"lo", 1 | 64)  # IFF_UP, IFF_RUNNING
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, request.ljust(40, b"\0"))  # SIOCSIFFLAGS


class Tree:
    """The new root: every folder without mounts inside is an overlay, the others are made anew."""

    def __init__(self, folder: str, root: str) -> None:
        self.folder, self.root, self.count = folder, root, 0
        self.mounts = {
            point: options for point, options in mounted() if not point.startswith(folder)
        }
        self.parents = {
            os.fspath(parent) for point in self.mounts for parent in Path(point).parents
        }

    def build(self, *, network: bool) -> None:
        self.children("/")
        os.makedirs(f"{self.root}/proc", exist_ok=True)
        mount("/proc", f"{self.root}/proc", None, BIND | REC)
        self.devices()
        os.makedirs(f"{self.root}/run", exist_ok=True)
        for place in ("/sys", *(("/run",) if network else ())):
            os.makedirs(self.root + place, exist_ok=True)
            if os.path.isdir(place):
                mount(place, self.root + place, None, BIND | REC)
                attributes = ctypes.create_string_buffer(struct.pack("QQQQ", ATTR_RDONLY, 0, 0, 0))
                call("syscall", SETATTR, -100, self.root + place, AT_RECURSIVE, attributes, 32)

    def children(self, path: str) -> None:
        try:
            entries = sorted(os.scandir(path), key=lambda one: one.name)
        except OSError:
            return
        for one in entries:
            if one.path in HIDDEN or one.path == self.folder:
                continue
            if one.is_symlink():
                os.symlink(os.readlink(one.path), self.root + one.path)
            elif one.is_dir():
                self.place(one.path)
            elif one.is_file():
                self.bound(one.path)

    def place(self, path: str) -> None:
        """A folder as it is seen."""
        os.makedirs(self.root + path, exist_ok=True)
        if path in self.parents:
            self.children(path)
        elif not os.access(path, os.R_OK | os.X_OK):
            return  # nobody here can look into it
        else:
            self.overlay(path)

    def overlay(self, path: str) -> None:
        self.count += 1
        if self.count > MOST_MOUNTS:
            raise Refused("too many file systems to lay copies over")
        upper, work = (f"{self.folder}/{name}{path}" for name in ("copies", f"work/{self.count}"))
        os.makedirs(upper)
        os.makedirs(work)
        lower, over, beside = (re.sub(r"([\\:,])", r"\\\1", one) for one in (path, upper, work))
        options = f"lowerdir={lower},upperdir={over},workdir={beside},userxattr"
        try:
            mount("overlay", self.root + path, "overlay", 2 | 4, options)
        except Refused:
            self.bound(path)  # to be read: a file system that overlays do not take

    def bound(self, path: str) -> None:
        """As it is, to be read."""
        target = self.root + path
        if not os.path.isdir(path):
            with open(target, "wb"):
                pass
        try:
            mount(path, target, None, BIND | REC)
            mount(None, target, None, BIND | REMOUNT | RDONLY | self.flags(path))
        except Refused:
            mount(None, target, None, BIND | REMOUNT | RDONLY | sum(KEPT.values()))

    def flags(self, path: str) -> int:
        """Those of its file system, which nobody may take away here."""
        at = next(one for one in (path, *map(str, Path(path).parents)) if one in self.mounts)
        return sum(flag for name, flag in KEPT.items() if name in self.mounts[at])

    def devices(self) -> None:
        home = f"{self.root}/dev"
        os.makedirs(home, exist_ok=True)
        mount("tmpfs", home, "tmpfs", 2 | 8, "mode=755")
        for name in DEVICES:
            if os.path.exists(f"/dev/{name}"):
                with open(f"{home}/{name}", "wb"):
                    pass
                mount(f"/dev/{name}", f"{home}/{name}", None, BIND)
        os.makedirs(f"{home}/shm")
        mount("tmpfs", f"{home}/shm", "tmpfs", 2 | 4, "mode=1777")
        os.symlink("/proc/self/fd", f"{home}/fd")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{home}/{name}")


def mounted() -> Iterator[tuple[str, frozenset[str]]]:
    """Mount points and their options."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
        yield point, frozenset(fields[5].split(","))


def secret_places() -> Iterator[str]:
    home = os.path.expanduser("~")
    yield from (f"{home}/{one}" for one in SECRETS)
    if "HF_HOME" in os.environ:
        yield from (f"{os.environ['HF_HOME']}/{one}" for one in ("token", "stored_tokens"))


def hide(root: str, places: Iterable[str]) -> None:
    """Nothing in their place, and nothing to be read through them."""
    for place in places:
        at = root + os.path.realpath(place)
        if os.path.isdir(at):
            mount("tmpfs", at, "tmpfs", 2 | 4, "mode=700")
        elif os.path.exists(at):
            mount("/dev/null", at, None, BIND)


# ------------------------------------------------------------------------------------ Landlock
def landlock(folder: str, *, network: bool, writes: bool) -> int:
    """From now on nothing changes outside of `folder`, where `writes` is false; nobody outside is
    signalled, traced or (without `network`) connected to, as far as this kernel's version of it
    goes, which is returned."""
    version = call("syscall", RULESET, None, 0, 1)
    rights = 0 if writes else WRITES | sum(flag for abi, flag in SINCE.items() if version >= abi)
    rights = rights or 1 << 11  # at least something is to be ruled: block devices
    ports = TCP if version >= 4 and not network else 0
    scoped = SCOPED if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", rights, ports, scoped)[:size]
    rules = call("syscall", RULESET, ctypes.create_string_buffer(attributes, size), size, 0)
    if not writes:
        for place in (folder, *(f"/dev/{one}" for one in DEVICES), "/dev/shm", "/proc/self"):
            allow(rules, place, rights)
    drop()
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("syscall", RESTRICT, rules, 0)
    os.close(rules)
    return version


def drop() -> None:
    """Powers of root over others' processes and over the machine; those over files stay."""
    head = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)  # version 3, oneself
    data = ctypes.create_string_buffer(24)
    if libc().capget(head, data):
        return
    for one in POWERS:
        libc().prctl(24, one, 0, 0, 0)  # PR_CAPBSET_DROP: a program that is started has none either
    held = list(struct.unpack("6I", data.raw))
    for one in POWERS:
        half = 3 * (one // 32)
        for place in range(half, half + 3):
            held[place] &= ~(1 << one % 32)
    libc().capset(head, ctypes.create_string_buffer(struct.pack("6I", *held), 24))


def allow(rules: int, place: str, rights: int) -> None:
    try:
        at = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(place):
        rights &= 1 << 1 | 1 << 14  # of a file: to write and to cut it
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, at), 12)
    call("syscall", ADD_RULE, rules, 1, rule, 0)
    os.close(at)


# ------------------------------------------------------------------------------------ all of it
def enter(folder: str, *, network: bool = False, secrets: bool = False, most: str = "") -> Sandbox:
    """The best that this machine gives. `most`: no more than that, for tests: `namespaces`,
    `landlock` or `none`."""
    if sys.platform != "linux" or most == "none":
        return Sandbox(why="" if most else f"{sys.platform} has no namespaces")
    why = ""
    if most != "landlock":
        try:
            found = attempt(folder, network=network, secrets=secrets)
        except (Refused, OSError) as error:
            why = str(error)
        else:
            try:
                landlock(folder, network=True, writes=True)
            except (Refused, OSError):
                return found  # what it adds is not needed
            return found
    try:
        version = landlock(folder, network=network, writes=False)
    except (Refused, OSError):
        return Sandbox(why=why)
    return Sandbox(level="landlock", network=network or version < 4, why=why)


def attempt(folder: str, *, network: bool, secrets: bool) -> Sandbox:
    """Tried by a child first, in a folder of its own: half a namespace cannot be left again."""
    trial = f"{folder}/trial"
    os.mkdir(trial)
    heard, said = os.pipe()
    child = os.fork()
    if not child:
        code = 2
        try:
            namespaces(trial, network=network, secrets=secrets)
            code = 0
        except (Refused, OSError) as error:
            # Its folder may be out of sight by now
            os.write(said, str(error).encode())
        finally:
            os._exit(code)
    os.close(said)
    why = os.read(heard, 4096).decode(errors="replace")
    os.close(heard)
    if os.waitpid(child, 0)[1]:
        raise Refused(why or "user namespaces fail")
    return namespaces(folder, network=network, secrets=secrets)


__all__ = ["Sandbox", "enter"]
