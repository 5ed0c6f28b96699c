package gateway

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/ws"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/activation"
	"culvert.dev/internal/admin"
	"culvert.dev/internal/edits"
	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/udp"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A Query asks what a request would meet.
type Query struct {
	Host     string      // a name, or an address for connect and socks5
	Port     uint16      // 0 where the protocol carries none
	Listener string      // the address of the listener that is asked, as configured
	Proto    string      // a protocol's name, or "" for connect where there is a port, else sni
	From     netip.Addr  // where from; may be invalid
	As       string      // the principal, taken as verified; "" means a client without credentials
	Actors   []string    // of the principal: whom the client certificate beside a user or a token names, or the gateways that state it, the nearest first
	Tokens   *jwt.Tokens // whose service accounts As may be; nil for none. It is no part of a URL
}

// Values is q as the admin port takes it.
func (q Query) Values() url.Values {
	v := url.Values{"name": {q.Host}, "listener": {q.Listener}, "proto": {q.Proto}}
	if q.Port != 0 {
		v.Set("port", strconv.Itoa(int(q.Port)))
	}
	if q.From.IsValid() {
		v.Set("from", q.From.String())
	}
	if q.As != "" {
		v.Set("as", q.As)
	}
	for _, id := range q.Actors {
		v.Add("actor", id)
	}
	return v
}

// queryOf is the Query of v.
func queryOf(v url.Values) (Query, error) {
	q := Query{Host: v.Get("name"), Listener: v.Get("listener"), Proto: v.Get("proto"), As: v.Get("as"), Actors: v["actor"]}
	if p := v.Get("port"); p != "" {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return q, fmt.Errorf("port %q is not a number from 1 to 65535", p)
		}
		q.Port = uint16(n)
	}
	if f := v.Get("from"); f != "" {
		from, err := netip.ParseAddr(f)
		if err != nil {
			return q, fmt.Errorf("from %q is not an IP address", f)
		}
		q.From = from
	}
	return q, nil
}

// An Explanation is the answer to a Query.
type Explanation struct {
	Listener   string                `json:"listener"`
	Caller     string                `json:"caller,omitempty"` // the principal that was asked about; "" for a client without credentials
	Actors     []string              `json:"actors,omitempty"` // of the caller, the nearest first
	Proto      string                `json:"proto"`
	Reason     tunnel.Reason         `json:"reason,omitempty"` // of the refusal; "" where there is a route
	Detail     string                `json:"detail,omitempty"`
	Service    string                `json:"service,omitempty"`
	Pattern    string                `json:"pattern,omitempty"`
	Generation uint64                `json:"generation,omitempty"`
	Policy     *ExplanationPolicy    `json:"policy,omitempty"`    // nil where no policy is about the request
	Limits     *StatusLimit          `json:"limits,omitempty"`    // of the service; nil for none
	Balancing  *ExplanationBalancing `json:"balancing,omitempty"` // nil where there is one endpoint, or none
	Endpoints  []ExplanationEndpoint `json:"endpoints,omitempty"`
	Resolution *Resolution           `json:"resolution,omitempty"` // what DNS answers the client, and the health of what is there; nil unless a client was named
}

// An ExplanationEndpoint is one endpoint in the order it would be tried.
type ExplanationEndpoint struct {
	Address  string   `json:"address"`            // behind a Via, as its last gateway knows it
	Via      []string `json:"via,omitempty"`      // the gateways on the way, nearest first: "connect gw.example.com:443"
	Security string   `json:"security,omitempty"` // of the transport: plain, server-verified or mutual; "" where the endpoint is dialed as it is
	Identity string   `json:"identity,omitempty"` // how the endpoint is told who the client is; "" where it is not
	OwnTLS   bool     `json:"ownTLS,omitempty"`   // TLS that the client begins passes, and the others have that of the gateway
	Problem  string   `json:"problem,omitempty"`  // why it must not be dialed
	Insecure bool     `json:"insecure,omitempty"` // plaintext to it is carried only because of "insecure: true"
	TLSOnly  string   `json:"tlsOnly,omitempty"`  // why plaintext to it is refused with "insecure"; "" where it is carried, or none can come
	Weight   int      `json:"weight,omitempty"`   // its share of new connections beside the others; 0 where there are no weights
	Tunnels  *int64   `json:"tunnels,omitempty"`  // open or being dialed; nil where they are not counted for each endpoint
	Why      string   `json:"why,omitempty"`      // what speaks for it, or against it
}

