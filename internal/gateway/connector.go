package gateway

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// A Reverse is the gateways that this one keeps sessions to, as their connector.
type Reverse struct {
	Gateways []registry.Hop // each of one address
	Replicas int            // of each gateway that get a session each; 0 means 1
	Pool     int            // connections to each that wait for requests
	Expose   []Exposed
}

// An Exposed is a name that a Reverse serves.
type Exposed struct {
	reverse.Registration

	// To is what serves it, with its port. The zero Endpoint stands for the services that
	// the table has.
	To registry.Endpoint

	// Serve, if it is set, has this process serve it, in place of To. It is called for each
	// request, and must not block. It calls admit, which returns the stream of a client that
	// was told yes and is Serve's to close; where admit fails, the client has heard. An error
	// of Serve without that is a refusal.
	Serve func(admit func() (tunnel.Stream, error)) error
}

// registrations returns what gateways are asked for.
func (r *Reverse) registrations() []reverse.Registration {
	all := make([]reverse.Registration, len(r.Expose))
	for i := range r.Expose {
		all[i] = r.Expose[i].Registration
	}
	return all
}

// sameGateways reports whether sessions of r serve o, too.
func (r *Reverse) sameGateways(o *Reverse) bool {
	return r != nil && o != nil && r.Replicas == o.Replicas && r.Pool == o.Pool && reflect.DeepEqual(r.Gateways, o.Gateways)
}

// A connector keeps the sessions of Config.Reverse, and serves what comes on them.
type connector struct {
	g      *Gateway
	router *tunnel.Router
	change chan struct{} // has room for one: use was called

	exposed atomic.Pointer[[]Exposed]

	mu     sync.Mutex // guards what follows
	next   *Reverse
	client *reverse.Client // nil for none
}

func newConnector(g *Gateway, budget *tunnel.Budget, dialer tunnel.Dialer, observe func(*tunnel.Outcome)) *connector {
	c := &connector{g: g, change: make(chan struct{}, 1)}
	c.router = &tunnel.Router{
		Resolver: c, Dialer: dialer, Relay: g.relay, Budget: budget, Observe: observe, CurrentLimits: g.currentLimits.Load,
	}
	return c
}

// use has c keep the sessions of r, nil for none.
func (c *connector) use(r *Reverse) {
	c.mu.Lock()
	c.next = r
	c.mu.Unlock()
	select {
	case c.change <- struct{}{}:
	default:
	}
}

// run keeps the sessions until ctx is done.
func (c *connector) run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	var used *Reverse
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.change:
		}
		c.mu.Lock()
		next, client := c.next, c.client
		c.mu.Unlock()
		if next != nil {
			c.exposed.Store(&next.Expose)
		}
		if used.sameGateways(next) {
			client.SetNames(next.registrations())
			used = next
			continue
		}
		if client != nil { // its sessions end with their last streams
			client.Drain()
			client = nil
		}
		if used = next; next != nil {
			made, err := c.newClient(next)
			if err != nil {
				c.g.log.Error("cannot open reverse sessions", "error", err)
			} else {
				client = made
				running.Go(func() { _ = made.Run(ctx) })
			}
		}
		c.mu.Lock()
		c.client = client
		c.mu.Unlock()
	}
}

func (c *connector) newClient(r *Reverse) (*reverse.Client, error) {
	client := &reverse.Client{Handler: c, Via: c.g.via, Budget: c.router.Budget, Log: c.g.log}
	for i := range r.Gateways {
		hop, err := c.g.upstreams.NextHop(r.Gateways[i : i+1])
		if err != nil {
			return nil, err
		}
		to := strings.Join(r.Gateways[i].Addresses, ", ")
		name := r.Gateways[i].HostPort(to)
		client.Gateways = append(client.Gateways, reverse.Gateway{
			Name: name, Transport: hop, Replicas: r.Replicas, Pool: r.Pool,
			DialPool: func(ctx context.Context) (net.Conn, error) {
				return c.g.upstreams.FirstHop().DialContext(ctx, "tcp", name)
			},
		})
	}
	client.SetNames(r.registrations())
	return client, nil
}

// drain has the sessions end with their last streams.
func (c *connector) drain() {
	c.mu.Lock()
	client := c.client
	c.mu.Unlock()
	if client != nil {
		client.Drain()
	}
}

// wait returns when the sessions that drain has told have ended, or ctx is done.
func (c *connector) wait(ctx context.Context) {
	open := func(s reverse.SessionState) bool { return s.Connected }
	for slices.ContainsFunc(c.state(), open) && ctx.Err() == nil {
		sleep(ctx, 10*time.Millisecond)
	}
}

// state returns what there is to say about each session.
func (c *connector) state() []reverse.SessionState {
	c.mu.Lock()
	client := c.client
	c.mu.Unlock()
	if client == nil {
		return nil
	}
	return client.State()
}

