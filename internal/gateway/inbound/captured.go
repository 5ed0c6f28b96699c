package inbound

import (
	"net/netip"

	"culvert.dev/internal/capture"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// captured returns the protocol of connections that rules of this host lead to the listener.
func (l *Listener) captured() *capture.Protocol {
	return &capture.Protocol{ServerName: sni.ServerName, Serves: l.builder.serves, Log: l.builder.Log}
}

// serves is for capture.Protocol.Serves.
func (b *Builder) serves(dst netip.AddrPort, name string) (service string, ok bool) {
	n, err := tunnel.ParseName(name)
	if err != nil || b.Table == nil {
		return "", true
	}
	t := b.Table()
	at, err := t.Find(&tunnel.Request{Proto: capture.ProtocolName, Addr: dst.Addr(), Port: dst.Port()})
	if err != nil {
		return "", true
	}
	named, err := t.Find(&tunnel.Request{Proto: capture.ProtocolName, Name: n, Port: dst.Port()})
	return at.Name, err == nil && named.Name == at.Name
}
