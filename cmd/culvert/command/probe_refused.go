package command

import (
	"errors"
	"io"
	"net"
	"syscall"

	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// refusedByProxy notes the gateway's no to a CONNECT or to SOCKS.
func (p *prober) refusedByProxy(err error) {
	var te *tunnel.Error
	if !errors.As(err, &te) {
		return
	}
	r := &probeRefusal{Answer: te.Error(), Reasons: []tunnel.Reason{te.Reason}}
	switch {
	case te.Reason == tunnel.NoRoute:
		// What strangers hear of services that are not theirs, too.
		r.Reasons = append(r.Reasons, tunnel.NotExposed, tunnel.Denied)
		r.Hint = hintExplain
	case te.Reason == tunnel.Denied && p.o.mode == "socks5":
		// SOCKS has one reply for all that is not allowed.
		r.Reasons = []tunnel.Reason{tunnel.NoRoute, tunnel.NotExposed, tunnel.Denied, tunnel.Prohibited}
		r.Hint = hintExplain
	}
	p.report.Refusal = r
}

const hintExplain = "\"culvert explain\" at the gateway tells which"

// refusedByTLS notes an alert or a close in place of a handshake; first is
// what came first.
func (p *prober) refusedByTLS(err error, first []byte) {
	r := &probeRefusal{Answer: err.Error()}
	var oe *net.OpError
	switch {
	case len(first) == 7 && first[0] == 21:
		r.Reasons, r.Hint = reasonsOfAlert(sni.Alert(first[6]))
	case len(first) > 0 && first[0] != 22, len(first) > 5 && first[5] == 1:
		// Neither an alert nor a handshake, or a ClientHello, which is what was sent:
		// nobody has refused anything.
		if p.o.mode == "sni" {
			p.report.Hint = "the answer is not TLS: --via is not a gateway, or the service behind it does not speak TLS; \"culvert explain\" at the gateway says where the name leads"
		} else {
			p.report.Hint = "the service does not speak TLS: add --no-tls"
		}
		return
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		if p.o.mode == "proxy" || p.o.mode == "tcp" {
			p.refusedByReset(err)
			return
		}
		r.Answer = "the connection was closed without an answer: " + err.Error()
		r.Hint = "a listener with \"refusal: close\" refuses like this, and so does a port that speaks no TLS"
	case len(first) > 0 && !(errors.As(err, &oe) && oe.Op == "remote error"):
		return // the handshake began, and it is this side that did not like it
	}
	p.report.Refusal = r
}

// reasonsOfAlert says what a gateway may have meant by an alert. The service
// itself may have sent it just as well.
func reasonsOfAlert(a sni.Alert) ([]tunnel.Reason, string) {
	var reasons []tunnel.Reason
	for _, r := range tunnel.Reasons() {
		if (&tunnel.Outcome{Reason: r, Endpoint: "any"}).Carried() && r != tunnel.Drain {
			continue // how tunnels end, and not how requests do
		}
		if onlyHTTP(r) {
			continue
		}
		if sni.AlertFor(&tunnel.Error{Reason: r, Err: errors.New("")}) == a {
			reasons = append(reasons, r)
		}
	}
	if a == sni.UnrecognizedName {
		return reasons, hintExplain + "; a service may also send this alert itself"
	}
	if a == sni.InternalError {
		return reasons, "the gateway could not reach the service, or is overloaded. On the gateway: culvert status, or grep \"reason=\" in its log"
	}
	return reasons, ""
}

// onlyHTTP reports whether r is said of an HTTP request and never of a hello.
func onlyHTTP(r tunnel.Reason) bool {
	switch r {
	case tunnel.BadRequest, tunnel.BadMethod, tunnel.TooLarge, tunnel.NoAuth, tunnel.Unsupported, tunnel.Flood:
		return true
	}
	return false
}
