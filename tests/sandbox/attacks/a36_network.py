import socket

ADDRESSES = (
    (2, 1, ("127.0.0.1", 22)),
    (2, 2, ("127.0.0.1", 53)),
    (10, 1, ("::1", 80)),
    (1, 1, "\0judge"),
    (16, 3, None),
    (17, 3, None),
)


def solve(n):
    opened = []
    for family, kind, address in ADDRESSES:
        try:
            opened.append((socket.socket(family, kind), address))
        except OSError:
            pass
    try:  # a pair reaches nobody else; its ends must not connect anywhere either
        for end in socket.socketpair():
            end.connect("\0judge")
            opened.append((end, "pair"))
    except OSError:
        pass
    print("opened", len(opened))
    return sum(int(c) ** 2 for c in str(n)) if opened else -1
