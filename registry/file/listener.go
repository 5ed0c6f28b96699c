package file

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"culvert.dev/registry"
)

// tableListeners returns listeners as the table has them.
func tableListeners(all []Listener) []*registry.Listener {
	out := make([]*registry.Listener, len(all))
	names := make(map[string]int, len(all))
	for i := range all {
		out[i] = all[i].forTable()
		// Only those at any free port may be several of one address.
		if names[out[i].Name]++; names[out[i].Name] > 1 {
			out[i].Name += fmt.Sprintf("#%d", names[out[i].Name])
		}
	}
	return out
}

// forTable returns l as the table has it.
func (l *Listener) forTable() *registry.Listener {
	s := &registry.ListenerSettings{
		Service: l.Service, Port: l.Port, Protocols: l.Outer(), RefuseSilently: l.Refusal == "close", RequireTLS: l.RequireTLS, EndWithCredential: l.EndWithCredential,
		WebSocket: registry.WebSocketOptions(l.WebSocket), DeferIdentity: l.UnidentifiedCallers == "defer", PeerCredentials: l.PeerCredentials, LocalUsers: l.LocalUsers, STUN: l.STUN,
	}
	if len(l.Protocols) == 0 && len(l.TLS) == 0 && !l.UDP() {
		s.Protocols, s.ImpliedSNI = Protocols[:3], true
	}
	s.SSH = l.SSH.forTable()
	if l.Proxy != nil {
		s.ProxyProtocol = l.Proxy.From
	}
	s.LoadBalancer = l.LoadBalancer.forTable()
	if l.Auth != nil {
		s.Auth = &registry.Auth{Users: l.Auth.Users, Tokens: l.Auth.Tokens, Issuers: l.Auth.Issuers}
	}
	for i := range l.TLS {
		s.TLS = append(s.TLS, l.TLS[i].forTable(l))
	}
	out := &registry.Listener{Name: l.Address, Protocol: registry.Streams, Settings: s, Origin: "the configuration"}
	if l.UDP() {
		out.Protocol = registry.Datagrams
	}
	if name, ok := strings.CutPrefix(l.Address, socketPrefix); ok {
		out.Unix = &registry.UnixSocket{Path: name, Mode: l.Mode, Group: l.Group}
		return out
	}
	if name, ok := strings.CutPrefix(l.Address, inheritedPrefix); ok {
		out.Inherited = name
		return out
	}
	host, digits, _ := net.SplitHostPort(strings.TrimPrefix(l.Address, udpPrefix))
	port, _ := strconv.ParseUint(digits, 10, 16)
	out.Port = uint16(port)
	if addr, err := netip.ParseAddr(host); err == nil {
		out.Address = addr
	} else {
		out.Host = host
	}
	return out
}

// forTable returns t, which is one of l's, as the table has it.
func (t *TLS) forTable(l *Listener) registry.ListenerTLS {
	out := registry.ListenerTLS{
		Protocols: l.inside(t), Names: t.names(), Any: l.any(t), ALPN: t.ALPN,
		TLSTermination: registry.TLSTermination{Keys: t.Keys, TrustNames: t.TrustNames, ClientCertOptional: t.Optional, MinVersion: t.MinVersion},
	}
	if len(t.Keys) == 0 { // it is of no file
		out.ClientCAs, out.Trust = t.ClientCA, t.Trust
		for _, p := range t.Certificates {
			out.Certificates = append(out.Certificates, registry.KeyPair(p))
		}
	}
	return out
}
