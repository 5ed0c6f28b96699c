// Package upstream dials what the requests of a gateway lead to: endpoints,
// directly or through further gateways, and the gateways of other networks. It
// adds a PROXY header and TLS where the service asks for them.
//
//	dialers := &upstream.Dialers{Direct: &tunnel.NetDialer{Guard: guard}, Lookup: lookup, Budget: budget, Via: "edge"}
//	reg := &registry.Registry{Dialer: dialers.To, RemoteDialer: dialers.Remote}
//	dialers.ReportDial = reg.ReportDial
//	defer dialers.Close()
//
// It does not choose endpoints: the registry and the Router do.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Dialers makes the dialers of a gateway and keeps those that share connections.
// Each hop is a tunnel.Dialer that is given the one before it.
type Dialers struct {
	// Direct dials the addresses of the first hop; its guard judges them.
	Direct *tunnel.NetDialer

	// Lookup finds the addresses of the first hop's name; nil means it has none.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Budget counts the connections that carry many tunnels; those tunnels do
	// not count for anything themselves (tunnel.Multiplexed). May be nil.
	Budget *tunnel.Budget

	// Via is the pseudonym of this gateway. Every request carries it.
	Via string

	// ReportDial receives the result of every dial to a gateway of another
	// network: nil for one that worked. It is registry.Registry.ReportDial. May
	// be nil.
	ReportDial func(tunnel.Endpoint, error)

	mu       sync.Mutex // guards what follows
	byHops   map[string]*viaHops
	byTable  map[*registry.Hop]*viaHops // by the first of the hops, in the table that has them
	remote   map[gatewayKey]*viaHops
	pools    []io.Closer                         // dialers that keep connections, to be closed
	tls      map[string]*tlsConfig               // by content
	tlsTable map[*registry.BackendTLS]*tlsConfig // by the place in a table
}

// maxCached is how many dialers are cached in each map: there are as many as
// different lists of hops in the configurations so far. At the limit all are
// made anew. maxTableKeys limits the places in tables that lead to them.
const (
	maxCached    = 1024
	maxTableKeys = 64 << 10
)

// To returns the dialer of a service: through the gateways of its Via, with a
// PROXY header and TLS where the service asks for them. It is nil where the
// Router's own dialer does. It is registry.Registry.Dialer.
func (d *Dialers) To(s *registry.Service) (tunnel.Dialer, error) {
	if len(s.Via) == 0 && s.ProxyProtocol == 0 && s.TLS == nil {
		return nil, nil
	}
	via, err := d.Through(s.Via)
	if err != nil {
		return nil, err
	}
	return d.withLayers(s, via)
}

// withLayers adds to dialer what s asks for: a PROXY header, and TLS after it.
func (d *Dialers) withLayers(s *registry.Service, dialer tunnel.EndpointDialer) (tunnel.Dialer, error) {
	var layered tunnel.Dialer = dialer
	if s.ProxyProtocol != 0 {
		layered = &proxyproto.Dialer{Version: s.ProxyProtocol, Dialer: dialer}
	}
	if s.TLS == nil {
		return layered, nil
	}
	cfg, err := d.tlsConfig(s.TLS)
	if err != nil {
		return nil, err
	}
	return &tlsDialer{layered, cfg}, nil
}

// Through returns the dialer through hops, in order. Equal lists of hops share
// one, so that carriers can share connections.
func (d *Dialers) Through(hops []registry.Hop) (tunnel.EndpointDialer, error) {
	if len(hops) == 0 {
		return d.Direct, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// A table never changes, so the same place holds the same hops.
	if via, ok := d.byTable[&hops[0]]; ok {
		return via, nil
	}
	via, err := d.sharedVia(hops)
	if err != nil {
		return nil, err
	}
	if d.byTable == nil || len(d.byTable) >= maxTableKeys {
		d.byTable = make(map[*registry.Hop]*viaHops)
	}
	d.byTable[&hops[0]] = via
	return via, nil
}

// sharedVia returns the dialer through equal hops, or makes one. The caller
// holds mu.
func (d *Dialers) sharedVia(hops []registry.Hop) (*viaHops, error) {
	key := keyOf(hops)
	if via, ok := d.byHops[key]; ok {
		return via, nil
	}
	var last tunnel.Dialer = firstHopDialer{d}
	via := &viaHops{}
	for _, hop := range hops {
		var gateways fallbackDialer
		for _, addr := range hop.Addresses {
			gateway, err := d.newHopDialer(&hop, addr, last)
			if err != nil {
				return nil, err
			}
			gateways = append(gateways, gateway)
		}
		if len(gateways) == 0 {
			return nil, errors.New("gateway: a hop leads nowhere")
		}
		last = gateways
		via.hops = append(via.hops, hop.Proto+" "+strings.Join(hop.Addresses, " or "))
	}
	via.last = last
	if d.byHops == nil || len(d.byHops) >= maxCached {
		d.byHops = make(map[string]*viaHops)
		d.dropPools()
	}
	d.byHops[key] = via
	return via, nil
}

// dropPools forgets dialers that nobody uses any more: their connections end by
// themselves. Of byHops and remote there are maxCached each. The caller holds mu.
func (d *Dialers) dropPools() { d.pools = d.pools[max(0, len(d.pools)-2*maxCached):] }

// keyOf is the same for equal hops, and for no others.
func keyOf(hops []registry.Hop) string {
	var b strings.Builder
	for _, h := range hops {
		fmt.Fprintf(&b, "%q %q %q %q %q %q %q %q %q %q %q %t %t;", h.Proto, h.Addresses, string(h.Token), h.User, string(h.Password), h.Roots, h.Certificate, string(h.Key), h.Peers, h.InnerPeers, h.Trust, h.HTTP2, h.Insecure)
	}
	return b.String()
}

// pooled notes that a dialer is to be closed in the end. The caller holds mu.
func (d *Dialers) pooled(dialer interface {
	tunnel.Dialer
	io.Closer
}) tunnel.Dialer {
	d.pools = append(d.pools, dialer)
	return dialer
}

// Close ends the connections that dialers keep, with the streams on them.
func (d *Dialers) Close() {
	d.mu.Lock()
	pools := d.pools
	d.pools, d.byHops, d.remote, d.tls, d.tlsTable = nil, nil, nil, nil, nil
	d.mu.Unlock()
	for _, c := range pools {
		_ = c.Close()
	}
}
