package gateway

import (
	"context"
	"errors"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/identity/enroll"
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
	"culvert.dev/registry/peer/join"
	"culvert.dev/tunnel"
)

// newPeers makes what exchanges catalogs with other sites, and what lets them join.
func (g *Gateway) newPeers() error {
	g.site = &join.Site{
		Store:      g.cfg.Identity,
		Configured: func() []peer.Config { return g.settings.Load().Peers },
		Knows: func(domain string) bool {
			knows := g.settings.Load().KnowsTrust
			return knows != nil && knows(domain)
		},
		Gateways: g.ownGateways, Changed: func() { g.usePeers(g.settings.Load()) }, Log: g.log,
	}
	g.peers = &peer.Peers{
		Site: g.cfg.Site, Table: func() *registry.Table { return g.registry.Table() }, NewTransport: g.upstreams.New,
		Gateways: g.ownGateways, Bundle: g.site.Bundle, TakeBundle: g.site.TakeBundle, TrustGeneration: g.site.TrustGeneration,
		Router: g.router, Settled: func() bool { return g.registry.PendingSources() == 0 }, Log: g.log,
	}
	g.handler.handlers[tunnel.MustParseName(peer.Host)] = reservedName{Handler: g.peers}
	g.handler.handlers[tunnel.MustParseName(join.Host)] = reservedName{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		g.site.Serve(ctx, req, func(err error) { g.router.Refuse(req, err) })
	}), Anonymous: true}
	g.authority = &enroll.Authority{Store: g.cfg.Identity, Log: g.log}
	g.handler.handlers[tunnel.MustParseName(enroll.Host)] = reservedName{Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		g.authority.Serve(ctx, req, func(err error) { g.router.Refuse(req, err) })
	}), Anonymous: true}
	if err := peer.Check(g.cfg.Peers); err != nil {
		return err
	}
	g.usePeers(&g.cfg)
	return nil
}

// usePeers has the peers be those of the settings, and those that have joined.
func (g *Gateway) usePeers(c *Config) {
	all := slices.Concat(c.Peers, g.site.Peers())
	if err := g.peers.Configure(all); err != nil { // both were checked
		g.log.Error("cannot use the peers", "error", err.Error())
	}
}

// useSite has the site, and the authority for its devices, be what the settings say, which are
// in force already.
func (g *Gateway) useSite(c *Config) {
	if err := g.authority.Use(c.Enrollment); err != nil {
		g.log.Error("no device can join", "error", err.Error())
	}
	if err := g.site.Use(c.Join); err != nil {
		g.log.Error("no site can join", "error", err.Error())
	}
	kept := ""
	if c.Join != nil && c.Join.State != "" { // the folder is there since site.Use
		kept = filepath.Join(c.Join.State, "connectors.json")
	}
	if err := g.keeper.Use(kept); err != nil {
		g.log.Error("names of connectors are not kept from before", "error", err.Error())
	}
	g.usePeers(c)
	g.peers.Moved()
}

// ownGateways returns those of this site, as others reach them now: with the outside address
// where a router maps the port, and without those that nothing has verified.
func (g *Gateway) ownGateways() (all []peer.Gateway) {
	c := g.settings.Load()
	if c.Join == nil {
		return nil
	}
	for _, one := range c.Join.Gateways {
		if at, err := netip.ParseAddrPort(one.Address); err == nil && c.NAT != nil {
			public, mapped := g.nat.publicOf(at)
			if mapped && !public.IsValid() {
				continue
			}
			if mapped {
				one.Address = public.String()
			}
		}
		all = append(all, one)
	}
	return all
}

// joinTimeout is how long Sites may take.
const joinTimeout = 20 * time.Second

// Sites does what an operator asks for other sites, "invite", "join" or "remove", and for
// devices: "invite-device" or "remove-device".
func (g *Gateway) Sites(ctx context.Context, what string, q url.Values) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	switch what {
	case "invite":
		ttl, err := time.ParseDuration(q.Get("ttl"))
		if err != nil {
			return nil, errors.New("ttl is not a duration such as 1h")
		}
		token, err := g.site.Invite(q["zone"], ttl)
		return map[string]string{"token": token}, err
	case "join":
		name, err := g.site.Join(ctx, g.upstreams.FirstHop(), q.Get("token"), q["zone"])
		return map[string]string{"peer": name}, err
	case "remove":
		name := strings.TrimSpace(q.Get("name"))
		return map[string]string{"peer": name}, g.site.Remove(name)
	case "invite-device":
		ttl, err := time.ParseDuration(q.Get("ttl"))
		if err != nil {
			return nil, errors.New("ttl is not a duration such as 1h")
		}
		uses, err := strconv.Atoi(q.Get("uses"))
		if err != nil {
			return nil, errors.New("uses is not a number")
		}
		token, err := g.authority.Invite(q.Get("name"), q.Get("id"), uses, ttl)
		return map[string]string{"token": token}, err
	case "remove-device":
		name := strings.TrimSpace(q.Get("name"))
		return map[string]string{"device": name}, g.authority.Remove(name)
	}
	return nil, errors.New("there is invite, join, remove, invite-device and remove-device")
}

// Peers returns the source of what other sites offer. It belongs behind all sources that this
// site knows by itself: what these have goes before.
func (g *Gateway) Peers() registry.Source { return g.peers }

// peerGauges yields a number of each peer.
func (g *Gateway) peerGauges(of func(*peer.Status) float64) func(yield func([]string, float64)) {
	return func(yield func([]string, float64)) {
		for _, s := range g.peers.Status() {
			yield([]string{s.Name}, of(&s))
		}
	}
}
