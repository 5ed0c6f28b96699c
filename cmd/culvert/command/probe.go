package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

type probeOptions struct {
	target   string // NAME[:PORT]
	via      string
	mode     string
	cert     string
	key      string
	ca       string
	user     string
	token    string
	alpn     []string
	noTLS    bool
	timeout  time.Duration
	output   string
	insecure bool
	peers    []string
	behind   []string
	send     string
}

func newProbe() *cobra.Command {
	var o probeOptions
	cmd := &cobra.Command{
		Use:   "probe NAME[:PORT]",
		Short: "Dial a service through a gateway and show every step",
		Long: `Probe dials a service through a gateway as a client would, and shows each step
with its time, the certificates that the service presented and its identity. A
refusal is shown with its reason. The exit code is 0 if the service was reached,
1 if not.

With --mode sni several reasons share one alert, so that strangers cannot tell a
private service from one that does not exist: "culvert explain" at the gateway
tells them apart.`,
		Example: `  culvert probe orders.example.com --via gateway.example.com:443 --mode sni
  culvert probe orders.example.com:443 --via 192.0.2.1:443 --mode connect --user alice:secret
  culvert probe db.example.com:5432 --via 192.0.2.1:443 --mode connect --no-tls
  culvert probe db.example.com:5432 --via 192.0.2.1:1080 --mode socks5 --no-tls
  culvert probe db.example.com --via 192.0.2.1:20017 --mode tcp --no-tls
  culvert probe orders.example.com --via 192.0.2.1:444 --mode proxy
  culvert probe orders.example.com --via wss://lb.example.com/ --mode websocket
  culvert probe orders.example.com --via https://gateway.example.com:443 --mode connect-h2
  culvert probe orders.example.com --via gateway.example.com:443 --mode connect-h3
  culvert probe db.example.com:5432 --via 192.0.2.1:15008 --mode hbone --cert me.pem --key me.key --ca ca.pem --peer spiffe://example.com --no-tls
  culvert probe www.example.com --via gateway.example.com:443 --mode quic
  culvert probe dns.example.com --via 192.0.2.1:53 --mode udp --send '\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x01'
  culvert probe dns.example.com:53 --via gateway.example.com:443 --mode connect-udp --token secret --send ping
  culvert probe orders.example.com --via 192.0.2.1:443 --cert me.pem --key me.key --ca ca.pem -o json`,
		Args: args(1, "one NAME[:PORT]"),
		RunE: func(cmd *cobra.Command, a []string) error {
			o.target = a[0]
			return runProbe(cmd.Context(), cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.via, "via", "", "address of the gateway, HOST:PORT; for TLS https://HOST:PORT with --mode connect or connect-h2, for HTTP/2 in place of HTTP/3 https://HOST:PORT with --mode connect-udp, and wss://HOST[:PORT][/PATH/] with --mode websocket or websocket-h2")
	f.StringVar(&o.mode, "mode", "sni", "how to ask: "+oneOf(probeModes))
	f.StringVar(&o.cert, "cert", "", "file with the client's certificate chain, PEM, for the service and for a gateway that terminates TLS")
	f.StringVar(&o.key, "key", "", "file with its private key, PEM")
	f.StringVar(&o.ca, "ca", "", "file with CA certificates for services and gateways, PEM (default: the system's)")
	f.StringVar(&o.user, "user", "", "NAME:PASSWORD for the gateway, --mode connect, connect-h2, connect-h3, connect-udp, socks5, websocket or websocket-h2")
	f.StringVar(&o.token, "token", "", "bearer token for the gateway, --mode connect, connect-h2, connect-h3, connect-udp, websocket or websocket-h2")
	f.StringSliceVar(&o.peers, "peer", nil, "with --mode hbone: accepted SPIFFE IDs of the gateway, or spiffe://DOMAIN (default: its certificate has its name)")
	f.StringSliceVar(&o.behind, "behind", nil, "with --mode hbone, double HBONE: accepted SPIFFE IDs of the inner server, or spiffe://DOMAIN")
	f.StringSliceVar(&o.alpn, "alpn", nil, "application protocols to offer to the service (default with --mode quic: h3)")
	f.StringVar(&o.send, "send", "", "with --mode udp or connect-udp: datagram to send, which the service answers; text, with \\x00 for bytes")
	f.BoolVar(&o.noTLS, "no-tls", false, "the service does not speak TLS: stop when the tunnel is open, any --mode but sni and quic")
	f.BoolVar(&o.insecure, "insecure", false, "report a certificate that cannot be verified, instead of failing")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "time limit of the whole probe")
	_ = cmd.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions(probeModes, cobra.ShellCompDirectiveNoFileComp))
	addOutput(cmd, &o.output)
	return cmd
}