// ServeTunnel implements tunnel.Handler for requests that come on sessions.
func (c *connector) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	e := c.find(req)
	if e == nil || e.Serve == nil {
		c.router.ServeTunnel(ctx, req)
		return
	}
	err := e.Serve(func() (tunnel.Stream, error) {
		s, err := c.router.Admit(req, e.Name.String())
		if err != nil {
			return nil, err
		}
		return newOwnStream(s.Conn.(tunnel.Stream), s, true), nil // which Accept has returned
	})
	if err != nil {
		c.router.Refuse(req, err)
	}
}

// Resolve implements tunnel.Resolver for requests that come on sessions. Gateways reach the
// names that are exposed to them, and nothing else of the table.
func (c *connector) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	e := c.find(req)
	switch {
	case e == nil:
		return tunnel.Route{}, tunnel.Refusef(tunnel.NoRoute, "gateway: %q is not exposed by reverse sessions", req.Target())
	case e.To == (registry.Endpoint{}):
		return c.g.registry.Resolve(ctx, req)
	}
	name := e.Name.String()
	route := tunnel.Route{Service: name, Pattern: name, Generation: c.g.registry.Generation()}
	if e.To.Addr.IsValid() {
		route.Endpoints = []tunnel.Endpoint{{Addr: netip.AddrPortFrom(e.To.Addr.Unmap(), e.To.Port), Named: true}}
		return route, nil
	}
	addrs, err := c.lookup(ctx, e.To.Host)
	if err != nil {
		return route, tunnel.Refusef(tunnel.LookupError, "gateway: %q: lookup of %q: %w", req.Target(), e.To.Host, err)
	}
	for _, a := range addrs {
		route.Endpoints = append(route.Endpoints, tunnel.Endpoint{Addr: netip.AddrPortFrom(a.Unmap(), e.To.Port), Host: e.To.Host, Named: registry.IsLocalhost(e.To.Host)})
	}
	return route, nil
}

// find returns what exposes the name and port of req, the exact name first.
func (c *connector) find(req *tunnel.Request) (found *Exposed) {
	list := c.exposed.Load()
	if list == nil || req.Name.IsZero() {
		return nil
	}
	for i := range *list {
		e := &(*list)[i]
		if !e.Name.Matches(req.Name) || e.Port != 0 && e.Port != req.Port {
			continue
		}
		if found == nil || compareExposed(e, found) < 0 {
			found = e
		}
	}
	return found
}

