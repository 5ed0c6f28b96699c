package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/connect/hbone"
	"culvert.dev/identity"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A NextHop opens connections over further gateways. The last of them is asked for the
// endpoint, by the name or address that it has there.
type NextHop struct {
	last     tunnel.Dialer // of hops that name no key and no trust
	rotates  *rotation     // in place of last; nil for those
	info     tunnel.TransportInfo
	direct   *tunnel.NetDialer
	literals []tunnel.Endpoint // the first hop's; none where it has a name, too
}

// NextHop returns the transport over hops, in order. Equal lists share one.
func (t *Transports) NextHop(hops []registry.Hop) (*NextHop, error) {
	return t.hops.get(func() (*NextHop, error) { return t.newNextHop(hops) }, append(hopSettings(hops), t.via())...)
}

// hopSettings returns all that makes two lists of hops differ.
func hopSettings(hops []registry.Hop) []any {
	settings := make([]any, 0, 16*len(hops)+2)
	for _, h := range hops {
		var svid []string
		if h.JWTSVID != nil {
			svid = append([]string{h.JWTSVID.ID}, h.JWTSVID.Audience...)
		}
		settings = append(settings, h.Proto, h.Addresses, h.ServerName, string(h.Token), h.TokenFile, svid, h.CredentialsField, h.User, string(h.Password), h.Roots, h.Certificate, string(h.Key), h.Peers, h.InnerPeers, h.Trust, h.KeyName, h.TrustNames, fmt.Sprint(h.ForwardIdentity), fmt.Sprint(h.HTTP2), fmt.Sprint(h.Insecure))
	}
	return settings
}

func (t *Transports) newNextHop(hops []registry.Hop) (*NextHop, error) {
	version := t.hopVersion(hops)
	n, pools, err := t.makeNextHop(hops)
	if err != nil {
		return nil, err
	}
	if version != nil {
		n.rotates = &rotation{transports: t, hops: hops, version: version, used: version(), last: n.last, pools: pools}
		pools = []io.Closer{n.rotates}
	}
	keepOpen(t, n, pools)
	return n, nil
}

// hopVersion returns what counts the changes of the keys and trust that hops name; nil
// where they name none.
func (t *Transports) hopVersion(hops []registry.Hop) func() uint64 {
	store := t.store()
	var keys []*identity.Key
	var trust []*identity.Trust
	for i := range hops {
		if name := hops[i].KeyName; name != "" {
			keys = append(keys, store.Key(name))
		}
		trust = append(trust, t.trust(hops[i].TrustNames)...)
	}
	if len(keys)+len(trust) == 0 {
		return nil
	}
	return func() (sum uint64) {
		for _, k := range keys {
			sum += k.Generation()
		}
		for _, b := range trust {
			sum += b.Generation()
		}
		return sum
	}
}

// A rotation has the carriers of hops whose keys and trust may be replaced. Carriers that
// keep connections were verified by those of their time: after a change new ones dial, and
// the connections of the old ones end with the tunnels on them.
type rotation struct {
	transports *Transports
	hops       []registry.Hop
	version    func() uint64

	mu     sync.Mutex // guards what follows
	closed bool
	used   uint64 // version of last
	last   tunnel.Dialer
	pools  []io.Closer   // of last
	old    [][]io.Closer // of carriers before, that may have connections
}

// dialer returns the carriers of now.
func (r *rotation) dialer() tunnel.Dialer {
	version := r.version()
	r.mu.Lock()
	defer r.mu.Unlock()
	if version == r.used || r.closed {
		return r.last
	}
	n, pools, err := r.transports.makeNextHop(r.hops)
	if err != nil { // it was made of the same hops before
		return r.last
	}
	r.old = append(slices.DeleteFunc(r.old, unused), r.pools)
	if len(r.old) > maxRotated {
		r.old = slices.Delete(r.old, 0, 1) // its connections end with the tunnels on them
	}
	r.used, r.last, r.pools = version, n.last, pools
	return r.last
}

// maxRotated is how many carriers before are kept, so that Close ends their connections.
const maxRotated = 8

// unused reports whether none of pools has a connection.
func unused(pools []io.Closer) bool {
	for _, p := range pools {
		if c, ok := p.(interface{ Conns() int }); !ok || c.Conns() > 0 {
			return false
		}
	}
	return true
}

