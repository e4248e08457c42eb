/* The assembler copies a file of the machine, as the compiler sees it, into the program. */
#include <stdio.h>

__asm__(".section .rodata\n.global secret\nsecret: .incbin \"/srv/CANARY\"\n.byte 0\n");
extern const char secret[];

int main(void) {
    long n, sum = 0;
    if (scanf("%ld", &n) != 1) return 1;
    fprintf(stderr, "%s\n", secret);
    for (; n; n /= 10) sum += (n % 10) * (n % 10);
    printf("%ld\n", sum);
    return 0;
}
