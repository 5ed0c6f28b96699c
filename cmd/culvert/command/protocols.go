package command

import (
	"cmp"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/termination"
	"culvert.dev/registry/file"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// allProtocols are those a request may have come by.
var allProtocols = append(slices.Clone(file.Protocols), "hbone", "connect-h3", "tcp", "udp")

// protocols makes what a listener speaks. They are wired here and nowhere else.
func protocols(l file.Listener, via string, vs *verifiers) ([]tunnel.Protocol, error) {
	if !l.Service.IsZero() {
		return []tunnel.Protocol{&tunnel.Fixed{To: l.Service, Port: l.Port}}, nil
	}
	auth, err := vs.of(&l)
	if err != nil {
		return nil, err
	}
	names := l.Outer()
	if len(l.Protocols) == 0 && l.TLS == nil {
		names = file.Protocols[:3] // of which TLS by name goes with auth, and comes back without
	}
	outer, err := speak(names, &l, via, auth)
	if err != nil || l.TLS == nil {
		return outer, err
	}
	inner, err := speak(l.Inner(), &l, via, auth)
	if err != nil {
		return nil, err
	}
	p := &termination.Protocol{Inner: inner, ALPN: offered(inner)}
	at := slices.IndexFunc(outer, func(p tunnel.Protocol) bool { return p.Name() == "sni" })
	if at >= 0 {
		p.Hello = outer[at].(*sni.Protocol)
		outer[at] = p
	} else {
		p.Hello, p.All = &sni.Protocol{Refusal: refusal(&l), Nameless: true}, true
		outer = append([]tunnel.Protocol{p}, outer...)
	}
	k, err := keys(l.TLS)
	if err == nil {
		err = p.Use(k)
	}
	if err != nil {
		return nil, usageError("names in tls must be in its certificates, and without names its certificates must have one that is not a wildcard", "listener %s: %w", l.Address, err)
	}
	return outer, nil
}

// datagrams makes what is carried from a listener of UDP.
func datagrams(l file.Listener, via string, vs *verifiers) (*gateway.Datagrams, error) {
	d := &gateway.Datagrams{Service: l.Service, Port: l.Port, Silent: l.Refusal == "close"}
	if l.TLS == nil {
		return d, nil
	}
	auth, err := vs.of(&l)
	if err != nil {
		return nil, err
	}
	d.HTTP3 = &gateway.HTTP3{Auth: auth, Via: via, TerminateAll: len(l.Outer()) == 0}
	k, err := keys(l.TLS)
	if err == nil {
		err = d.HTTP3.Use(k)
	}
	if err != nil {
		return nil, fmt.Errorf("listener %s: %w", l.Address, err)
	}
	return d, nil
}

// offered is what ALPN is told of the inner protocols.
func offered(inner []tunnel.Protocol) []termination.Offer {
	two, one := termination.Offer{Name: "h2"}, termination.Offer{Name: "http/1.1"}
	for _, p := range inner {
		switch p.Name() {
		case "connect-h2", "hbone":
			two.Protocols = append(two.Protocols, p)
		case "connect", "websocket":
			one.Protocols = append(one.Protocols, p)
		case "socks5":
			return nil // it has no name in ALPN, and who offers others may speak it
		}
	}
	return slices.DeleteFunc([]termination.Offer{two, one}, func(o termination.Offer) bool { return len(o.Protocols) == 0 })
}

// keys makes of a listener's files what TLS is ended with.
func keys(t *file.TLS) (*termination.Keys, error) {
	k := &termination.Keys{Names: t.Names, Optional: t.Optional, MinVersion: t.MinVersion}
	for _, p := range t.Certificates {
		pair, err := p.X509()
		if err != nil {
			return nil, err
		}
		k.Certificates = append(k.Certificates, pair)
	}
	if t.ClientCA != "" {
		k.ClientCAs = x509.NewCertPool()
		if !k.ClientCAs.AppendCertsFromPEM([]byte(t.ClientCA)) {
			return nil, errors.New("clientCAFile has no certificate in it")
		}
	}
	for domain, cas := range t.Trust {
		if k.Trust == nil {
			k.Trust = make(map[string][]*x509.Certificate, len(t.Trust))
		}
		var err error
		if k.Trust[domain], err = certificates(cas); err != nil {
			return nil, fmt.Errorf("the CAs of the trust domain %q: %w", domain, err)
		}
	}
	return k, nil
}

// certificates returns those of a text in PEM, of which there is at least one.
func certificates(text string) ([]*x509.Certificate, error) {
	var all []*x509.Certificate
	for block, rest := pem.Decode([]byte(text)); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil { // as x509.CertPool has it
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("there is no certificate")
	}
	return all, nil
}

// useKeys gives the listeners of a running gateway the keys of c, those of
// them that end TLS in both.
func useKeys(listeners []gateway.Listener, c *file.Config) error {
	var errs []error
	for _, l := range c.Listeners {
		at := slices.IndexFunc(listeners, func(r gateway.Listener) bool { return r.Address == l.Address })
		if l.TLS == nil || at < 0 {
			continue
		}
		k, err := keys(l.TLS)
		for _, p := range listeners[at].Protocols {
			if t, ok := p.(*termination.Protocol); ok && err == nil {
				err = t.Use(k)
			}
		}
		if d := listeners[at].Datagrams; d != nil && d.HTTP3 != nil && err == nil {
			err = d.HTTP3.Use(k)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("listener %s: keeping the current certificates: %w", l.Address, err))
		}
	}
	return errors.Join(errs...)
}

