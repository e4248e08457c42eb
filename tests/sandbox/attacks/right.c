#include <stdio.h>

int main(void) {
    long n, sum = 0;
    if (scanf("%ld", &n) != 1) return 1;
    for (; n; n /= 10) sum += (n % 10) * (n % 10);
    printf("%ld\n", sum);
    return 0;
}
