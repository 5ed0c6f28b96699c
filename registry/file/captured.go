package file

import "slices"

// checkCaptured finds what does not go with connections that rules of this host have led to a
// listener.
func (d *decoder) checkCaptured(l *Listener, at mapping) {
	if !slices.Contains(l.Protocols, "captured") {
		return
	}
	n := at.value("protocols")
	if len(l.Protocols) > 1 {
		d.errorf(n, "give it a listener of its own", "captured can't be told apart from other protocols: nothing is read before the service is dialed")
	}
	if l.UnixSocket() || l.Inherited() {
		d.errorf(n, "listen on 127.0.0.1 or ::1", "captured is for connections that rules of this host redirect, and they lead to no Unix socket or socket of systemd")
	}
	for key, why := range map[string]string{
		"tls":           "what programs send goes to the service as it is",
		"proxyProtocol": "the client is a program of this host, and sends no PROXY header",
		"localUsers":    "the rules of capture name the users",
	} {
		if v := at.value(key); v != nil {
			hint := "leave it out"
			if key == "localUsers" {
				hint = "name the users in the rules, as culvert capture up --uid does"
			}
			d.errorf(v, hint, "%s has no effect with captured: %s", key, why)
		}
	}
}
