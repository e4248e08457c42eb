/* A file without an end. */
#include "/dev/zero"
int main(void) { return 0; }
