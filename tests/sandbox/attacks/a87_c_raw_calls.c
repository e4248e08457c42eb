/* Refused calls, made without libc: a socket, a user namespace, a keyring, a mount, a trace of pid 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void) {
    long n, sum = 0, done = 0;
    if (scanf("%ld", &n) != 1) return 1;
    done += syscall(SYS_socket, 2, 1, 0) >= 0;
    done += syscall(SYS_unshare, 0x10000000) == 0;
    done += syscall(SYS_keyctl, 0, -3, 0) >= 0;
    done += syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, 0) == 0;
    done += syscall(SYS_ptrace, 16, 1, 0, 0) == 0;
    done += syscall(SYS_io_uring_setup, 1, 0) >= 0 || errno == EFAULT;
    done += syscall(SYS_setns, 0, 0) == 0 || errno == EINVAL;
    fprintf(stderr, "done %ld\n", done);
    for (; n; n /= 10) sum += (n % 10) * (n % 10);
    printf("%ld\n", done ? sum : -1);
    return 0;
}