// An ExplanationBalancing says how the endpoints came to be in their order.
type ExplanationBalancing struct {
	Policy    string `json:"policy"`              // roundRobin, leastConnections or sourceHash
	Client    string `json:"client,omitempty"`    // whose hash counts, or who keeps an endpoint
	StickyFor string `json:"stickyFor,omitempty"` // how long a client keeps its endpoint
	Zone      string `json:"zone,omitempty"`      // the gateway's, whose endpoints are preferred
}

// Explain says what q would meet, by the code that decides for the data path.
func Explain(ctx context.Context, r *tunnel.Router, listeners []Listener, q Query) *Explanation {
	if q.Proto == "" {
		q.Proto = "sni"
		if q.Port != 0 {
			q.Proto = "connect"
		}
		for _, l := range listeners {
			if l.Address == q.Listener && l.Datagrams != nil {
				q.Proto = l.Datagrams.Proto()
				if q.Port != 0 && l.Datagrams.HTTP3 != nil {
					q.Proto = "connect-h3"
				}
			}
		}
	}
	x := &Explanation{Listener: q.Listener, Caller: q.As, Actors: q.Actors, Proto: q.Proto}
	req, err := q.request(listeners, x)
	if err != nil {
		x.refuse(err)
		return x
	}
	if req == nil {
		return x // it is no request yet, which Detail says
	}
	if req.Proto == "quic" || req.Proto == "udp" || req.Proto == "connect-udp" {
		req.Datagrams = &udp.Dialer{}
		if d, ok := r.Dialer.(*tunnel.NetDialer); ok {
			req.Datagrams = &udp.Dialer{Guard: d.Guard}
		}
	}
	route, attempts, err := r.Forecast(ctx, req)
	x.Service, x.Pattern, x.Generation = route.Service, route.Pattern, route.Generation
	if route.Limits != nil {
		limits := limitOf(r.Relay, cmp.Or(route.Backend, route.Service), route.Limits)
		x.Limits = &limits
	}
	x.Policy = explainPolicy(r.Resolver, req, &route)
	for _, a := range attempts {
		ep := ExplanationEndpoint{Address: a.Endpoint.String(), Insecure: a.Endpoint.Insecure}
		if t := a.Endpoint.Transport; t != nil {
			info := t.Info()
			ep.Via, ep.Security, ep.Identity, ep.OwnTLS = info.Hops, info.Security.String(), info.Identity, info.PassesClientTLS
		}
		if a.Err != nil {
			ep.Problem = a.Err.Error()
		}
		if err := a.Endpoint.TLSOnly; err != nil {
			ep.TLSOnly = err.Error()
		}
		x.Endpoints = append(x.Endpoints, ep)
	}
	if known, ok := r.Resolver.(interface {
		Explain(*tunnel.Request, *tunnel.Route) registry.Choice
	}); ok && len(route.Endpoints) > 1 {
		x.balancing(known.Explain(req, &route))
	}
	if err != nil {
		x.refuse(err)
		if known, ok := r.Resolver.(interface{ Table() *registry.Table }); ok && x.Reason == tunnel.NoRoute && known.Table() != nil {
			x.Detail += nearNames(known.Table(), req.Name)
		}
	}
	return x
}

// balancing adds how the endpoints came to be in their order.
func (x *Explanation) balancing(c registry.Choice) {
	x.Balancing = &ExplanationBalancing{Policy: c.Policy, Client: c.Client, Zone: c.Zone}
	if c.StickyFor > 0 {
		x.Balancing.StickyFor = c.StickyFor.String()
	}
	for i := range x.Endpoints { // which are the first ones, that are tried
		ep, of := &x.Endpoints[i], &c.Endpoints[i]
		if ep.Weight, ep.Why = of.Weight, of.Why; of.Tunnels >= 0 {
			ep.Tunnels = &of.Tunnels
		}
	}
}

// nearNames says which names there are beside one that is not there; "" where none
// is like it.
func nearNames(t *registry.Table, name tunnel.Name) string {
	const most = 50_000 // services to look at
	apex, closest, distance, seen := "", "", 3, 0
	for s := range t.Services() {
		if seen++; seen > most {
			break
		}
		for _, p := range s.Names {
			if p.Wildcard {
				if p.Suffix == name {
					apex = fmt.Sprintf("; %s does not include %s itself", p, name)
				}
				continue
			}
			if d := edits.Distance(name.String(), p.Suffix.String(), distance); d < distance {
				closest, distance = p.Suffix.String(), d
			}
		}
	}
	if closest != "" {
		closest = "; closest: " + closest
	}
	return apex + closest
}

