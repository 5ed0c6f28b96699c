package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// newCarrier returns the dialer that asks the gateway at addr, one of h's, which it
// reaches by dialer. This is the one place where a carrier becomes a dialer.
func (t *Transports) newCarrier(h *registry.Hop, addr string, dialer tunnel.Dialer) (tunnel.Dialer, error) {
	_, first := dialer.(firstHopDialer)
	credentials, token := "", t.hopToken(h, addr)
	switch {
	case h.Token != "":
		credentials = connect.BearerCredentials(string(h.Token))
	case h.User != "":
		credentials = connect.BasicCredentials(h.User, string(h.Password))
	}
	usual := "Proxy-Authorization"
	if h.Proto == "websocket" {
		usual = "Authorization"
	}
	header := token.in(cmp.Or(h.CredentialsField, usual))
	if (credentials != "" || token != nil) && !h.Insecure {
		if to, clear := h.CleartextAddress(first); clear {
			return nil, fmt.Errorf("gateway: the credentials for %q would go there unencrypted, and it is not said to be insecure", to)
		}
	}
	if credentials != "" && h.CredentialsField != "" {
		fixed := connect.Field{Name: h.CredentialsField, Value: credentials}
		header, credentials = func(context.Context, string) (connect.Fields, error) { return connect.Fields{fixed}, nil }, ""
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: h.ServerName, DynamicRecordSizingDisabled: true}
	if h.Certificate != "" {
		pair, err := tls.X509KeyPair([]byte(h.Certificate), []byte(h.Key))
		if err != nil {
			return nil, fmt.Errorf("gateway: the certificate for %q: %w", addr, err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	if h.KeyName != "" {
		cfg.GetClientCertificate = t.clientCertificate(h.KeyName)
	}
	verifier, err := t.hopVerifier(h, addr, h.Peers)
	if err != nil {
		return nil, err
	}
	verifier.Client(cfg)
	caller, err := callerHeader(h, cfg)
	if err != nil {
		return nil, err
	}
	switch h.Proto {
	case "hbone":
		outer := &hbone.Dialer{Gateway: addr, Dialer: budgetDialer{dialer, t.Budget}, TLS: cfg, Verifier: verifier, Via: t.via()}
		if len(h.InnerPeers) == 0 {
			outer.SessionHeader = caller
			return outer, nil
		}
		behind, err := t.hopVerifier(h, addr, h.InnerPeers)
		if err != nil {
			return nil, err
		}
		return &hbone.Double{Outer: outer, TLS: cfg, Verifier: behind}, nil
	case "connect", "connect-h2":
		proxy, secure := strings.CutPrefix(addr, "https://")
		if !secure {
			cfg = nil
		}
		if h.Proto == "connect-h2" {
			d := &h2.Dialer{Proxy: proxy, Dialer: budgetDialer{dialer, t.Budget}, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via()}
			return t.withDatagrams(d, proxy), nil
		}
		return &connect.Dialer{Proxy: proxy, Dialer: dialer, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via()}, nil
	case "connect-h3":
		d := &h3.Dialer{Proxy: addr, TLS: cfg, Authorization: credentials, Header: header, SessionHeader: caller, Via: t.via(), Lookup: t.datagramAddresses, Listen: t.listenUDP}
		if !first {
			if before, ok := dialer.(gatewayList); !ok || !before.carriesDatagrams() {
				return nil, fmt.Errorf("gateway: %q can be asked by connect-h3 only if the gateway before it is asked by connect-h2 or connect-h3, which carry datagrams", addr)
			}
			d.Tunneled, d.Listen = true, listenTunneled(dialer, addr)
			d.Lookup = func(context.Context, string) ([]netip.Addr, error) { return []netip.Addr{tunneledAddr}, nil }
		}
		return t.withDatagrams(d, addr), nil
	case "socks5":
		return &socks5.Dialer{Proxy: addr, Dialer: dialer, User: h.User, Password: string(h.Password)}, nil
	case "websocket":
		to, _, err := ws.ParseURL(addr)
		if err != nil {
			return nil, err
		}
		if h.ServerName != "" { // the URL has it, too: a server may serve several names
			addr, dialer = withHost(addr, to, h.ServerName), dialerTo{dialer, to}
		}
		single := &ws.Dialer{URL: addr, Dialer: dialer, TLS: cfg, Authorization: credentials, Header: header, Via: t.via()}
		if h.HTTP2 {
			return NewWebSocketDialer(single), nil
		}
		return single, nil
	}
	return nil, fmt.Errorf("gateway: no hop is called %q", h.Proto)
}

// withHost returns the URL of a WebSocket with another host, where to is its HOST:PORT.
func withHost(url, to, host string) string {
	scheme, rest, _ := strings.Cut(url, "://")
	_, path, _ := strings.Cut(rest, "/")
	_, port, _ := net.SplitHostPort(to)
	return scheme + "://" + net.JoinHostPort(host, port) + "/" + path
}

// A dialerTo dials one address, whatever it is asked for.
type dialerTo struct {
	tunnel.Dialer
	addr string
}

// DialContext implements tunnel.Dialer.
func (d dialerTo) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return d.Dialer.DialContext(ctx, network, d.addr)
}

// DialHandshake implements connect.HandshakeDialer.
func (d dialerTo) DialHandshake(ctx context.Context, network, _ string, handshake connect.Handshake) (net.Conn, error) {
	return connect.DialHandshake(ctx, d.Dialer, network, d.addr, handshake)
}

// HopVerifier returns what verifies a gateway of h at addr, which must be one of peers, or
// have its name where there are none.
func HopVerifier(h *registry.Hop, addr string, peers []string) (*identity.Verifier, error) {
	v := &identity.Verifier{Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: peers}}
	domain := ""
	if len(peers) == 0 {
		v.Want.DNSName = serverName(h, addr)
	} else {
		rest, _ := strings.CutPrefix(peers[0], "spiffe://")
		domain, _, _ = strings.Cut(rest, "/")
		for _, p := range peers[1:] {
			if h.Trust == nil && p != "spiffe://"+domain && !strings.HasPrefix(p, "spiffe://"+domain+"/") {
				return nil, fmt.Errorf("gateway: %q and %q, which the gateway at %q may be, are of two trust domains, and it is not known which CA speaks for which", peers[0], p, addr)
			}
		}
	}
	switch {
	case h.Trust != nil:
		for _, domain := range slices.Sorted(maps.Keys(h.Trust)) {
			roots, err := identity.ParseCertificates(h.Trust[domain])
			if err != nil {
				return nil, fmt.Errorf("gateway: the roots for %q: those of the trust domain %q hold no certificate", addr, domain)
			}
			v.Trust = append(v.Trust, identity.NewTrust(domain, roots...))
		}
	case h.Roots != "":
		roots, err := identity.ParseCertificates(h.Roots)
		if err != nil {
			return nil, fmt.Errorf("gateway: the roots for %q hold no certificate", addr)
		}
		v.Trust = []*identity.Trust{identity.NewTrust(domain, roots...)}
	default:
		v.System = true
	}
	return v, nil
}

// hopVerifier is HopVerifier for a hop that may name its trust.
func (t *Transports) hopVerifier(h *registry.Hop, addr string, peers []string) (*identity.Verifier, error) {
	if len(h.TrustNames) == 0 {
		return HopVerifier(h, addr, peers)
	}
	v := &identity.Verifier{Trust: t.trust(h.TrustNames), Want: identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: peers}}
	if len(peers) == 0 {
		v.Want.DNSName = serverName(h, addr)
	}
	return v, nil
}

// store returns the Store of keys and trust.
func (t *Transports) store() *identity.Store {
	if t.Identity == nil {
		return new(identity.Store)
	}
	return t.Identity
}

// trust returns the trust with those names.
func (t *Transports) trust(names []string) (all []*identity.Trust) {
	store := t.store()
	for _, name := range names {
		all = append(all, store.Trust(name))
	}
	return all
}

// clientCertificate returns what shows the key with that name, whatever it is by then. It
// is shown whatever CAs the other side names: there is no other one.
func (t *Transports) clientCertificate(name string) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	key := t.store().Key(name)
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return key.Certificate() }
}

// serverName returns the name that a gateway of h at addr must have.
func serverName(h *registry.Hop, addr string) string {
	if h.ServerName != "" {
		return h.ServerName
	}
	return hostOf(h.HostPort(addr))
}

// hostOf returns the host of a HOST:PORT, whose port may be left out.
func hostOf(addr string) string {
	if host, _, err := net.SplitHostPort(addr); err == nil {
		return host
	}
	return addr
}
