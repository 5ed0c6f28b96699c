package policytest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"culvert.dev/policy"
	"culvert.dev/tunnel"
)

// Dice make worlds of few words, so that most policies are about the request.
type Dice struct {
	*rand.Rand
	Listeners []string // names of listeners, and of their sections, and patterns of them, for policies
	Protocols []string // by which callers ask, for policies
}

// NewDice returns Dice that fall as the seed says.
func NewDice(a, b uint64) Dice {
	return Dice{rand.New(rand.NewPCG(a, b)), []string{":443", ":80", "edge/https", "edge/*"}, []string{"sni", "connect"}}
}

// Words of all worlds.
var (
	Names      = []string{"*", "*.example", "*.pay.example", "a.pay.example", "b.pay.example", "a.example", "pay.example", "*.b.pay.example"}
	IDs        = []string{"spiffe://corp.example/ns/shop/sa/api", "spiffe://corp.example/ns/shop/sa/web", "spiffe://old.example/ns/shop/sa/api", "spiffe://corp.example/edge"}
	Addresses  = []string{"10.1.2.3", "10.1.9.9", "10.9.9.9", "192.0.2.1", "2001:db8::1", "2001:db9::1"}
	Services   = []string{"db", "web"}
	Namespaces = []string{"shop", "pay"}
	Routes     = []string{"r1", "r2"}

	ranges = []string{"10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "0.0.0.0/0", "2001:db8::/32", "::/0", "192.0.2.0/24", "10.1.2.2/31"}
)

// One returns one of the words.
func (d Dice) One(of ...string) string { return of[d.IntN(len(of))] }

// some returns nil most of the time, or one or two of the words.
func (d Dice) some(of ...string) []string {
	if d.IntN(3) > 0 {
		return nil
	}
	list := []string{d.One(of...)}
	if d.IntN(2) == 0 {
		list = append(list, d.One(of...))
	}
	return list
}

func (d Dice) source() policy.Source {
	x := policy.Source{
		SPIFFE: d.some(append([]string{"spiffe://corp.example/ns/shop/*", "spiffe://old.example/*", "spiffe://corp.example/ns/*"}, IDs...)...), Users: d.some("alice", "bob"),
		Namespaces: d.some(Namespaces...), TrustDomains: d.some("corp.example", "old.example"), Networks: d.some("east", "west"),
	}
	if d.IntN(4) == 0 {
		x.Actors = d.some("gw", "spiffe://corp.example/*")
	}
	if d.IntN(4) == 0 {
		x.ServiceAccounts = []policy.ServiceAccount{{Namespace: "shop", Name: d.One("api", "web")}}
	}
	if d.IntN(6) == 0 {
		x.Claims = map[string][]string{"groups": {d.One("dev", "ops")}}
	}
	if d.IntN(3) == 0 {
		for range 1 + d.IntN(3) {
			x.CIDRs = append(x.CIDRs, netip.MustParsePrefix(d.One(ranges...)))
		}
	}
	if d.IntN(3) == 0 { // few sources ask for much at once
		return policy.Source{CIDRs: x.CIDRs, SPIFFE: x.SPIFFE}
	}
	return x
}

// Policy returns a policy whose name says that it is the one with index i.
func (d Dice) Policy(i int) *policy.Policy {
	p := &policy.Policy{
		Name: "p" + string(rune('a'+i)), Origin: fmt.Sprintf("world.yaml:%d", i+1), Tier: policy.Tier(d.IntN(3)), Action: policy.Action(d.IntN(2)), DryRun: d.IntN(5) == 0,
		Targets: policy.Targets{Names: d.some(Names...), Services: d.some(Services...), Namespaces: d.some(Namespaces...), Listeners: d.some(d.Listeners...)},
	}
	if d.IntN(8) == 0 {
		p.Targets.Routes = d.some(Routes...)
	}
	if d.IntN(6) == 0 {
		p.Targets.Workloads = &policy.Selector{Labels: map[string]string{"app": d.One(Services...)}}
	}
	if d.IntN(5) == 0 {
		p.Verb = policy.Verb(d.IntN(4))
	}
	for range d.IntN(4) {
		var r policy.Rule
		if d.IntN(4) > 0 {
			r.Sources = &[]policy.Source{}
			for range d.IntN(4) {
				*r.Sources = append(*r.Sources, d.source())
			}
		}
		if d.IntN(4) == 0 {
			r.Ports = &[]policy.PortRange{}
			if d.IntN(4) > 0 {
				*r.Ports = append(*r.Ports, policy.PortRange{First: 400, Last: uint16(d.IntN(2) * 450)})
			}
		}
		if d.IntN(6) == 0 {
			r.Protocols = &[]string{d.One(d.Protocols...)}
		}
		p.Rules = append(p.Rules, r)
	}
	return p
}

// Workload returns a workload that policies may select.
func (d Dice) Workload() *policy.Workload {
	return &policy.Workload{Namespace: d.One(Namespaces...), Labels: map[string]string{"app": d.One(Services...)}}
}

// PeerOf returns the peer whose client certificate has one of the IDs.
func PeerOf(id string) tunnel.Peer {
	p := tunnel.Peer{ID: id, Method: "mtls", Auth: &tunnel.AuthInfo{TrustDomain: "corp.example"}}
	if id == IDs[2] {
		p.Auth.TrustDomain = "old.example"
	}
	if id != IDs[3] {
		p.Auth.Namespace, p.Auth.ServiceAccount = "shop", id[len(id)-3:]
	}
	return p
}

func (d Dice) peer() tunnel.Peer {
	switch id := d.One(IDs...); d.IntN(4) {
	case 0:
		return tunnel.Peer{}
	case 1:
		return tunnel.Peer{ID: d.One("alice", "bob", IDs[0]), Method: "basic", Auth: &tunnel.AuthInfo{Claims: map[string][]string{"groups": {d.One("dev", "ops", "all")}}}}
	default:
		p := PeerOf(id)
		if d.IntN(3) == 0 {
			p.Auth.Actor = &tunnel.Peer{ID: d.One("gw", "other"), Method: "basic"}
		}
		return p
	}
}

// World returns a world.
func (d Dice) World() *World {
	w := &World{
		Request: &tunnel.Request{
			Proto: d.One(d.Protocols...), Listener: d.One(":443", ":80", "edge/https", "edge/tls"), Peer: d.peer(), DeferIdentity: d.IntN(3) == 0,
			Source: netip.AddrPortFrom(netip.MustParseAddr(d.One(Addresses...)), 1000),
		},
		Target: policy.Target{Service: d.One(Services...), Namespace: d.One("shop", "pay", "")},
		Port:   uint16(400 + d.IntN(100)),
		Verb:   policy.Connect,
	}
	if d.IntN(4) == 0 {
		w.Request.TLS = &tunnel.EndedTLS{}
	}
	if d.IntN(4) > 0 {
		w.Request.Name = tunnel.MustParseName(d.One("a.pay.example", "b.pay.example", "a.example", "pay.example"))
	}
	for range 1 + d.IntN(2) {
		p, err := policy.ParseName(d.One(Names...))
		if err != nil {
			panic(err)
		}
		w.Target.Names = append(w.Target.Names, p)
	}
	if d.IntN(4) == 0 {
		w.Target.Route = d.One(Routes...)
	}
	if d.IntN(3) == 0 {
		w.Target.Workload = d.Workload()
	}
	if d.IntN(8) == 0 {
		w.Verb = policy.Verb(d.IntN(4))
	}
	for i := range 1 + d.IntN(6) {
		w.Policies = append(w.Policies, d.Policy(i))
	}
	return w
}
