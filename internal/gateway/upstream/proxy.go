package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"reflect"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A Proxy is an HTTP proxy between this host and all gateways, as companies have it. The
// first hop is dialed through it, by CONNECT with its name, so that the proxy resolves it.
// A first hop on loopback is dialed directly.
type Proxy struct {
	URL   string // http://HOST:PORT, or https://HOST:PORT for TLS to the proxy
	Roots string // PEM, of the proxy's certificate; "" means those of the system

	// User is sent with a password by Basic, RFC 7617; "" sends none. The password is what
	// PasswordFile contains, or what PasswordCommand writes, without the end of its line.
	// It is kept until the proxy refuses it.
	User            string
	PasswordFile    string
	PasswordCommand []string
}

// UseProxy has gateways dialed through p from now on; nil means that they are dialed
// directly. Connections that stand are not touched. On error nothing has changed.
func (t *Transports) UseProxy(p *Proxy) error {
	was := t.proxy.Load()
	if p == nil {
		t.proxy.Store(nil)
		if was != nil {
			was.close()
		}
		return nil
	}
	if was != nil && reflect.DeepEqual(was.settings, *p) {
		return nil // with the password that it has
	}
	next, err := t.newProxyDialer(p)
	if err != nil {
		return err
	}
	t.proxy.Store(next)
	if was != nil {
		was.close()
	}
	return nil
}

// A proxyDialer dials gateways through a Proxy.
type proxyDialer struct {
	settings  Proxy
	address   string
	tls       *tls.Config // nil for plaintext
	direct    tunnel.Dialer
	passwords *passwords // nil for no credentials
}

func (t *Transports) newProxyDialer(p *Proxy) (*proxyDialer, error) {
	u, err := url.Parse(p.URL)
	if err != nil || u.Port() == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return nil, fmt.Errorf("upstream proxy: %q is not http://HOST:PORT or https://HOST:PORT", p.URL)
	}
	d := &proxyDialer{settings: *p, address: u.Host, direct: directDialer{t}}
	if u.Scheme == "https" {
		d.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if p.Roots != "" {
			d.tls.RootCAs = x509.NewCertPool()
			if !d.tls.RootCAs.AppendCertsFromPEM([]byte(p.Roots)) {
				return nil, errors.New("upstream proxy: its roots hold no certificate")
			}
		}
	}
	if p.User != "" {
		d.passwords = newPasswords(t.passwordReader(p))
	}
	return d, nil
}

// close ends what reads the password.
func (d *proxyDialer) close() {
	if d.passwords != nil {
		_ = d.passwords.runs.Close()
	}
}

// bypasses reports whether a gateway is dialed directly in spite of the proxy.
func bypasses(to connect.Authority) bool {
	return to.Addr.IsValid() && to.Addr.Unmap().IsLoopback() || !to.Addr.IsValid() && registry.IsLocalhost(to.Name.String())
}

// ProxyTo returns the address of the proxy through which the gateway at addr is dialed; "" for
// none.
func (t *Transports) ProxyTo(addr string) string {
	proxy := t.proxy.Load()
	if to, err := connect.ParseAuthority(addr); proxy == nil || err != nil || bypasses(to) {
		return ""
	}
	return proxy.address
}

// dial dials the gateway at addr through the proxy. Where the proxy refuses the password,
// one that is another by now is sent.
func (d *proxyDialer) dial(ctx context.Context, addr string) (net.Conn, error) {
	// The handshake that a caller may wait for is that with the gateway.
	ctx = tunnel.WithHandshakeDone(ctx, func() error { return nil })
	for retry := false; ; retry = true {
		password, credentials := "", ""
		if d.passwords != nil {
			var err error
			if password, err = d.passwords.get(ctx); err != nil {
				return nil, tunnel.Refusef(tunnel.DialFailed, "upstream proxy %q is not asked for %q: %w", d.address, addr, err)
			}
			credentials = connect.BasicCredentials(d.settings.User, password)
		}
		c, status, err := d.ask(ctx, addr, credentials)
		if d.passwords != nil {
			switch {
			case status == http.StatusProxyAuthRequired:
				d.passwords.refuse(password)
				if !retry {
					continue
				}
			case err == nil:
				d.passwords.accept(password)
			}
		}
		return c, err
	}
}