func (x *Explanation) refuse(err error) { x.Reason, x.Detail = tunnel.ReasonOf(err), err.Error() }

// request makes the request that the listener's protocol would make.
func (q *Query) request(listeners []Listener, x *Explanation) (*tunnel.Request, error) {
	req := &tunnel.Request{Proto: q.Proto, Listener: q.Listener, Start: time.Now(), Source: netip.AddrPortFrom(q.From, 0)}
	if _, port, err := net.SplitHostPort(strings.TrimPrefix(q.Listener, udp.Scheme)); err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err == nil {
			req.LocalPort = uint16(n)
		}
	}
	if q.As != "" {
		var actor tunnel.Peer // the farthest one at first
		for _, id := range slices.Backward(q.Actors) {
			actor = WithStatedActor(Stated(id, q.Tokens), actor)
		}
		req.Peer = WithStatedActor(Stated(q.As, q.Tokens), actor)
	}
	spoken := false
	for _, l := range listeners {
		if l.Address != q.Listener {
			continue
		}
		if d := l.Datagrams; d != nil && d.Proto() == "udp" {
			if req.Proto, req.Name, req.Port = d.Proto(), d.Service, d.Port; d.To != nil {
				d.To(req)
			}
			x.Proto, x.Listener = req.Proto, req.Listener
			return req, nil
		} else if d != nil {
			spoken = slices.Contains(d.Protos(), q.Proto)
			if d.HTTP3 != nil {
				if name, err := sni.ParseName(q.Host); err == nil && q.Proto == "quic" && d.HTTP3.Owns(name) {
					x.Detail = "QUIC ends here; inside is spoken connect-h3"
					return nil, nil
				}
				if (q.Proto == "connect-h3" || q.Proto == "connect-udp") && q.As == "" && connect.Asks(d.HTTP3.Auth) {
					return nil, tunnel.Refusef(tunnel.NoAuth, "listener %s requires credentials: give a principal", q.Listener)
				}
			}
		}
		// What comes inside TLS may be anything, and TLS by name is TLS.
		req.RequireTLS = l.RequireTLS && q.Proto != "sni" && slices.ContainsFunc(l.Protocols, func(p tunnel.Protocol) bool { return p.Name() == q.Proto })
		for _, p := range flattenProtocols(l.Protocols) {
			switch f := p.(type) {
			case *termination.Protocol:
				name, err := sni.ParseName(q.Host)
				if err != nil && f.Inside(tunnel.Name{}) == nil || q.Proto != "sni" {
					continue
				}
				inside := f.Inside(name)
				if inside == nil && f.Pass {
					continue
				}
				if inside == nil {
					return nil, tunnel.Refusef(tunnel.NoRoute, "listener %s ends TLS for other names alone, and passes none on", q.Listener)
				}
				if plain, ok := inside[0].(termination.Plain); ok {
					req.Name, req.Proto, x.Proto = name, plain.Name(), plain.Name()
					if plain.To != nil {
						plain.To.Direct(req)
					}
					req.TLS = &tunnel.EndedTLS{ServerName: name}
					return req, nil
				}
				x.Detail = "TLS ends here; inside is spoken " + namesOf(inside)
				return nil, nil
			case *tunnel.Fixed:
				f.Direct(req)
				req.Proto, x.Proto, x.Listener, req.RequireTLS = f.Name(), f.Name(), req.Listener, l.RequireTLS
				return req, nil
			case inbound.Sectioned:
				if err := f.Route(req, q.Host); err != nil {
					return nil, err
				}
				x.Proto, x.Listener = req.Proto, req.Listener
				return req, nil
			}
			if off, ok := p.(interface{ Off() bool }); ok && off.Off() {
				continue // it takes nothing at this moment
			}
			if carrier, ok := p.(*h2.Protocol); ok && q.Proto == "connect-udp" && speaks([]tunnel.Protocol{p}, q.Proto) {
				if spoken = true; q.As == "" && connect.Asks(carrier.Auth) {
					return nil, tunnel.Refusef(tunnel.NoAuth, "listener %s requires credentials: give a principal", q.Listener)
				}
			}
			spoken = spoken || p.Name() == q.Proto || p.Name() == "postgres" && q.Proto == "sni" // TLS by name is behind it
			if q.Proto == p.Name() && q.As == "" && wantsCredentials(p) {
				return nil, tunnel.Refusef(tunnel.NoAuth, "listener %s requires credentials: give a principal", q.Listener)
			}
		}
		if !spoken {
			why := tunnel.BadPreamble
			if len(l.Protocols) > 0 {
				switch l.Protocols[0].(type) {
				case *connect.Protocol, *ws.Protocol:
					why = tunnel.BadRequest // pinned: whatever comes is read as a head
				}
			}
			return nil, tunnel.Refusef(why, "listener %s does not speak %s", q.Listener, q.Proto)
		}
		if q.Proto != "sni" && q.Proto != "quic" && !speaks(l.Protocols, q.Proto) {
			req.TLS = &tunnel.EndedTLS{} // which the gateway ends: the service can't see to the caller's identity
		}
	}
	var err error
	switch q.Proto {
	case "sni", "quic":
		req.Name, err = sni.ParseName(q.Host)
	case "proxy":
		if req.Name, err = tunnel.ParseName(q.Host); err != nil {
			err = &tunnel.Error{Reason: tunnel.NoSNI, Err: err}
		}
	case "connect", "connect-h2", "connect-h3", "connect-udp", "hbone", "socks5", "http", "websocket", "ssh":
		var a connect.Authority
		if a, err = connect.ParseAuthority(net.JoinHostPort(q.Host, strconv.Itoa(int(q.Port)))); err == nil {
			req.Name, req.Addr, req.Port = a.Name, a.Addr, a.Port
		} else {
			err = &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
		}
	default:
		return nil, tunnel.Refusef(tunnel.BadPreamble, "no protocol is called %q: there are sni, connect, connect-h2, connect-h3, connect-udp, hbone, socks5, http, websocket, ssh, proxy and quic", q.Proto)
	}
	return req, err
}

