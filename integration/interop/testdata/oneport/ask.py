"""Usage: ask.py ENTRY ADDRESS: reads a page by an entry of the agent, or "direct"."""
import socket
import ssl
import subprocess
import sys
import urllib.request

HOST = "orders.shop.example"
entry, address = sys.argv[1:]
tls = ssl.create_default_context(cafile="ca.pem")
tls.load_cert_chain("me.pem", "me.key")


def connected():
    """Returns a socket whose other end is the service."""
    if entry == "port":
        return socket.create_connection(("127.0.0.1", int(address)))
    if entry == "unix":
        s = socket.socket(socket.AF_UNIX)
        s.connect(address)
        return s
    if entry == "socks5":
        import socks

        return socks.create_connection((HOST, 443), proxy_type=socks.SOCKS5, proxy_addr="127.0.0.1", proxy_port=int(address))
    ours, its = socket.socketpair()
    subprocess.Popen(address.split() + [HOST, "443"], stdin=its, stdout=its)
    its.close()
    return ours


if entry == "direct":  # or by what the environment says
    print(urllib.request.urlopen(address, context=tls).read().decode())
else:
    with tls.wrap_socket(connected(), server_hostname=HOST) as s:
        s.sendall(b"GET / HTTP/1.0\r\nHost: %s\r\n\r\n" % HOST.encode())
        print(s.makefile().read())