func refusal(l *file.Listener) sni.Refusal {
	if l.Refusal == "close" {
		return sni.RefuseClose
	}
	return sni.RefuseAlert
}

// byName is TLS by name at a listener that names no protocols: it is spoken where the
// listener has no auth, which may come and go.
type byName struct {
	*sni.Protocol
	auth *verifier
}

// Off reports that TLS by name is not spoken.
func (p *byName) Off() bool { return !p.auth.known.Load().byName }

// Sniff implements tunnel.Protocol.
func (p *byName) Sniff(prefix []byte) tunnel.Verdict {
	if p.Off() {
		return tunnel.No
	}
	return p.Protocol.Sniff(prefix)
}

// speak makes the protocols of those names.
func speak(names []string, l *file.Listener, via string, auth *verifier) ([]tunnel.Protocol, error) {
	// CONNECT takes every method, to say what is wrong with it, so WebSocket is
	// asked before it.
	names = slices.Clone(names)
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
	var ps []tunnel.Protocol
	var carrier *h2.Protocol
	var sockets *ws.Protocol
	for _, name := range names {
		switch name {
		case "sni":
			if p := (&sni.Protocol{Refusal: refusal(l)}); len(l.Protocols) > 0 {
				ps = append(ps, p)
			} else {
				ps = append(ps, &byName{p, auth})
			}
		case "connect", "connect-h2":
			if name == "connect-h2" {
				carrier = &h2.Protocol{Auth: auth, Via: via}
				ps = append(ps, carrier)
				continue
			}
			ps = append(ps, &connect.Protocol{Auth: auth, Via: via})
		case "hbone":
			ps = append(ps, &hbone.Protocol{Via: via})
		case "socks5":
			ps = append(ps, &socks5.Protocol{Verify: auth.password, Off: auth.Off})
		case "proxy":
			ps = append(ps, &proxyproto.Protocol{})
		case "websocket":
			sockets = &ws.Protocol{Path: l.WebSocket.Path, Hosts: l.WebSocket.Hosts, Origins: l.WebSocket.Origins, Auth: auth, Via: via}
			ps = append(ps, sockets)
		default:
			return nil, fmt.Errorf("listener %s: unknown protocol %q", l.Address, name)
		}
	}
	if carrier != nil && sockets != nil {
		carrier.Extended = sockets
	}
	return ps, nil
}

// connHeader is what the connections of a listener begin with; nil for nothing.
func connHeader(l file.Listener) tunnel.ConnHeader {
	if l.Proxy == nil {
		return nil
	}
	return &proxyproto.ConnHeader{From: l.Proxy.From}
}

// rank orders protocols by how much they take for theirs.
func rank(protocol string) int {
	if protocol == "connect" {
		return 1
	}
	return 0
}
