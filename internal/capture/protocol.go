package capture

import (
	"context"
	"log/slog"
	"net/netip"

	"culvert.dev/tunnel"
)

// A Protocol serves captured connections. The address that the program connected to decides
// where they go; nothing is read from the client before, so that the server may speak first.
type Protocol struct {
	// Resolve completes req, which has the destination's Addr and Port, such as by the name that
	// an address stands for. An error refuses it. May be nil.
	Resolve func(req *tunnel.Request) error

	// Own reports whether an address is one that this process listens at. May be nil.
	Own func(netip.AddrPort) bool

	// ServerName returns the name in a TLS ClientHello, "" for anything else; Serves reports
	// whether the service at an address has a name, and what it is called. A client that names another one is
	// carried on, as the address decides, and logged. Either may be nil.
	ServerName func(preamble []byte) string
	Serves     func(dst netip.AddrPort, name string) (service string, ok bool)

	Log *slog.Logger // nil discards
}

// ProtocolName is the name of Protocol.
const ProtocolName = "captured"

// Name returns ProtocolName.
func (*Protocol) Name() string { return ProtocolName }

// Sniff says Yes to anything.
func (*Protocol) Sniff([]byte) tunnel.Verdict { return tunnel.Yes }

// maxHello is how much of a ClientHello is looked at for the log.
const maxHello = 16 << 10

// ServeConn makes the one Request.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	dst, ok := tunnel.OriginalDestination(c)
	if !ok || p.Own != nil && p.Own(dst) {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.Loop, "captured: the client connected to this process itself (%s): the listener serves connections that rules of capture lead to it", c.LocalAddr())
	}
	req := c.NewRequest(p.Name())
	req.Addr, req.Port, req.LocalPort = dst.Addr(), dst.Port(), dst.Port()
	if p.Resolve != nil {
		if err := p.Resolve(req); err != nil {
			_ = c.Abort()
			return err
		}
	}
	accept := req.Accept
	req.Accept = func() (tunnel.Stream, error) {
		p.compare(c, dst)
		return accept()
	}
	h.ServeTunnel(ctx, req)
	return nil
}

// compare logs a client that asks for another name than that of the service that it gets. What
// the client has sent by now is all that it looks at.
func (p *Protocol) compare(c *tunnel.Conn, dst netip.AddrPort) {
	if p.ServerName == nil || p.Serves == nil || p.Log == nil || c.FillNow(maxHello) != nil || len(c.Buffered()) == 0 {
		return
	}
	name := p.ServerName(c.Buffered())
	if name == "" {
		return
	}
	if service, ok := p.Serves(dst, name); !ok {
		p.Log.Warn("captured TLS names another service; the address decides", "destination", dst, "service", service, "server_name", name)
	}
}
