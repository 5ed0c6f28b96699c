# Usage: client.py GATEWAY NAME CA CERT KEY
import http.client
import socket
import ssl
import sys

gateway, name, ca, cert, key = sys.argv[1:]
host, port = gateway.split(":")
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(cert, key)

# By SNI.
with socket.create_connection((host, int(port)), timeout=10) as raw:
    with context.wrap_socket(raw, server_hostname=name) as tls:
        tls.sendall(b"GET /sni HTTP/1.0\r\nHost: %s\r\n\r\n" % name.encode())
        data = b""
        while chunk := tls.recv(4096):
            data += chunk
        print("sni:", data.decode().splitlines()[-1])

# By CONNECT. http.client asks in HTTP/1.0, without a Host.
connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
connection.set_tunnel(name, 443)
connection.request("GET", "/connect")
print("connect:", connection.getresponse().read().decode().strip())
connection.close()
