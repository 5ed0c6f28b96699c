package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"culvert.dev/dns"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// oneCheck is how long one check may take.
const oneCheck = 5 * time.Second

// settingsOnly is what transports of a doctor need of the machine.
type settingsOnly struct{}

func (settingsOnly) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	return new(dns.Resolver).Lookup(ctx, host)
}

func (settingsOnly) readFile(name string) ([]byte, error) { return os.ReadFile(name) }

// keys looks at the certificates and CAs, and at the clock by them.
func (d *doctor) keys(store *identity.Store, c *file.Config) {
	renew := "replace its files by new ones; they are followed"
	if c.Identity != nil && c.Identity.Joined != "" {
		renew = "join again: culvert join --replace - < token, with a new token of culvert invite --device"
	}
	fine, now := 0, d.now()
	for _, e := range store.Entries() {
		if e.Err != nil {
			d.add(e.Kind, e.Name, checkFailed, "fix its files", "%s %q can't be used: %s", e.Kind, e.Name, e.Err)
			continue
		}
		for _, end := range e.Ends {
			switch {
			case now.Before(end.NotBefore):
				d.add("clock", e.Name, checkFailed, "set the clock: timedatectl set-ntp true, or date -s; if the clock is right, make a new certificate",
					"%s %q is valid from %s on, and the clock of this machine says %s: the clock is behind", e.Kind, e.Name, end.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
			case now.After(end.NotAfter):
				d.add(e.Kind, e.Name, checkFailed, renew, "%s %q of %s has expired at %s", e.Kind, e.Name, end.Of, end.NotAfter.UTC().Format(time.RFC3339))
			default:
				fine++
			}
		}
	}
	if fine > 0 {
		d.add("key", "", checkOK, "", "%s of keys and CAs can be used", plural(fine, "certificate"))
	}
}

// gateway looks at the way to a gateway.
func (d *doctor) gateway(ctx context.Context, transports *upstream.Transports, g *doctorGateway, store *identity.Store) {
	if proxy := transports.ProxyTo(g.address); proxy != "" { // which looks the name up, and alone connects
		if d.reachesProxy(ctx, proxy) {
			d.carriers(ctx, transports, g)
		}
		return
	}
	host, _, err := net.SplitHostPort(g.address)
	if err != nil {
		d.add("gateway", g.address, checkFailed, "write HOST:PORT", "%q is not the address of a gateway", g.address)
		return
	}
	if !d.resolves(ctx, host) {
		return
	}
	overTCP := false
	for i := range g.hops {
		overTCP = overTCP || g.hops[i].Proto != "connect-h3"
	}
	if overTCP && !d.reaches(ctx, g, host, store) {
		g.hops = slices.DeleteFunc(g.hops, func(h registry.Hop) bool { return h.Proto != "connect-h3" })
	}
	d.carriers(ctx, transports, g)
}

// reachesProxy connects to the upstream proxy.
func (d *doctor) reachesProxy(ctx context.Context, address string) bool {
	c, err := dialLimited(ctx, address, 0)
	if err != nil {
		d.add("proxy", address, checkFailed, "correct url of upstreamProxy, or connect this machine to the network of the proxy", "the upstream proxy %s can't be reached: %s", address, err)
		return false
	}
	_ = c.Close()
	d.add("proxy", address, checkOK, "", "the upstream proxy %s accepts connections", address)
	return true
}

// resolves looks the host of a gateway up.
func (d *doctor) resolves(ctx context.Context, host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, oneCheck)
	defer cancel()
	addrs, err := d.lookup(ctx, host)
	var de *net.DNSError
	switch {
	case err == nil && len(addrs) > 0:
		d.add("dns", host, checkOK, "", "%s is %s", host, strings.Join(addrs, ", "))
		return true
	case errors.As(err, &de) && de.IsNotFound:
		d.add("dns", host, checkFailed, "correct the name of the gateway, or have DNS answer it", "DNS does not know the gateway %s", host)
	default:
		d.add("dns", host, checkFailed, "see /etc/resolv.conf, or resolvectl status: its DNS server has to answer this machine", "DNS does not answer for the gateway %s: %v", host, err)
	}
	return false
}

