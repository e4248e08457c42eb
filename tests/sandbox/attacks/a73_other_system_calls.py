# Machine code that calls the kernel as a 32-bit program does (int 0x80), past a filter that knows one set of numbers.
# getpid is number 20 there; the filter must kill at any number.
import ctypes
import mmap

code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))


def solve(n):
    print("about to call", flush=True)
    print("pid", call(), flush=True)
    return sum(int(c) ** 2 for c in str(n))