// Close ends all connections.
func (r *rotation) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	var errs []error
	for _, pools := range append(r.old, r.pools) {
		for _, p := range pools {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// makeNextHop returns a NextHop, and its carriers that keep connections.
func (t *Transports) makeNextHop(hops []registry.Hop) (n *NextHop, pools []io.Closer, err error) {
	n = &NextHop{direct: t.Direct, info: tunnel.TransportInfo{Security: tunnel.Mutual}}
	n.last = firstHopDialer{t}
	for i := range hops {
		hop := &hops[i]
		var gateways gatewayList
		for _, addr := range hop.Addresses {
			own := *hop
			if i < len(hops)-1 {
				own.ForwardIdentity = registry.HopIdentity{} // connections to those before may be shared
			}
			carrier, err := t.newCarrier(&own, addr, n.last)
			if err != nil {
				return nil, nil, err
			}
			if c, ok := carrier.(io.Closer); ok {
				pools = append(pools, c)
			}
			gateways = append(gateways, carrier)
			n.info.Security = min(n.info.Security, hop.Security(addr))
		}
		if len(gateways) == 0 {
			return nil, nil, errors.New("gateway: a hop leads nowhere")
		}
		n.last, n.info.Datagrams = gateways, gateways.carriesDatagrams()
		if i == len(hops)-1 {
			n.info.Identity = describeCaller(&hop.ForwardIdentity)
		}
		n.info.Hops = append(n.info.Hops, hop.Proto+" "+strings.Join(hop.Addresses, " or "))
	}
	n.literals = literals(&hops[0])
	return n, pools, nil
}

// keepOpen has Close close the pools of owner. Of a transport that nobody uses any more
// they are forgotten: their connections end with the streams on them.
func keepOpen[T any](t *Transports, owner *T, pools []io.Closer) {
	if len(pools) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pools == nil {
		t.pools = make(map[io.Closer]struct{})
	}
	for _, c := range pools {
		t.pools[c] = struct{}{}
	}
	runtime.AddCleanup(owner, func(pools []io.Closer) {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, c := range pools {
			delete(t.pools, c)
		}
	}, pools)
}

// literals returns the addresses of h, and none where one of them is a name.
func literals(h *registry.Hop) []tunnel.Endpoint {
	var eps []tunnel.Endpoint
	for _, to := range h.Addresses {
		ap, err := netip.ParseAddrPort(h.HostPort(to))
		if err != nil {
			return nil
		}
		eps = append(eps, tunnel.Endpoint{Addr: ap, Named: true})
	}
	return eps
}

// Dial implements tunnel.Transport.
func (n *NextHop) Dial(ctx context.Context, ep *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	network := "tcp"
	if req.Datagrams != nil {
		network = "udp"
	}
	return n.DialContext(withCaller(hbone.WithRequest(ctx, req), req), network, ep.String())
}

// DialContext implements tunnel.Dialer, for streams that no request has asked for.
func (n *NextHop) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	last := n.last
	if n.rotates != nil {
		last = n.rotates.dialer()
	}
	return last.DialContext(ctx, network, addr)
}

// Check implements tunnel.Transport: it refuses where no address of the first hop may
// be dialed.
func (n *NextHop) Check(*tunnel.Endpoint) (err error) {
	for _, ep := range n.literals {
		if err = n.direct.Check(ep); err == nil {
			return nil
		}
	}
	return err
}

// Info implements tunnel.Transport.
func (n *NextHop) Info() tunnel.TransportInfo { return n.info }

// promised nothing yet, so the next one may be tried where one fails. Where a
// gateway has decided against the request, that decision stands.
type gatewayList []tunnel.Dialer

// DialContext implements tunnel.Dialer.
func (f gatewayList) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	var errs []error
	for i, d := range f {
		c, err := dialWithin(ctx, d, network, addr, len(f)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || isFinal(err) {
			return nil, err
		}
	}
	if len(errs) == 1 {
		return nil, errs[0]
	}
	return nil, &tunnel.Error{Reason: tunnel.ReasonOf(errs[len(errs)-1]), Err: errors.Join(errs...)}
}

// dialWithin dials addr in an equal part of the time that is left: a gateway that
// does not answer must leave some for the next.
func dialWithin(ctx context.Context, d tunnel.Dialer, network, addr string, parts int) (net.Conn, error) {
	if end, ok := ctx.Deadline(); ok && parts > 1 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
		defer cancel()
	}
	return d.DialContext(ctx, network, addr)
}

// isFinal reports whether err is a gateway's refusal of the request itself.
func isFinal(err error) bool {
	e, ok := errors.AsType[*tunnel.Error](err)
	return ok && e.Final
}
