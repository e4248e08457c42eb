/* The compiler shows the first line of a file that it cannot parse. */
#include "/etc/passwd"
int main(void) { return 0; }
