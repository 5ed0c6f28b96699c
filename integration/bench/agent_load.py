"""What programs that know nothing of a proxy do, in one thread.

Jobs are lines of JSON on standard input, and reports lines of JSON on standard output.
"""

import base64
import json
import socket
import sys
import time


def dial(job):
    """Connect, by CONNECT where the job names a proxy."""
    host, port = (job["proxy"] or job["to"]).rsplit(":", 1)
    s = socket.create_connection((host, int(port)), timeout=30)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if job["proxy"]:
        s.sendall(b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (job["to"].encode(), job["to"].encode()))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            more = s.recv(1) if head.endswith((b"\r", b"\n")) else s.recv(4096)
            if not more:
                raise ConnectionError("the proxy ended the connection after %r" % head)
            head += more
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError("the proxy answered %r" % head)
    return s


def trip(s, payload):
    s.sendall(payload)
    left = len(payload)
    while left:
        got = len(s.recv(left))
        if not got:
            raise ConnectionError("the connection ended in a round trip")
        left -= got


def run(job):
    opening, payload = base64.b64decode(job["opening"]), bytes(64)
    times, total, begin = [], 0, time.monotonic_ns()
    end = begin + job["time"]
    if job["op"] == "conns":
        while not times or time.monotonic_ns() < end:
            at = time.monotonic_ns()
            with dial(job) as s:
                s.sendall(opening)
                trip(s, payload)
            times.append(time.monotonic_ns() - at)
    elif job["op"] == "trips":
        with dial(job) as s:
            s.sendall(opening)
            trip(s, payload)
            begin = time.monotonic_ns()
            end = begin + job["time"]
            while (at := time.monotonic_ns()) < end:
                trip(s, payload)
                times.append(time.monotonic_ns() - at)
    elif job["op"] == "down":
        buf = bytearray(1 << 20)
        with dial(job) as s:
            s.sendall(opening)
            begin = time.monotonic_ns()
            while n := s.recv_into(buf):
                total += n
    else:
        raise ValueError("no such job: %r" % job["op"])
    took = time.monotonic_ns() - begin
    times.sort()
    return {"count": len(times), "bytes": total, "took": took, "p50": times[len(times) // 2] if times else 0}


for line in sys.stdin:
    try:
        report = run(json.loads(line))
    except Exception as e:  # the benchmark prints it
        report = {"err": "%s: %s" % (type(e).__name__, e)}
    print(json.dumps(report), flush=True)
