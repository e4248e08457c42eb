# Leaves in all the ways that are not an Exception, while it is imported and in its calls.
import asyncio

asked = 0


class Leave(BaseException):
    code = 0


def solve(n):
    global asked
    asked += 1
    raise (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Leave, SystemExit)[asked % 5](0)