// ask sends one request to the proxy. The status is 0 where it has not answered.
func (d *proxyDialer) ask(ctx context.Context, addr, credentials string) (c net.Conn, status int, err error) {
	var fields connect.Fields
	carrier := connect.Dialer{Proxy: d.address, Dialer: d.direct, TLS: d.tls, Authorization: credentials, Answer: func(s int, f connect.Fields) error {
		status, fields = s, f
		if isPage(f) {
			return errors.New("it is a web page")
		}
		return nil
	}}
	c, err = carrier.DialContext(ctx, "tcp", addr)
	if err == nil || ctx.Err() != nil {
		return c, status, err
	}
	reason := tunnel.DialFailed // and no refusal of the gateway's: another one may be let through
	switch tunnel.ReasonOf(err) {
	case tunnel.DialTimeout, tunnel.LookupError, tunnel.LookupTime, tunnel.Prohibited, tunnel.Loop, tunnel.Overload:
		if status == 0 {
			reason = tunnel.ReasonOf(err)
		}
	}
	return nil, status, tunnel.Refusef(reason, "upstream proxy %q: %s: %w", d.address, d.advice(status, fields), err)
}

// advice says what to do about an answer of the proxy, or none.
func (d *proxyDialer) advice(status int, fields connect.Fields) string {
	switch {
	case status == http.StatusProxyAuthRequired && d.passwords == nil:
		return "it asks for credentials: set user, and passwordCommand or passwordFile, of upstreamProxy"
	case status == http.StatusProxyAuthRequired && !offersBasic(fields):
		return "it asks for credentials of another kind than Basic: have its administrator allow Basic, or run a local proxy that speaks the kind it asks for"
	case status == http.StatusProxyAuthRequired:
		return "it refuses user and password: check user of upstreamProxy and what its passwordCommand writes, or its passwordFile has"
	case status == 0:
		return "check that url of upstreamProxy is an HTTP proxy, and that it runs"
	case status/100 == 3, status == http.StatusNetworkAuthenticationRequired, isPage(fields) && status/100 == 2:
		return "it answers with a web page, as a captive portal does: log in with a browser, then try again"
	case status == http.StatusForbidden, status == http.StatusMethodNotAllowed:
		return "it does not allow CONNECT to this host and port: have its administrator allow it, or use a gateway at port 443"
	}
	return "it cannot reach the gateway"
}

// isPage reports whether fields are those of a web page.
func isPage(fields connect.Fields) bool {
	for _, f := range fields {
		if strings.EqualFold(f.Name, "Content-Type") && strings.HasPrefix(strings.ToLower(f.Value), "text/html") {
			return true
		}
	}
	return false
}

// offersBasic reports whether Basic is among what the proxy takes, RFC 9110 section 11.7.1, or
// it says nothing of it. A scheme begins a value, or comes behind a comma.
func offersBasic(fields connect.Fields) bool {
	said := false
	for _, f := range fields {
		if !strings.EqualFold(f.Name, "Proxy-Authenticate") {
			continue
		}
		said = true
		for part := range strings.SplitSeq(f.Value, ",") {
			scheme, _, _ := strings.Cut(strings.TrimSpace(part), " ")
			if strings.EqualFold(scheme, "Basic") {
				return true
			}
		}
	}
	return !said
}

// errNoDatagrams is the error for a carrier of UDP where there is a proxy.
var errNoDatagrams = errors.New("connect-h3 is carried by UDP, which does not pass upstreamProxy: use connect-h2 or websocket")

// datagramAddresses is addresses for the first hop of a carrier of UDP.
func (t *Transports) datagramAddresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); t.proxy.Load() != nil && (err != nil || !a.Unmap().IsLoopback()) && !registry.IsLocalhost(host) {
		return nil, &tunnel.Error{Reason: tunnel.DialFailed, Err: errNoDatagrams}
	}
	return t.addresses(ctx, host)
}
