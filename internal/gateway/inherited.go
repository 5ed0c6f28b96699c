package gateway

import (
	"errors"
	"fmt"
	"net"

	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// inherit listens at a socket that systemd has passed.
func (f *listeners) inherit(l *registry.Listener) (net.Listener, error) {
	ln, err := f.g.cfg.Inherited.Listen(l.Inherited)
	if err != nil {
		return nil, err
	}
	if err := suits(ln.Addr(), l); err != nil {
		_ = ln.Close()
		f.g.cfg.Inherited.Release(l.Inherited)
		return nil, err
	}
	if u, ok := ln.(*net.UnixListener); ok {
		return unixsocket.Adopt(u), nil
	}
	return tunnel.Adopt(ln), nil
}

// use is Use, for a listener that stays open. One that does not go with the passed socket
// changes nothing.
func (o *openListener) use(t *registry.Table, l *registry.Listener) error {
	if l.Inherited != "" {
		if err := suits(o.addr(), l); err != nil {
			return fmt.Errorf("%w; what was served before is served on", err)
		}
	}
	return o.Use(t, l)
}

// suits returns why l can't be at a passed socket. What that is, the configuration does not
// say.
func suits(a net.Addr, l *registry.Listener) error {
	var err error
	switch a := a.(type) {
	case *net.TCPAddr:
		switch {
		case l.Settings.PeerCredentials:
			err = errors.New("it is a socket of TCP, and peerCredentials is for Unix sockets: leave it out, or write the path of a socket in ListenStream")
		case len(l.Settings.LocalUsers) > 0 && !a.IP.IsLoopback():
			err = fmt.Errorf("it is at %s, which other hosts may reach, and localUsers is for loopback: write ListenStream=127.0.0.1:PORT or the path of a socket", a)
		}
	case *net.UnixAddr:
		if len(l.Settings.ProxyProtocol) > 0 || l.Settings.LoadBalancer != nil && len(l.Settings.LoadBalancer.From) > 0 {
			err = errors.New("it is a Unix socket, the clients of which have no address: proxyProtocol and loadBalancer.from need a port in ListenStream")
		}
	}
	if err != nil {
		return fmt.Errorf("socket %q of systemd: %w", l.Inherited, err)
	}
	return nil
}
