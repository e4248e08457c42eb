#include <iostream>

int main() {
    long n, sum = 0;
    std::cin >> n;
    for (; n; n /= 10) sum += (n % 10) * (n % 10);
    std::cout << sum << std::endl;
}
