# Tests that fail before they have asked the candidate anything count as their author's mistake, not as its failure.
# This one answers the import with an exception whose class cannot have such a name on the other side.
import json
import os
import struct
import sys


def identity():
    frame = sys._getframe()
    while frame:
        request = frame.f_locals.get("request")
        if isinstance(request, dict) and "id" in request:
            return request["id"]
        frame = frame.f_back
    raise LookupError("no question in the harness's frames")


def __getattr__(name):
    kind = "No\0name"
    error = [[kind, "no", ""], [[{"o": "0 " + kind}, kind], [None, "Exception"]], [], {"o": "1 " + kind}]
    data = json.dumps({"id": identity(), "result": ["error", error, None, ""]}, separators=(",", ":")).encode()
    os.write(4, struct.pack(">I", len(data)) + data)
    sys.modules["harness"].send = lambda payload: None
    raise AttributeError(name)
