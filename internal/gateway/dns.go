package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"culvert.dev/dns"
	"culvert.dev/internal/metrics"
	"culvert.dev/internal/udp"
	"culvert.dev/tunnel"
)

// A DNS says what is answered by DNS, beside the streams or alone.
type DNS struct {
	Listeners []DNSListener

	// Server has the zones, the limits, and Forward, which is closed at the end
	// of Run. Names, ViewOf, Lookup and Usable are the gateway's to set where they
	// are nil, Log and Observe in any case.
	Server *dns.Server

	// VIPs reports whether those in a network are told the addresses that services
	// have to themselves; nil means nobody is.
	VIPs func(network string) bool

	pair    atomic.Pointer[tls.Certificate]
	sockets []dnsSocket
}

// A DNSListener is where questions are taken.
type DNSListener struct {
	Transport dns.Transport
	Address   string // HOST:PORT
	View      string // the network of all who ask here; "" means that of their address
}

// A dnsSocket is a listener that is open: one of both.
type dnsSocket struct {
	DNSListener
	packets *net.UDPConn
	streams net.Listener
}

func (s *dnsSocket) addr() net.Addr {
	if s.packets != nil {
		return s.packets.LocalAddr()
	}
	return s.streams.Addr()
}

func (s *dnsSocket) close() {
	if s.packets != nil {
		_ = s.packets.Close()
		return
	}
	_ = s.streams.Close()
}

// dnsLookupTimeout is the time a target's name may take, less than a question may.
const dnsLookupTimeout = 1500 * time.Millisecond

// dnsDescriptors are kept for questions that wait for upstreams, and for
// connections.
const dnsDescriptors = 1500

// Use has pair shown by TLS and HTTPS from the next connection on.
func (d *DNS) Use(pair tls.Certificate) { d.pair.Store(&pair) }

// config is that of a listener by TLS. TLS 1.2 is for the stub resolvers of
// systems that have nothing later.
func (d *DNS) config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			if c := d.pair.Load(); c != nil {
				return c, nil
			}
			return nil, errors.New("there is no certificate")
		},
	}
}

// listen opens every socket. No tunnel leads to them: a client that came by one
// would be taken for this host.
func (d *DNS) listen(ctx context.Context, guard *tunnel.Guard) error {
	for _, l := range d.Listeners {
		s := dnsSocket{DNSListener: l}
		var err error
		if l.Transport == dns.UDP {
			s.packets, err = udp.Listen(ctx, l.Address)
		} else {
			var lc net.ListenConfig
			s.streams, err = lc.Listen(ctx, "tcp", l.Address)
		}
		if err != nil {
			return &DNSError{Listener: l, Err: err}
		}
		d.sockets = append(d.sockets, s)
		guard.OwnListener(s.addr())
	}
	return nil
}

// A DNSError is that a listener could not be opened.
type DNSError struct {
	Listener DNSListener
	Err      error
}

func (e *DNSError) Error() string {
	return "listen for DNS at " + string(e.Listener.Transport) + "://" + e.Listener.Address + ": " + e.Err.Error()
}

func (e *DNSError) Unwrap() error { return e.Err }

// count is how many listeners there are.
func (d *DNS) count() int {
	if d == nil {
		return 0
	}
	return len(d.Listeners)
}

// close gives back sockets that were never served.
func (d *DNS) close() {
	if d == nil {
		return
	}
	for _, s := range d.sockets {
		s.close()
	}
}

// prepare sets what of the server is the gateway's.
func (d *DNS) prepare(ctx context.Context, g *Gateway) {
	s := d.Server
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
		s.Lookup = (&dns.Resolver{Timeout: dnsLookupTimeout}).LookupTTL
	}
	s.Log = g.log
	s.Observe = observeDNS(ctx, g.metrics.DNS(), g.log)
	if f := s.Forward; f != nil {
		f.Log = g.log
		g.metrics.Gauge("culvert_dns_cache_bytes", "Approximate memory of cached DNS answers.", func() float64 { return float64(f.CacheSize()) })
		g.metrics.Gauge("culvert_dns_upstreams_down", "Upstream resolvers that are tried last because they did not answer.", func() float64 {
			n := 0
			for _, up := range f.Health() {
				if !up {
					n++
				}
			}
			return float64(n)
		})
	}
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

// run serves every socket, each by a function given to run. Until there is a
// table the zones are answered SERVFAIL, and all else as ever.
func (d *DNS) run(ctx context.Context, run func(func() error), log *slog.Logger) {
	for _, s := range d.sockets {
		run(func() error {
			if err := d.serve(ctx, &s); !errors.Is(err, dns.ErrServerClosed) {
				return err
			}
			return nil
		})
		log.Info("serving DNS", "listener", string(s.Transport)+"://"+s.Address, "address", s.addr().String(), "view", s.View)
	}
}

func (d *DNS) serve(ctx context.Context, s *dnsSocket) error {
	switch s.Transport {
	case dns.UDP:
		return d.Server.ServeUDP(ctx, s.packets, s.View)
	case dns.TLS:
		return d.Server.ServeTLS(ctx, s.streams, d.config(), s.View)
	case dns.HTTPS:
		return d.Server.ServeHTTPS(ctx, s.streams, d.config(), s.View)
	}
	return d.Server.ServeTCP(ctx, s.streams, s.View)
}

// shutdown answers what was asked, and takes nothing more.
func (d *DNS) shutdown(ctx context.Context) {
	if d != nil {
		_ = d.Server.Shutdown(ctx)
	}
}

// stop ends everything.
func (d *DNS) stop() {
	if d == nil {
		return
	}
	_ = d.Server.Close()
	if d.Server.Forward != nil {
		_ = d.Server.Forward.Close()
	}
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
	Address    string `json:"address"`
	View       string `json:"view,omitempty"`
}

func (d *DNS) status() *StatusDNS {
	if d == nil {
		return nil
	}
	s := &StatusDNS{Zones: d.Server.Zones}
	for i := range d.sockets {
		l := &d.sockets[i]
		scheme := string(l.Transport) + "://"
		s.Listeners = append(s.Listeners, StatusDNSListener{Configured: scheme + l.Address, Address: scheme + l.addr().String(), View: l.View})
	}
	if f := d.Server.Forward; f != nil {
		s.Cache, s.Upstreams = f.CacheSize(), f.Health()
	}
	return s
}
