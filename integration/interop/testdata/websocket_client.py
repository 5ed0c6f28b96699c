"""Usage: websocket_client.py URL NAME CA CERT KEY

TLS to the service, in the binary messages of a WebSocket to the gateway.
"""
import ssl
import sys

import websocket

url, name, ca, cert, key = sys.argv[1:]
ws = websocket.create_connection(f"{url}{name}:443", suppress_origin=True, timeout=20)
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(cert, key)
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
tls = context.wrap_bio(incoming, outgoing, server_hostname=name)


def until_done(step):
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            pass
        finally:
            if outgoing.pending:
                ws.send_binary(outgoing.read())
        incoming.write(ws.recv())


until_done(tls.do_handshake)
until_done(lambda: tls.write(f"GET / HTTP/1.0\r\nHost: {name}\r\n\r\n".encode()))
answer = b""
while b"you are" not in answer:
    answer += until_done(lambda: tls.read(4096))
print("websocket:", answer.split(b"\r\n\r\n")[1].decode().strip())
ws.close()

try:
    websocket.create_connection(f"{url}{name}:443", timeout=20)
except websocket.WebSocketBadStatusException as refused:
    print("with an Origin:", refused.status_code)
