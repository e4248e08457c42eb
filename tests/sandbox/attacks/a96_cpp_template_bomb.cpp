// Templates that make four of themselves, thirty levels deep.
template <int n, int i> struct Bomb {
    static constexpr long value = Bomb<n - 1, 4 * i>::value + Bomb<n - 1, 4 * i + 1>::value +
                                  Bomb<n - 1, 4 * i + 2>::value + Bomb<n - 1, 4 * i + 3>::value;
};
template <int i> struct Bomb<0, i> {
    static constexpr long value = 1;
};
int main() { return Bomb<14, 0>::value; }