// speaks reports whether one of protocols takes requests that are called proto, by itself.
func speaks(protocols []tunnel.Protocol, proto string) bool {
	return slices.ContainsFunc(protocols, func(p tunnel.Protocol) bool {
		carrier, ok := p.(*h2.Protocol)
		return p.Name() == proto || ok && slices.ContainsFunc(carrier.Extended, func(e connect.ExtendedService) bool { return e.Name() == proto })
	})
}

// flattenProtocols returns protocols and those that are spoken inside of them.
func flattenProtocols(protocols []tunnel.Protocol) []tunnel.Protocol {
	var all []tunnel.Protocol
	for _, p := range protocols {
		all = append(all, p)
		if t, ok := p.(*termination.Protocol); ok {
			if t.Pass {
				all = append(all, t.Hello)
			}
			all = append(all, t.Inner()...)
		}
	}
	return all
}

func namesOf(protocols []tunnel.Protocol) string {
	list := make([]string, len(protocols))
	for i, p := range protocols {
		list[i] = p.Name()
	}
	return strings.Join(list, ", ")
}

// wantsCredentials reports whether p asks its clients who they are.
func wantsCredentials(p tunnel.Protocol) bool {
	switch p := p.(type) {
	case *connect.Protocol:
		return connect.Asks(p.Auth)
	case interface{ Asks() bool }: // SOCKS5, and PROXY inside TLS
		return p.Asks()
	case *h2.Protocol:
		return connect.Asks(p.Auth)
	case *ws.Protocol:
		return connect.Asks(p.Auth)
	case *hbone.Protocol:
		return true
	}
	return false
}

// NewGuard returns a guard that knows the addresses cfg listens at, for those
// who ask without opening them.
func NewGuard(cfg Config) (*tunnel.Guard, error) {
	guard := &tunnel.Guard{}
	for _, l := range cfg.Listeners {
		if _, socket := unixsocket.Path(l.Address); socket {
			continue
		}
		if _, passed := activation.Name(l.Address); passed {
			continue // where it is, the running gateway knows
		}
		var addr net.Addr
		var err error
		if hostport, ok := strings.CutPrefix(l.Address, udp.Scheme); ok {
			addr, err = net.ResolveUDPAddr("udp", hostport)
		} else {
			addr, err = net.ResolveTCPAddr("tcp", l.Address)
		}
		if err != nil {
			return nil, fmt.Errorf("listener %s: %w", l.Address, err)
		}
		guard.OwnListener(addr)
	}
	if _, socket := admin.SocketPath(cfg.Admin); cfg.Admin != "" && !socket {
		addr, err := net.ResolveTCPAddr("tcp", cfg.Admin)
		if err != nil {
			return nil, fmt.Errorf("admin port %s: %w", cfg.Admin, err)
		}
		guard.OwnAdmin(addr)
	}
	return guard, nil
}