// compareExposed puts exact names before wildcards, longer names before shorter ones, and
// those with a port before those without.
func compareExposed(a, b *Exposed) int {
	wild := func(e *Exposed) int {
		if e.Name.Wildcard {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(wild(a), wild(b)),
		cmp.Compare(len(b.Name.String()), len(a.Name.String())),
		cmp.Compare(b.Port, a.Port),
	)
}

func (c *connector) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if registry.IsLocalhost(host) {
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	if c.g.cfg.Lookup == nil {
		return nil, errors.New("no DNS resolver is configured")
	}
	return c.g.cfg.Lookup(ctx, host)
}

// Generation and Recheck implement tunnel.Rechecker: policies hold for what the table has.
func (c *connector) Generation() uint64 { return c.g.registry.Generation() }

// Recheck implements tunnel.Rechecker.
func (c *connector) Recheck(req *tunnel.Request, route *tunnel.Route) error {
	if e := c.find(req); e == nil || e.To != (registry.Endpoint{}) {
		return nil
	}
	return c.g.registry.Recheck(req, route)
}

var _ tunnel.Rechecker = (*connector)(nil)

// ReverseStatus is the part of the status about reverse sessions.
type ReverseStatus struct {
	Sessions int                    `json:"sessions"`     // of connectors, to this gateway
	Names    int                    `json:"names"`        // that connectors have registered, or that are kept for them
	To       []reverse.SessionState `json:"to,omitempty"` // that this gateway keeps as a connector

	Replicas []reverse.ReplicaStatus `json:"replicas,omitempty"` // of this gateway, by address
}

// ReverseSessions returns what there is to say about each session that Config.Reverse asks
// for.
func (g *Gateway) ReverseSessions() []reverse.SessionState { return g.connector.state() }

// Carried returns how many bytes the open tunnels have carried so far: from clients, and to
// them. Those of a tunnel that has ended are in its Outcome.
func (g *Gateway) Carried() (in, out int64) {
	for _, b := range g.relay.BytesByService() {
		in += b.In
		out += b.Out
	}
	return in, out
}

// reverseStatus returns nil where there is nothing to say.
func (g *Gateway) reverseStatus() *ReverseStatus {
	s := &ReverseStatus{Sessions: len(g.sessions.Sessions()), Names: len(g.groups.List()), To: g.connector.state(), Replicas: g.replicas.Status()}
	if s.Sessions == 0 && s.Names == 0 && len(s.To) == 0 && len(s.Replicas) == 0 {
		return nil
	}
	return s
}

// Connectors is what the admin port answers about connectors.
type Connectors struct {
	Replica  string             `json:"replica"`  // what this process calls itself to connectors and to other replicas
	Sessions []ConnectorSession `json:"sessions"` // the oldest first
	Names    []ConnectorName    `json:"names"`    // sorted
}

// A ConnectorSession is the session of a connector to this gateway.
type ConnectorSession struct {
	ID        uint64                 `json:"id"`
	Owner     string                 `json:"owner"`     // the id of the connector, by which policies decide
	Connector string                 `json:"connector"` // what its process calls itself
	Source    string                 `json:"source"`
	Listener  string                 `json:"listener"`
	Protocol  string                 `json:"protocol"`
	TLS       bool                   `json:"tls"`
	Since     time.Time              `json:"since"`
	Streams   int                    `json:"streams"`
	In        int64                  `json:"in"`             // bytes from the connector
	Out       int64                  `json:"out"`            // bytes to it
	Pool      int                    `json:"pool,omitempty"` // pool connections that wait
	Draining  bool                   `json:"draining,omitempty"`
	Names     []reverse.Registration `json:"names"`
	Refused   []reverse.Result       `json:"refused,omitempty"` // names that it has asked for and does not have
}

// A ConnectorName is a name that connectors have registered.
type ConnectorName struct {
	Name     string    `json:"name"`
	Owner    string    `json:"owner"`
	Sessions int       `json:"sessions"`       // to this replica
	Until    time.Time `json:"until,omitzero"` // when it is free for others, where there is no session

	// Connectors is how many processes, or connections of SSH, the sessions are of: several share
	// the requests.
	Connectors int `json:"connectors"`

	Replicas []ConnectorReplica `json:"replicas,omitempty"` // others that have sessions for the name
}

// A ConnectorReplica is another replica that has sessions for a name.
type ConnectorReplica struct {
	Replica  string `json:"replica"`
	Address  string `json:"address"`
	Sessions int    `json:"sessions"`
}

// Connectors returns the sessions of connectors to this gateway, and their names.
func (g *Gateway) Connectors() Connectors {
	list := Connectors{Replica: g.sessions.Replica(), Sessions: []ConnectorSession{}, Names: []ConnectorName{}}
	for _, s := range g.sessions.Sessions() {
		one := ConnectorSession{
			ID: s.ID, Owner: s.Owner, Connector: s.Connector, Source: s.Source.String(), Listener: s.Listener, Protocol: s.Proto, TLS: s.Secure,
			Since: s.Since, Streams: s.Streams, In: s.In, Out: s.Out, Pool: s.Pool, Draining: s.Draining, Names: s.Names, Refused: s.Refused,
		}
		if one.Names == nil {
			one.Names = []reverse.Registration{}
		}
		list.Sessions = append(list.Sessions, one)
	}
	for _, n := range g.groups.List() {
		one := ConnectorName{Name: n.Name.String(), Owner: n.Owner, Sessions: len(n.Members), Connectors: n.Connectors, Until: n.Until}
		for _, r := range n.Remote {
			one.Replicas = append(one.Replicas, ConnectorReplica(r))
		}
		list.Names = append(list.Names, one)
	}
	return list
}

// reverseGauges adds what metrics have of reverse sessions.
func (g *Gateway) reverseGauges() {
	m := g.metrics
	m.Gauge("culvert_reverse_sessions", "Sessions of connectors to this gateway.", func() float64 { return float64(len(g.sessions.Sessions())) })
	m.Gauge("culvert_reverse_pool_connections", "Pool connections of connectors that wait for requests.", func() (n float64) {
		for _, s := range g.sessions.Sessions() {
			n += float64(s.Pool)
		}
		return n
	})
	m.Gauge("culvert_reverse_names", "Names that connectors have registered, or that are kept for their owners.", func() float64 { return float64(len(g.groups.List())) })
	m.Gauge("culvert_reverse_replicas_connected", "Other replicas of this gateway that tell it of their sessions.", func() (n float64) {
		for _, s := range g.replicas.Status() {
			if s.Connected {
				n++
			}
		}
		return n
	})
	m.Gauge("culvert_reverse_gateways", "Gateways that this one keeps reverse sessions to, as configured.", func() float64 { return float64(len(g.connector.state())) })
	m.Gauge("culvert_reverse_gateways_connected", "Gateways that this one has a reverse session to.", func() (n float64) {
		for _, s := range g.connector.state() {
			if s.Connected {
				n++
			}
		}
		return n
	})
}