func runProbe(ctx context.Context, w io.Writer, o *probeOptions) error {
	p, err := newProber(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	start := time.Now()
	failed := p.run(ctx)
	p.report.Reached = failed == nil
	p.report.Duration = time.Since(start).Round(time.Microsecond).String()
	defer p.close()
	if o.output == "json" {
		if err := writeJSON(w, p.report); err != nil {
			return err
		}
	} else {
		p.report.print(w)
	}
	if failed != nil {
		return errSilent
	}
	return nil
}

// A prober carries one probe through its steps.
type prober struct {
	o     *probeOptions
	port  int
	tls   *tls.Config
	roots *x509.CertPool

	ca     string // that roots has, PEM; "" for those of the system
	send   []byte
	report probeReport

	conn   net.Conn  // to the service, once it stands
	dialed io.Closer // what dialed it, if that is to be closed
}

// goodbye is how long a service has to end its side.
const goodbye = 500 * time.Millisecond

// close ends the tunnel in order, so that no gateway on the way takes it for
// one that broke.
func (p *prober) close() {
	if p.conn != nil {
		if half, ok := p.conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
			_ = p.conn.SetReadDeadline(time.Now().Add(goodbye))
			_, _ = io.Copy(io.Discard, io.LimitReader(p.conn, 1<<20))
		}
		_ = p.conn.Close()
	}
	if p.dialed != nil {
		_ = p.dialed.Close()
	}
}

func newProber(o *probeOptions) (*prober, error) {
	p := &prober{o: o, report: probeReport{Target: o.target, Via: o.via, Mode: o.mode}}
	host, port := o.target, ""
	if h, pt, err := net.SplitHostPort(o.target); err == nil {
		host, port = h, pt
	}
	// An address is no server name and may be no destination: what a gateway
	// makes of it is what a probe is for.
	_, err := tunnel.ParseName(host)
	if err != nil && !errors.Is(err, tunnel.ErrNameAddress) {
		return nil, usageError("", "%q is not a name to probe: %w", host, err)
	}
	if port != "" {
		if p.port, err = strconv.Atoi(port); err != nil || p.port < 1 || p.port > 65535 {
			return nil, usageError("", "port %q is not a number from 1 to 65535", port)
		}
	}
	if o.via == "" {
		return nil, usageError("add --via HOST:PORT, the address of the gateway", "through which gateway?")
	}
	if len(o.behind) > 0 && o.mode != "hbone" {
		return nil, usageError("use --mode hbone", "--behind has no effect with --mode %s", o.mode)
	}
	if o.send != "" && o.mode != "udp" && o.mode != "connect-udp" {
		return nil, usageError("use --mode udp or connect-udp", "--send has no effect with --mode %s", o.mode)
	}
	switch o.mode {
	case "sni", "quic":
		if o.user != "" || o.token != "" || o.noTLS {
			return nil, usageError("use --mode connect or socks5", "--user, --token and --no-tls have no effect with --mode %s", o.mode)
		}
	case "udp", "connect-udp":
		if p.send, err = unescape(o.send); err != nil || len(p.send) == 0 {
			return nil, usageError("give --send TEXT, with \\x00 for bytes", "--mode %s needs a datagram that the service answers, and %q cannot be parsed as one", o.mode, o.send)
		}
		if o.mode == "connect-udp" {
			if p.port == 0 {
				return nil, usageError("write NAME:PORT", "--mode connect-udp asks the gateway for a port, and %q has none", o.target)
			}
			break
		}
		fallthrough
	case "tcp", "proxy":
		if o.user != "" || o.token != "" {
			return nil, usageError("remove them", "--user and --token have no effect with --mode %s, which asks for no credentials", o.mode)
		}
	case "connect", "connect-h2", "connect-h3", "hbone", "socks5", "websocket", "websocket-h2":
		if o.mode == "hbone" && (o.user != "" || o.token != "") {
			return nil, usageError("use --cert and --key", "--user and --token have no effect with --mode hbone")
		}
		if o.mode == "hbone" && o.cert == "" {
			return nil, usageError("give --cert and --key", "--mode hbone needs a client certificate")
		}
		if p.port == 0 {
			p.port = 443
		}
		if o.token != "" && o.mode == "socks5" {
			return nil, usageError("use --user", "--token has no effect with --mode socks5")
		}
	default:
		return nil, usageError("use --mode "+oneOf(probeModes), "unknown mode %q", o.mode)
	}
	if strings.HasPrefix(o.mode, "websocket") && strings.Contains(o.via, "://") {
		if _, _, err := ws.ParseURL(o.via); err != nil {
			return nil, usageError("write HOST:PORT, or wss://HOST/", "--via: %w", err)
		}
	} else if _, _, err := net.SplitHostPort(p.gateway()); err != nil {
		return nil, usageError("write HOST:PORT", "--via %q: %w", o.via, err)
	}
	return p, p.loadKeys(host)
}