// reaches connects to a gateway by TCP and shakes hands by TLS, and says what is in the way.
// What the gateway's certificate says is for carriers to verify.
func (d *doctor) reaches(ctx context.Context, g *doctorGateway, host string, store *identity.Store) bool {
	c, err := dialLimited(ctx, g.address, 0)
	if err != nil {
		text, remedy := whyNotConnected(g.address, err)
		d.add("tcp", g.address, checkFailed, remedy, "%s", text)
		return false
	}
	_ = c.Close()
	hop := &g.hops[0]
	cfg := &tls.Config{ServerName: hop.ServerName, InsecureSkipVerify: true} // carriers verify; this is about what is between
	if cfg.ServerName == "" {
		cfg.ServerName = host
	}
	if hop.KeyName != "" {
		if cert, err := store.Key(hop.KeyName).Certificate(); err == nil {
			cfg.Certificates = []tls.Certificate{*cert}
		}
	}
	if strings.HasPrefix(strings.Join(hop.Addresses, ""), "ws://") {
		return true
	}
	state, err := handshakeWith(ctx, g.address, cfg, 0)
	var record tls.RecordHeaderError
	switch {
	case err == nil:
		d.clockBy(g.address, state)
		return true
	case errors.As(err, &record):
		if portal := portalAt(ctx, g.address, host); portal != "" {
			d.add("portal", g.address, checkFailed, "open any http:// page in a browser on this machine and log in to the network, then try again", "a captive portal answers in place of the gateway %s: %s", g.address, portal)
		} else {
			d.add("tls", g.address, checkFailed, "correct the address of the gateway: the port has to be one where it ends TLS", "what answers at %s does not speak TLS", g.address)
		}
	case timedOut(err):
		if _, small := handshakeWith(ctx, g.address, cfg, smallSegment); small == nil {
			d.add("mtu", g.address, checkFailed, "lower the MTU of this machine's interface (ip link set dev IFACE mtu 1280), or have the router clamp the MSS and pass ICMP \"fragmentation needed\"",
				"large packets to or from the gateway %s are lost, and small ones are not: there is an MTU hole on the way", g.address)
		} else {
			d.add("tls", g.address, checkFailed, "let TLS through at the firewall, or use another port of the gateway", "the gateway %s takes connections and gives no answer to TLS: something on the way drops it", g.address)
		}
	default:
		d.add("tls", g.address, checkFailed, "see the log of the gateway, which has the reason if the connection came there; else a firewall on the way ends TLS", "TLS with the gateway %s fails: %s", g.address, err)
	}
	return false
}

// clockBy compares the clock with the certificate that a gateway has shown.
func (d *doctor) clockBy(address string, state *tls.ConnectionState) {
	leaf, now := state.PeerCertificates[0], d.now()
	switch {
	case now.Before(leaf.NotBefore):
		d.add("clock", address, checkFailed, "set the clock: timedatectl set-ntp true, or date -s", "the certificate of the gateway %s is valid from %s on, and the clock of this machine says %s: the clock is behind",
			address, leaf.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	case now.After(leaf.NotAfter):
		d.add("clock", address, checkFailed, "set the clock if it is ahead; else have the gateway's operator renew its certificate", "the certificate of the gateway %s was valid until %s, and the clock of this machine says %s",
			address, leaf.NotAfter.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	default:
		d.add("clock", address, checkOK, "", "the clock agrees with the certificate of the gateway %s", address)
	}
}

// dialLimited connects by TCP, with segments of at most that many bytes if that is not 0.
func dialLimited(ctx context.Context, address string, segment int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, oneCheck)
	defer cancel()
	dialer := new(net.Dialer)
	if segment > 0 {
		dialer.Control = func(_, _ string, raw syscall.RawConn) error {
			var err error
			return errors.Join(raw.Control(func(fd uintptr) { err = limitSegment(fd, segment) }), err)
		}
	}
	return dialer.DialContext(ctx, "tcp", address)
}

// handshakeWith shakes hands by TLS.
func handshakeWith(ctx context.Context, address string, cfg *tls.Config, segment int) (*tls.ConnectionState, error) {
	c, err := dialLimited(ctx, address, segment)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, oneCheck)
	defer cancel()
	tc := tls.Client(c, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	state := tc.ConnectionState()
	return &state, nil
}

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || isTimeout(err)
}

func whyNotConnected(address string, err error) (text, remedy string) {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Sprintf("nothing accepts connections at %s", address), "start the gateway, or correct its address and port"
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		return fmt.Sprintf("this machine has no route to the gateway %s", address), "connect this machine to a network: ip route get shows what is missing"
	case timedOut(err):
		return fmt.Sprintf("connections to the gateway %s get no answer", address), "have the firewall of this network let TCP to that port out, or use a port of the gateway that it lets out, such as 443"
	}
	return fmt.Sprintf("the gateway %s can't be reached: %s", address, err), "see whether a firewall or a proxy is in the way"
}

