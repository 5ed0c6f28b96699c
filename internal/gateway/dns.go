package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/dns"
	"culvert.dev/internal/metrics"
	"culvert.dev/internal/names"
	"culvert.dev/internal/udp"
	"culvert.dev/tunnel"
)

// A DNS says what is answered by DNS, beside the streams or alone.
type DNS struct {
	Listeners []DNSListener

	// Server has the zones, the limits, and Forward, which is closed when the gateway has
	// no more use for it. Names, ViewOf, Lookup and Usable are the gateway's to set where
	// they are nil, Log and Observe in any case. Of the Server of a later Config only the
	// fields of dns.Settings count.
	Server *dns.Server

	// VIPs reports whether those in a network are told the addresses that services
	// have to themselves; nil means nobody is.
	VIPs func(network string) bool

	// DeferIdentity leaves out what policies say of the identity of callers, where they
	// decide who may see services.
	DeferIdentity bool

	// Local is what programs of this host are told, who alone ask here; nil means that
	// clients are told where services are.
	Local *names.Local

	pair atomic.Pointer[tls.Certificate]
}

// A DNSListener is where questions are taken.
type DNSListener struct {
	Transport dns.Transport
	Address   string // HOST:PORT
	View      string // the network of all who ask here; "" means that of their address
}

func (l DNSListener) String() string { return string(l.Transport) + "://" + l.Address }

// dnsLookupTimeout is the time a target's name may take, less than a question may.
const dnsLookupTimeout = 1500 * time.Millisecond

// dnsDescriptors are kept for questions that wait for upstreams, and for
// connections.
const dnsDescriptors = 1500

// Use has pair shown by TLS and HTTPS from the next connection on.
func (d *DNS) Use(pair tls.Certificate) { d.pair.Store(&pair) }

// A DNSError is that a listener could not be opened.
type DNSError struct {
	Listener DNSListener
	Err      error
}

func (e *DNSError) Error() string {
	return "listen for DNS at " + e.Listener.String() + ": " + e.Err.Error()
}

func (e *DNSError) Unwrap() error { return e.Err }

// A dnsService answers what the configuration of the moment says.
type dnsService struct {
	socketSet[DNSListener]
	ctx     context.Context // for logs alone
	current atomic.Pointer[DNS]
	server  atomic.Pointer[dns.Server] // nil as long as nothing was ever answered

	retiring sync.Mutex // guards what follows
	retired  []retiredForwarder
}

// A retiredForwarder is one that only questions from before are asked of.
type retiredForwarder struct {
	*dns.Forwarder
	since time.Time
}

// forwarderRest is how long a retired Forwarder may still be asked: a question takes no
// more than two seconds.
const forwarderRest = 3 * time.Second

func newDNSService(ctx context.Context, g *Gateway, guard *tunnel.Guard) *dnsService {
	d := &dnsService{ctx: ctx}
	d.socketSet = socketSet[DNSListener]{
		tableWatcher: newTableWatcher(), g: g, guard: guard,
		wanted: func() []DNSListener {
			if c := d.current.Load(); c != nil {
				return c.Listeners
			}
			return nil
		},
		listen: d.listenDNS,
		opened: func(s *ownSocket[DNSListener]) {
			g.log.Info("serving DNS", "listener", s.key.String(), "address", s.addr.String(), "view", s.key.View)
		},
		failed: func(l DNSListener, err error) {
			g.log.Warn("cannot serve DNS", "listener", l.String(), "err", err)
		},
		closed: func(l DNSListener, addr string) {
			g.log.Info("closed a DNS listener", "listener", l.String(), "address", addr)
		},
	}
	d.current.Store(g.cfg.DNS)
	return d
}

