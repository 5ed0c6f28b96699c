# Usage: server.py PORT CA CERT KEY
# Tells each client the SPIFFE id in its certificate.
import http.server
import ssl
import sys

port, ca, cert, key = sys.argv[1:]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ids = [name for kind, name in self.connection.getpeercert()["subjectAltName"] if kind == "URI"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"you are %s\n" % " ".join(ids).encode())


context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
context.verify_mode = ssl.CERT_REQUIRED
context.load_cert_chain(cert, key)
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