func (p *prober) loadKeys(serverName string) error {
	// The chain is verified after the handshake, so that it can be shown
	// when it does not verify.
	p.tls = &tls.Config{ServerName: strings.TrimSuffix(serverName, "."), NextProtos: p.o.alpn, InsecureSkipVerify: true}
	switch {
	case p.o.cert != "" && p.o.key == "":
		return usageError("give both, PEM", "--cert needs --key")
	case p.o.key != "" && p.o.cert == "":
		return usageError("give both, PEM", "--key needs --cert")
	case p.o.cert != "":
		pair, err := tls.LoadX509KeyPair(p.o.cert, p.o.key)
		if err != nil {
			return usageError("", "client certificate: %w", noSuchFile(err))
		}
		p.tls.Certificates = []tls.Certificate{pair}
	}
	if p.o.ca != "" {
		pem, err := os.ReadFile(p.o.ca)
		if err != nil {
			return usageError("", "--ca: %w", noSuchFile(err))
		}
		p.roots = x509.NewCertPool()
		if !p.roots.AppendCertsFromPEM(pem) {
			return usageError("", "--ca %s holds no PEM certificate", p.o.ca)
		}
		p.ca = string(pem)
	}
	for _, ids := range [][]string{p.o.peers, p.o.behind} {
		if _, err := p.newVerifier(ids); err != nil {
			return usageError("", "%w", err)
		}
	}
	return nil
}

// run goes through the steps and returns what stopped it.
func (p *prober) run(ctx context.Context) error {
	switch p.o.mode {
	case "quic":
		return p.quic(ctx)
	case "udp":
		return p.udp(ctx)
	case "connect-udp":
		return p.connectUDP(ctx)
	}
	var conn net.Conn
	if d := p.dialer(); d != nil {
		p.dialed, _ = d.(io.Closer)
		below := "tcp + "
		if p.o.mode == "connect-h3" {
			below = "udp + "
		}
		if err := p.step(below+p.o.mode, func() (string, error) {
			var err error
			conn, err = d.DialContext(ctx, "tcp", net.JoinHostPort(p.tls.ServerName, strconv.Itoa(p.port)))
			return "the gateway accepted" + overHTTP2(conn), err
		}); err != nil {
			p.refusedByProxy(err)
			return err
		}
	} else if err := p.step("tcp", func() (string, error) {
		var err error
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", p.o.via)
		if err != nil {
			return "", err
		}
		return "connected to " + conn.RemoteAddr().String(), nil
	}); err != nil {
		if errors.Is(err, syscall.ECONNRESET) { // it was as quick as the handshake
			p.refusedByReset(err)
		}
		return err
	}
	p.conn = conn
	if p.o.mode == "proxy" {
		if err := p.step("proxy", func() (string, error) {
			return "sent the name to the gateway", sayName(conn, p.tls.ServerName)
		}); err != nil {
			p.refusedByReset(err)
			return err
		}
	}
	switch {
	case p.o.noTLS && (p.o.mode == "tcp" || p.o.mode == "proxy"):
		return p.listen(ctx, conn)
	case p.o.noTLS:
		return nil
	}
	return p.handshake(ctx, conn)
}

// gateway returns the address of the gateway, without the scheme that says TLS.
func (p *prober) gateway() string {
	switch p.o.mode {
	case "connect", "connect-h2", "connect-h3", "connect-udp":
		return strings.TrimPrefix(p.o.via, "https://")
	}
	return p.o.via
}

// secure is what the gateway's own TLS is spoken with; nil for none.
func (p *prober) secure() *tls.Config {
	if p.o.mode != "hbone" && p.o.mode != "connect-h3" && p.o.mode != "connect-udp" && p.gateway() == p.o.via {
		return nil
	}
	return &tls.Config{RootCAs: p.roots, Certificates: p.tls.Certificates}
}