// listenDNS opens a socket. No tunnel leads to it: a client that came by one would be
// taken for this host.
func (d *dnsService) listenDNS(ctx context.Context, l DNSListener) (*ownSocket[DNSListener], error) {
	o := &ownSocket[DNSListener]{key: l}
	var socket io.Closer
	if l.Transport == dns.UDP {
		packets, err := udp.Listen(ctx, l.Address)
		if err != nil {
			return nil, &DNSError{l, err}
		}
		o.addr, socket = packets.LocalAddr(), packets
		o.serve = func(ctx context.Context) error { return d.server.Load().ServeUDP(ctx, packets, l.View) }
	} else {
		streams, err := new(net.ListenConfig).Listen(ctx, "tcp", l.Address)
		if err != nil {
			return nil, &DNSError{l, err}
		}
		o.addr, socket = streams.Addr(), streams
		o.serve = func(ctx context.Context) error { return d.serveStreams(ctx, streams, l) }
	}
	serve := o.serve
	o.serve = func(ctx context.Context) error {
		if err := serve(ctx); !errors.Is(err, dns.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
	o.drain = func() {
		if !d.server.Load().Drain(socket) { // it is not served yet
			o.cancel()
		}
	}
	o.close = func() { _ = socket.Close() }
	return o, nil
}

func (d *dnsService) serveStreams(ctx context.Context, ln net.Listener, l DNSListener) error {
	s := d.server.Load()
	switch l.Transport {
	case dns.TLS:
		return s.ServeTLS(ctx, ln, d.config(), l.View)
	case dns.HTTPS:
		return s.ServeHTTPS(ctx, ln, d.config(), l.View)
	}
	return s.ServeTCP(ctx, ln, l.View)
}

// config is that of a listener by TLS. TLS 1.2 is for the stub resolvers of
// systems that have nothing later.
func (d *dnsService) config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			if c := d.current.Load(); c != nil {
				if pair := c.pair.Load(); pair != nil {
					return pair, nil
				}
			}
			return nil, errors.New("there is no certificate")
		},
	}
}

// use answers by next from the next question on; nil for nothing. The sockets follow in
// their own time.
func (d *dnsService) use(next *DNS) {
	if next != nil && next.Server.Forward != nil && next.Server.Forward.Log == nil {
		d.completeForwarder(next.Server.Forward)
	}
	was := d.current.Swap(next)
	if next != nil {
		if s := d.server.Load(); s == nil {
			d.prepare(next.Server)
		} else if s != next.Server {
			n := next.Server
			s.Use(&dns.Settings{
				Zones: n.Zones, Claimed: n.Claimed, TTL: n.TTL, NegativeTTL: n.NegativeTTL, Forward: n.Forward,
				RecursionClients: n.RecursionClients, RateLimit: n.RateLimit, RateLimitExempt: n.RateLimitExempt,
			})
		}
	}
	if was == nil || was.Server.Forward == nil || next != nil && next.Server.Forward == was.Server.Forward {
		return
	}
	d.retiring.Lock()
	defer d.retiring.Unlock()
	d.retired = append(d.retired, retiredForwarder{was.Server.Forward, time.Now()})
}

// updateDNS opens and closes sockets, and closes forwarders that nobody asks any more.
func (d *dnsService) updateDNS(ctx context.Context) (complete bool) {
	complete = d.update(ctx)
	d.retiring.Lock()
	defer d.retiring.Unlock()
	for len(d.retired) > 0 && time.Since(d.retired[0].since) >= forwarderRest {
		_ = d.retired[0].Close()
		d.retired = d.retired[1:]
	}
	return complete && len(d.retired) == 0
}

// watchDNS follows the configuration until ctx is done.
func (d *dnsService) watchDNS(ctx context.Context) error {
	d.watch(ctx, &d.g.stopping, d.updateDNS)
	return nil
}

// vips reports whether those in a network are told the addresses that services have to
// themselves.
func (d *dnsService) vips(network string) bool {
	c := d.current.Load()
	return c != nil && c.VIPs != nil && c.VIPs(network)
}

// defersIdentity reports whether what policies say of identities is left out.
func (d *dnsService) defersIdentity() bool {
	c := d.current.Load()
	return c != nil && c.DeferIdentity
}

// local returns what programs of this host are told, if only they ask.
func (d *dnsService) local() *names.Local {
	if c := d.current.Load(); c != nil {
		return c.Local
	}
	return nil
}

// isOwn reports whether HOST:PORT is a socket at which questions are taken: a question there
// asks this process.
func (d *dnsService) isOwn(address string) bool {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return false
	}
	for _, addr := range d.addrs() {
		at, err := netip.ParseAddrPort(addr.String())
		if err != nil || at.Port() != to.Port() {
			continue
		}
		if at.Addr().Unmap() == to.Addr().Unmap() || at.Addr().IsUnspecified() && to.Addr().IsLoopback() {
			return true
		}
	}
	return false
}

// forwarder returns what asks others now; nil for none.
func (d *dnsService) forwarder() *dns.Forwarder {
	if c := d.current.Load(); c != nil {
		return c.Server.Forward
	}
	return nil
}

