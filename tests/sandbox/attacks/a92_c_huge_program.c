/* A program of a gigabyte, for the disk that compiled programs are kept on. */
volatile char a[1 << 30] = {1};
int main(void) { return a[0] + a[(1 << 30) - 1]; }