// portalAt asks by plain HTTP where a gateway should be, and returns what a captive portal
// says; "" if there is none.
func portalAt(ctx context.Context, address, host string) string {
	for _, at := range []string{address, net.JoinHostPort(host, "80")} {
		if said := askPlain(ctx, at, host); said != "" {
			return said
		}
	}
	return ""
}

func askPlain(ctx context.Context, address, host string) string {
	c, err := dialLimited(ctx, address, 0)
	if err != nil {
		return ""
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(oneCheck))
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host); err != nil {
		return ""
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(c, 64<<10)), nil)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	switch to := resp.Header.Get("Location"); {
	case resp.StatusCode/100 == 3 && to != "":
		return fmt.Sprintf("it redirects to %q", to[:min(len(to), 200)])
	case resp.StatusCode == http.StatusNetworkAuthenticationRequired, strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html"):
		return fmt.Sprintf("it answers HTTP with a page (status %d)", resp.StatusCode)
	}
	return ""
}

// carriers tries each carrier to a gateway. It asks for a name that no gateway serves: the
// gateway's no is the proof that it was reached.
func (d *doctor) carriers(ctx context.Context, transports *upstream.Transports, g *doctorGateway) {
	errs := make([]error, len(g.hops))
	var wg sync.WaitGroup
	for i := range g.hops {
		wg.Go(func() { errs[i] = tryCarrier(ctx, transports, g.hops[i]) })
	}
	wg.Wait()
	works := false
	for _, err := range errs {
		works = works || err == nil
	}
	said := map[string]bool{}
	for i, err := range errs {
		proto := g.hops[i].Proto
		if err == nil {
			d.add("carrier", g.address, checkOK, "", "the gateway %s is reached by %s", g.address, proto)
			continue
		}
		state := checkFailed
		if works {
			state = checkWarning
		}
		check, text, remedy := whyNotCarried(g.address, proto, err)
		if check != "carrier" && said[text] {
			continue
		}
		said[text] = true
		d.add(check, g.address, state, remedy, "%s", text)
	}
}

func tryCarrier(ctx context.Context, transports *upstream.Transports, hop registry.Hop) error {
	ctx, cancel := context.WithTimeout(ctx, 2*oneCheck)
	defer cancel()
	n, err := transports.NextHop([]registry.Hop{hop})
	if err != nil {
		return err
	}
	c, err := n.DialContext(ctx, "tcp", "doctor.culvert.alt:443")
	if err == nil {
		_ = c.Close()
		return nil
	}
	var te *tunnel.Error
	if errors.As(err, &te) && (te.Reason == tunnel.NoRoute || te.Reason == tunnel.NotExposed || te.Reason == tunnel.Denied) {
		return nil
	}
	return err
}

func whyNotCarried(address, proto string, err error) (check, text, remedy string) {
	var unknown x509.UnknownAuthorityError
	var te *tunnel.Error
	said := err.Error()
	switch {
	case errors.As(err, &unknown), strings.Contains(said, "unknown CA"):
		return "trust", fmt.Sprintf("the certificate of the gateway %s is signed by a CA that this machine does not trust", address),
			"name the gateway's CA by --ca FILE or trust; if you did, another server answers in the gateway's place"
	case strings.Contains(said, "has expired"), strings.Contains(said, "not valid yet"):
		return "trust", fmt.Sprintf("the certificate of the gateway %s is not valid by the clock of this machine: %s", address, said), "set the clock, or have the gateway's operator renew its certificate"
	case strings.Contains(said, "does not have the name"), strings.Contains(said, "want one of"):
		return "trust", fmt.Sprintf("what answers at %s is not the gateway that is expected: %s", address, said), "correct --server-name or --peer, or the address"
	case errors.As(err, &te) && te.Reason == tunnel.NoAuth, strings.Contains(said, "remote error: tls"):
		return "identity", fmt.Sprintf("the gateway %s does not accept the identity of this machine: %s", address, said), "show a certificate or token that the gateway trusts; its log has the reason"
	case strings.Contains(said, "upstream proxy ") && proto != "connect-h3":
		return "proxy", fmt.Sprintf("the upstream proxy does not connect to the gateway %s: %s", address, said), "do what the text says of upstreamProxy; see whether the proxy may connect to that host and port"
	case proto == "connect-h3":
		return "carrier", fmt.Sprintf("the gateway %s is not reached by connect-h3: %s", address, said), "let UDP to that port through, or leave connect-h3 out of transports: the other carriers use TCP"
	}
	return "carrier", fmt.Sprintf("the gateway %s is not reached by %s: %s", address, proto, said), "have the gateway speak " + proto + " there, or leave it out of transports"
}
