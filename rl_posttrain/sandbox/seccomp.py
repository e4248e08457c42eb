"""System calls that a run may not make, compiled by libseccomp (through pyseccomp) to a kernel filter.

A deny-list: an allow-list breaks with every new libc. `clone3` answers ENOSYS, which makes libc fall back to
`clone`, whose flags a filter can see. Refused calls answer EPERM; calls of another architecture kill.
"""

from __future__ import annotations

import errno
import tempfile
from typing import Literal

from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable

# "single": one process, with threads. Its memory limit is a hard bound without control groups.
# "multi": may also fork and execute programs; memory is then bounded by a control group or a watchdog.
Profile = Literal["single", "multi"]
# "command": "single" for a program that still has to be executed.
FilterName = Literal["single", "command", "multi"]
FILTER_NAMES: tuple[FilterName, ...] = ("single", "command", "multi")

DENIED = """
mount umount2 pivot_root chroot setns unshare open_tree move_mount fsopen fsconfig fsmount fspick
mount_setattr swapon swapoff reboot kexec_load kexec_file_load init_module finit_module delete_module
acct quotactl quotactl_fd syslog bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
io_uring_register add_key request_key keyctl ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp
process_madvise process_mrelease open_by_handle_at name_to_handle_at lookup_dcookie fanotify_init
fanotify_mark inotify_init inotify_init1 shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget
semop semctl semtimedop mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify memfd_create
memfd_secret mbind set_mempolicy migrate_pages move_pages vmsplice iopl ioperm modify_ldt personality
uselib ustat sysfs vhangup nfsservctl settimeofday clock_settime adjtimex clock_adjtime stime sethostname
setdomainname mknod mknodat setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid
setfsgid capset flock socket bind connect listen accept accept4 execveat landlock_create_ruleset
landlock_add_rule landlock_restrict_self """.split()
DENIED_SINGLE = "fork vfork rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open".split()
# Newer than the libraries in use, by number (the same on every architecture): statmount, listmount,
# lsm_get_self_attr, lsm_set_self_attr, lsm_list_modules, open_tree_attr.
DENIED_NUMBERS = (457, 458, 459, 460, 461, 467)

CLONE_THREAD = 0x10000
CLONE_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
# Putting characters into the terminal's input: TIOCSTI, TIOCLINUX. The kernel reads 32 bits of the request,
# so the comparison has to as well (CVE-2019-10063).
TERMINAL_REQUESTS = (0x5412, 0x541C)
# fcntl commands through which runs could signal each other over files that all of them see, as flock could:
# F_GETLK, F_OFD_GETLK, F_SETLEASE, F_NOTIFY.
LOCK_COMMANDS = (5, 36, 1024, 1026)


def build_filter(filter_name: FilterName) -> bytes:
    """The filter as the kernel's array of 8-byte instructions.

    Raises:
      SandboxUnavailable: pyseccomp or libseccomp is missing.
    """
    try:
        import pyseccomp  # type: ignore[import-not-found]
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: libseccomp itself was not found
        raise SandboxUnavailable(
            f"cannot build the system call filter ({error}): `pip install pyseccomp` and `apt-get install libseccomp2`"
        ) from error
    refuse = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)

    def masked(argument: int, mask: int, value: int):
        return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)

    denied = (
        DENIED + ([] if filter_name == "multi" else DENIED_SINGLE) + (["execve"] if filter_name == "single" else [])
    )
    for name in denied:
        # A call that this libseccomp or this architecture does not know cannot be named, hence not denied.
        if _known(pyseccomp, name):
            rules.add_rule(refuse, name)
    for number in DENIED_NUMBERS:
        rules.add_rule(refuse, number)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    if filter_name != "multi":
        rules.add_rule(refuse, "clone", masked(0, CLONE_THREAD, 0))
    for flag in CLONE_NAMESPACES:
        rules.add_rule(refuse, "clone", masked(0, flag, flag))
    # Limits of oneself alone: pid 1 of the run has the same user.
    rules.add_rule(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))
    for command in LOCK_COMMANDS:
        rules.add_rule(refuse, "fcntl", masked(1, 0xFFFFFFFF, command))
    for request in TERMINAL_REQUESTS:
        rules.add_rule(refuse, "ioctl", masked(1, 0xFFFFFFFF, request))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _known(pyseccomp, name: str) -> bool:
    try:
        return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0
    except (ValueError, OSError):
        return False
