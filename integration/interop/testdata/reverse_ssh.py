"""Serves a name at a gateway by paramiko, as "ssh -N -R NAME:443:HOST:PORT" does.

usage: reverse_ssh.py GATEWAY_HOST GATEWAY_PORT KEY_FILE HOST_KEY_FINGERPRINT NAME HOST PORT
"""
import base64
import hashlib
import socket
import sys
import threading

import paramiko

host, port, key, fingerprint, name, to_host, to_port = sys.argv[1:]


def copy(source, sink, shut):
    while data := source.recv(65536):
        sink.sendall(data)
    shut()


def serve(channel, origin, server):
    service = socket.create_connection((to_host, int(to_port)))
    back = threading.Thread(target=copy, args=(service, channel, channel.shutdown_write), daemon=True)
    back.start()
    copy(channel, service, lambda: service.shutdown(socket.SHUT_WR))
    back.join()
    channel.close()
    service.close()


def forwarded(channel, origin, server):
    threading.Thread(target=serve, args=(channel, origin, server), daemon=True).start()


transport = paramiko.Transport((host, int(port)))
transport.connect(username="anybody", pkey=paramiko.Ed25519Key.from_private_key_file(key))
shown = base64.b64encode(hashlib.sha256(transport.get_remote_server_key().asbytes()).digest()).decode().rstrip("=")
if "SHA256:" + shown != fingerprint:
    sys.exit("the host key is SHA256:" + shown)
transport.request_port_forward(name, 443, handler=forwarded)
sys.stdin.read()  # until the test ends