// completeForwarder sets what of f is the gateway's, before it is asked.
func (d *dnsService) completeForwarder(f *dns.Forwarder) {
	f.Log, f.Own, f.Sockets = d.g.log, d.isOwn, d.g.cfg.Sockets
}

// prepare sets what of the server is the gateway's, before it serves.
func (d *dnsService) prepare(s *dns.Server) {
	g := d.g
	if s.Names == nil {
		s.Names = g.names.Names
	}
	if s.Usable == nil {
		s.Usable = g.registry.Healthy
	}
	if s.ViewOf == nil {
		s.ViewOf = func(a netip.Addr) string {
			if t := g.registry.Table(); t != nil {
				name, _ := t.Network(a)
				return name
			}
			return ""
		}
	}
	if s.Lookup == nil {
		s.Lookup = (&dns.Resolver{Timeout: dnsLookupTimeout, Sockets: g.cfg.Sockets}).LookupTTL
	}
	if s.Forward != nil {
		d.completeForwarder(s.Forward)
	}
	s.Log = g.log
	s.Observe = observeDNS(d.ctx, g.metrics.DNS(), g.log)
	d.server.Store(s)
	g.metrics.Gauge("culvert_dns_cache_bytes", "Approximate memory of cached DNS answers.", func() float64 {
		if f := d.forwarder(); f != nil {
			return float64(f.CacheSize())
		}
		return 0
	})
	g.metrics.Gauge("culvert_dns_upstreams_down", "Upstream resolvers that are tried last because they did not answer.", func() float64 {
		n := 0
		if f := d.forwarder(); f != nil {
			for _, up := range f.Health() {
				if !up {
					n++
				}
			}
		}
		return float64(n)
	})
}

// observeDNS counts every question, and logs those that were not answered, for
// who wants to know all.
func observeDNS(ctx context.Context, m *metrics.DNS, log *slog.Logger) func(*dns.Result) {
	return func(r *dns.Result) {
		m.Observe(metrics.Question{Transport: string(r.Transport), View: r.View, Rcode: r.Code(), Source: string(r.Source)}, r.Took)
		if r.Reason != "" && log.Enabled(ctx, slog.LevelDebug) {
			log.Debug("DNS query", "reason", string(r.Reason), "rcode", r.Code(), "transport", string(r.Transport),
				"from", r.From.String(), "view", r.View, "type", r.Type.String(), "took", r.Took)
		}
	}
}

// shutdown answers what was asked, and takes nothing more.
func (d *dnsService) shutdown(ctx context.Context) {
	if s := d.server.Load(); s != nil {
		_ = s.Shutdown(ctx)
	}
}

// stop ends everything.
func (d *dnsService) stop() {
	if s := d.server.Load(); s != nil {
		_ = s.Close()
	}
	if f := d.forwarder(); f != nil {
		_ = f.Close()
	}
	d.retiring.Lock()
	defer d.retiring.Unlock()
	for _, f := range d.retired {
		_ = f.Close()
	}
	d.retired = nil
}

// StatusDNS is what is answered by DNS.
type StatusDNS struct {
	Listeners []StatusDNSListener `json:"listeners"`
	Zones     []string            `json:"zones"`
	Cache     int                 `json:"cacheBytes"`
	Upstreams map[string]bool     `json:"upstreams,omitempty"` // whether they answer, by address
}

// A StatusDNSListener is where questions are taken.
type StatusDNSListener struct {
	Configured string `json:"configured"`
	Address    string `json:"address"` // "" where it is not open
	View       string `json:"view,omitempty"`
	Problem    string `json:"problem,omitempty"` // why it is not open, or open still
}

func (d *dnsService) status() *StatusDNS {
	states := d.states()
	c := d.current.Load()
	if c == nil && len(states) == 0 {
		return nil
	}
	s := &StatusDNS{}
	for i := range states {
		st := &states[i]
		l := StatusDNSListener{Configured: st.key.String(), View: st.key.View, Problem: st.problemText()}
		if st.addr != nil {
			l.Address = string(st.key.Transport) + "://" + st.addr.String()
		}
		s.Listeners = append(s.Listeners, l)
	}
	if c == nil {
		return s
	}
	s.Zones = c.Server.Zones
	if f := c.Server.Forward; f != nil {
		s.Cache, s.Upstreams = f.CacheSize(), f.Health()
	}
	return s
}