// newVerifier returns what verifies a gateway that is asked by HBONE: one of ids, or one
// with the name of --via.
func (p *prober) newVerifier(ids []string) (*identity.Verifier, error) {
	return upstream.HopVerifier(&registry.Hop{Roots: p.ca}, p.o.via, ids)
}

// verifier is newVerifier for ids that loadKeys has seen. Without one nobody is trusted.
func (p *prober) verifier(ids []string) *identity.Verifier {
	v, err := p.newVerifier(ids)
	if err != nil {
		return new(identity.Verifier)
	}
	return v
}

// oneOf lists words for people: "a, b or c".
func oneOf(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// handshake speaks TLS to the service, through the tunnel.
func (p *prober) handshake(ctx context.Context, conn net.Conn) error {
	first := &firstRecord{Conn: conn}
	tc := tls.Client(first, p.tls)
	start := time.Now()
	if err := p.step("tls", func() (string, error) {
		if err := tc.HandshakeContext(ctx); err != nil {
			return "", err
		}
		return tls.VersionName(tc.ConnectionState().Version), nil
	}); err != nil {
		p.refusedByTLS(err, first.seen)
		return err
	}
	state, wait := tc.ConnectionState(), acceptance(start)
	defer func() { _ = tc.CloseWrite() }() // close_notify
	return p.judge(&state, func() error {
		_ = tc.SetReadDeadline(time.Now().Add(wait))
		_, err := tc.Read(make([]byte, 1))
		if err == nil || isTimeout(err) || errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
}

// acceptance is how long a service has to say what it thinks of its client's
// certificate, after a handshake since start: what it thinks takes a round trip
// to come, as the handshake did.
func acceptance(start time.Time) time.Duration {
	return 100*time.Millisecond + 4*time.Since(start)
}

// judge reports who the service is, and what it thinks of its client:
// accepted waits for that.
func (p *prober) judge(state *tls.ConnectionState, accepted func() error) error {
	peer := newProbePeer(state)
	p.report.Service = peer
	err := p.step("verify", func() (string, error) {
		return "the chain leads to a trusted root", p.verify(state)
	})
	peer.Verified = err == nil
	if err != nil {
		peer.Problem = err.Error()
		if !p.o.insecure {
			p.report.Hint = hintOfVerify(err)
			return err
		}
	}
	// A TLS 1.3 service judges the client's certificate after the client is
	// done: what it thinks of it arrives with the first read.
	err = p.step("accepted", func() (string, error) {
		return "the service sent no alert", accepted()
	})
	if err != nil {
		p.report.Refusal = &probeRefusal{Answer: err.Error(), Hint: "the service itself sent it, inside TLS"}
	}
	return err
}

// hintOfVerify says what to do about a certificate that is not trusted.
func hintOfVerify(err error) string {
	if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
		return "name the CA with --ca FILE, or show it anyway with --insecure"
	}
	if wrong := (x509.HostnameError{}); errors.As(err, &wrong) {
		return "another service answers, or its certificate lacks the name; show it anyway with --insecure"
	}
	return "show it anyway with --insecure"
}

// A firstRecord keeps the beginning of what comes. A gateway's alert is the
// first record there is, and in the clear; crypto/tls makes an error of it that
// does not tell its number.
type firstRecord struct {
	net.Conn
	seen []byte // at most the 7 bytes of an alert
}

func (c *firstRecord) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if room := 7 - len(c.seen); room > 0 {
		c.seen = append(c.seen, p[:min(n, room)]...)
	}
	return n, err
}

func (p *prober) verify(state *tls.ConnectionState) error {
	opts := x509.VerifyOptions{Roots: p.roots, DNSName: p.tls.ServerName, Intermediates: x509.NewCertPool()}
	for _, c := range state.PeerCertificates[1:] {
		opts.Intermediates.AddCert(c)
	}
	_, err := state.PeerCertificates[0].Verify(opts)
	return err
}

// step runs one step and notes how it went.
func (p *prober) step(name string, f func() (string, error)) error {
	start := time.Now()
	detail, err := f()
	s := probeStep{Name: name, Took: time.Since(start).Round(time.Microsecond).String(), Detail: detail}
	if err != nil {
		s.Detail, s.Error = "", err.Error()
	}
	p.report.Steps = append(p.report.Steps, s)
	return err
}
