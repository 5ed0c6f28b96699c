package registry

import (
	"fmt"
	"slices"

	"culvert.dev/tunnel"
)

// A Gateway is an entry to a network.
type Gateway struct {
	Address    Endpoint // inside its network, with a port
	Public     Endpoint // outside; zero means Address
	Transports []Hop    // what is spoken there, in order of preference, without Addresses; empty means sni alone
	Weight     uint16   // beside the other gateways of its network; 0 means 1
	Check      Check
}

// HopsBy returns hops by protocols and nothing else, for Gateway.Transports.
func HopsBy(protocols ...string) []Hop {
	if len(protocols) == 0 {
		return nil
	}
	hops := make([]Hop, len(protocols))
	for i, protocol := range protocols {
		hops[i].Proto = protocol
	}
	return hops
}

// AddressFrom returns the address of the gateway of network, as seen from network from.
func (g *Gateway) AddressFrom(network, from string) Endpoint {
	if from == network || g.Public == (Endpoint{}) {
		return g.Address
	}
	return g.Public
}

// Supports reports whether the gateway speaks protocol.
func (g *Gateway) Supports(protocol string) bool {
	if len(g.Transports) == 0 {
		return protocol == "sni"
	}
	return slices.ContainsFunc(g.Transports, func(h Hop) bool { return h.Proto == protocol })
}

// Protocols returns what the gateway speaks, in order of preference.
func (g *Gateway) Protocols() []string {
	if len(g.Transports) == 0 {
		return []string{"sni"}
	}
	protocols := make([]string, len(g.Transports))
	for i := range g.Transports {
		protocols[i] = g.Transports[i].Proto
	}
	return protocols
}

// IsCarrier reports whether a gateway can be asked by h for any destination. By "sni"
// and "quic" it reads the name of one in a hello, and for hbone a certificate is needed.
func (h *Hop) IsCarrier() bool {
	switch h.Proto {
	case "connect", "connect-h2", "connect-h3", "websocket", "socks5":
		return true
	case "hbone":
		return h.Certificate != "" || h.KeyName != ""
	}
	return false
}

// HasCarriers reports whether the gateway has any of Carriers.
func (g *Gateway) HasCarriers() bool {
	return slices.ContainsFunc(g.Transports, func(h Hop) bool { return h.IsCarrier() })
}

// Carriers returns the hops, for the gateway at an address of it, by which it is asked
// for requests that it does not get by SNI, where its network has no Via. They are in
// order of preference: where one fails, the next is used.
func (g *Gateway) Carriers(at Endpoint) []Hop {
	var hops []Hop
	for i := range g.Transports {
		if h := &g.Transports[i]; h.IsCarrier() {
			hops = append(hops, h.At(at))
		}
	}
	return hops
}

// At returns h, one of Gateway.Transports, with the address of its gateway.
func (h *Hop) At(ep Endpoint) Hop {
	at := *h
	to := ep.String()
	switch {
	case h.Proto == "websocket" && h.TLS:
		to = "wss://" + to + h.Path
	case h.Proto == "websocket":
		to = "ws://" + to + h.Path
	case h.TLS && (h.Proto == "connect" || h.Proto == "connect-h2"):
		to = "https://" + to
	}
	at.Addresses = []string{to}
	return at
}

// speaksTLS reports whether h, one of Gateway.Transports, is inside of TLS.
func (h *Hop) speaksTLS() bool {
	switch h.Proto {
	case "connect-h3", "hbone":
		return true
	case "connect", "connect-h2", "websocket":
		return h.TLS
	}
	return false
}

// Downgrade returns the first carrier of the gateway that has no TLS, is not Insecure and
// comes after one with TLS: an attacker who blocks the first could read what the second carries.
// It returns nil where there is none.
func (g *Gateway) Downgrade() *Hop {
	secure := false
	for i := range g.Transports {
		h := &g.Transports[i]
		switch {
		case !h.IsCarrier():
		case h.speaksTLS():
			secure = true
		case secure && !h.Insecure:
			return h
		}
	}
	return nil
}

// protection says how a stream to the gateway is protected, by its weakest carrier, and
// whether those that are not Mutual may have plaintext all the same.
func (g *Gateway) protection() (weakest tunnel.Security, permitted bool) {
	weakest, permitted = tunnel.Mutual, true
	for i := range g.Transports {
		h := &g.Transports[i]
		if !h.IsCarrier() {
			continue
		}
		security := h.security(h.speaksTLS())
		weakest = min(weakest, security)
		permitted = permitted && (h.Insecure || security == tunnel.Mutual)
	}
	return weakest, permitted
}

// InsecureGateway returns a gateway of n that is asked by a weak transport, where no
// other gateway can carry what may be plaintext, and nil otherwise.
func (n *Network) InsecureGateway() *WeakHop {
	p := Location{}
	for i := range n.Gateways {
		g := &n.Gateways[i]
		p.Gateways = append(p.Gateways, GatewayHop{Gateway: g, Address: g.AddressFrom(n.Name, ""), insecure: n.Insecure})
	}
	return p.insecureGateway()
}

// addTransports completes the Transports of gateways of another source than the one that
// has how, which may be nil: how they are asked by what they speak. A carrier that is a
// Downgrade is left out.
func (b *builder) addTransports(gateways []Gateway, how *Hop) {
	for i := range gateways {
		g := &gateways[i]
		if how != nil {
			hops := make([]Hop, len(g.Transports))
			for j, h := range g.Transports {
				if hops[j] = h; h.KeyName == "" { // else the source knows more than the protocol
					hops[j] = h.with(how)
				}
			}
			g.Transports = hops
		}
		for h := g.Downgrade(); h != nil; h = g.Downgrade() {
			b.refuse(fmt.Sprintf("transport %s of gateway %q", h.Proto, g.Address), "it", "it has no TLS, and comes after one that has")
			proto := h.Proto
			g.Transports = slices.DeleteFunc(slices.Clone(g.Transports), func(h Hop) bool { return h.Proto == proto && !h.speaksTLS() })
		}
	}
}

// addPublic completes gateways that have no Public, by those of the snapshots.
func addPublic(gateways []Gateway, snapshots []Snapshot) {
	for i := range gateways {
		g := &gateways[i]
		for j := range snapshots {
			for _, p := range snapshots[j].Public {
				if g.Public == (Endpoint{}) && g.Address.Addr == p.Address.Addr() && g.Address.Port == p.Address.Port() {
					g.Public = Endpoint{Addr: p.Public.Addr(), Port: p.Public.Port()}
				}
			}
		}
	}
}

// with returns h, which has a protocol alone, with all else of how.
func (h Hop) with(how *Hop) Hop {
	switch h.Proto {
	case "connect", "connect-h2", "connect-h3", "websocket", "hbone":
		one := *how
		one.Proto, one.TLS = h.Proto, true
		if h.Proto == "hbone" { // which knows its clients by their certificates
			one.Token, one.TokenFile, one.JWTSVID = "", "", nil
			one.User, one.Password, one.CredentialsField = "", "", ""
		}
		return one
	case "socks5":
		if h.Insecure = how.Insecure; h.Insecure {
			h.User, h.Password = how.User, how.Password
		}
	}
	return h
}
